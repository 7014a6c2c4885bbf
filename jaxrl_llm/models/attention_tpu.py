"""Attention of completion rows on TPUs, by JAX's splash attention kernel (forward and backward)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.models.attention import KeyValue, empty_prompt, shard_kernel
from jaxrl_llm.structs import Array

MAX_BLOCK = 512  # largest number of queries, and of keys, in a block of the kernel
# The kernel gets one int32 per query. The low INDEX_BITS hold the index of the last token that the query sees, and the
# higher bits the index of the first token.
INDEX_BITS = 16


def fits(device: Any, head_dim: int, dtype: str, length: int) -> bool:
    """Returns whether the kernel supports this device, head size, dtype and row length."""
    # float32 is excluded, because the kernel has no precision argument and would multiply in bfloat16. The length is
    # bounded, because start << INDEX_BITS must be a positive int32.
    return device.platform == "tpu" and length < 2 ** (31 - INDEX_BITS) and head_dim % 64 == 0 and dtype == "bfloat16"


class AttentionLimits(NamedTuple):
    """Limits of attention besides causality: the window of tokens that a token sees, and the largest score."""

    window: int = 0  # number of tokens that a token sees, itself included; 0 = unlimited
    soft_cap: float = 0.0  # bound of scores: soft_cap * tanh(score / soft_cap); 0 = unbounded
    # Index [B, N, T] of the last token that a token sees, at most `max_lookahead` after it; None = the token itself.
    # Only for rows without a prompt.
    last_visible: Array | None = None
    max_lookahead: int = 0


def attend_tpu(
    query: Array,
    row: KeyValue,
    segment_ids: Array,
    prompt: KeyValue | None = None,
    prompt_mask: Array | None = None,
    *,
    limits: AttentionLimits,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention [B, K, N, R, T, h] of a query [B, K, N, R, T, h] to its row and its prompt, by the TPU kernel.

    row: keys and values [B, K, N, T, h]. segment_ids [B, N, T]: number of each token's completion, 0 for padding, where
    the output is 0; the tokens of a completion are contiguous. prompt: keys and values [B, K, P, h], None without a
    prompt. prompt_mask: True on real prompt tokens [B, P]. A token sees its prompt, itself and the earlier tokens of
    its completion. interpret: whether to emulate the kernel, for tests without a TPU.
    """
    k, t = query.shape[1], query.shape[-2]
    # Blocks are multiples of 128, the lanes of a TPU register.
    block = min(MAX_BLOCK, t + -t % 128)
    if prompt is None or prompt_mask is None:
        prompt, prompt_mask = empty_prompt(query)

    def padded(x: Array, token_axis: int) -> jax.Array:
        """Pads the token axis to a multiple of the block."""
        padding = -x.shape[token_axis] % block
        return jnp.pad(x, [(0, padding if axis == token_axis % x.ndim else 0) for axis in range(x.ndim)])

    row_arrays = (padded(query, -2), padded(row.keys, -2), padded(row.values, -2), padded(segment_ids, -1))
    row_arrays += () if limits.last_visible is None else (padded(limits.last_visible, -1),)
    prompt_arrays = (padded(prompt.keys, -2), padded(prompt.values, -2), padded(prompt_mask, -1))
    attend_row = partial(_attend_row, block=block, limits=limits._replace(last_visible=None), interpret=interpret)
    # The inner vmap runs over the rows of a prompt, and the outer vmap over prompts. For the inner vmap, query, keys
    # and values are [K, N, ...], and all other row arrays [N, ...].
    row_axes = (1, 1, 1) + (0,) * (len(row_arrays) - 3)
    attend_rows = jax.vmap(attend_row, in_axes=(row_axes, None), out_axes=1)
    attend = shard_kernel(jax.vmap(attend_rows), mesh, k)
    return attend(row_arrays, prompt_arrays)[..., :t, :]


def _attend_row(
    row: tuple[Array, ...], prompt: tuple[Array, ...], *, block: int, limits: AttentionLimits, interpret: bool
) -> jax.Array:
    """Returns attention [K, R, T, h] of one row with its prompt, both padded to blocks."""
    # Imported here, because Pallas's compiler for TPUs takes a third of a second, which other platforms need not wait.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    from jaxrl_llm.models.splash_mask import RowMask

    query, keys, values, segment_ids, *last_visible = row
    prompt_keys, prompt_values, prompt_mask = prompt
    k, r, t, h = query.shape
    # All heads have the same mask, which is static: the kernel finds the empty blocks at compile time.
    mask = RowMask(t, prompt_mask.size, limits.window, limits.max_lookahead, INDEX_BITS)
    masks = splash.MultiHeadMask([mask] * (k * r))
    block_sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel: Any = splash.make_splash_mha_single_device(
        masks, block_sizes=block_sizes, attn_logits_soft_cap=limits.soft_cap or None, interpret=interpret
    )

    # `start` and `end` are the first and the last index in the row that each token sees.
    token_index = jnp.arange(t, dtype=jnp.int32)
    # Each padding token counts as a completion of one token, because the softmax needs at least one visible key.
    starts_completion = (segment_ids == 0) | (segment_ids != jnp.roll(segment_ids, 1)) | (token_index == 0)
    start = jax.lax.cummax(jnp.where(starts_completion, token_index, 0))
    end = token_index
    if last_visible:
        # The padding of blocks has last_visible 0; it must see itself.
        end = jnp.maximum(last_visible[0], token_index)
        start = jnp.maximum(start, token_index - limits.window + 1) if limits.window else start
    # The starts of completions are known only at run time, so they replace the static q_sequence of `RowMask`.
    static_infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    mask_infos = [info._replace(q_sequence=start << INDEX_BITS | end) for info in static_infos]
    kernel = type(kernel)(*mask_infos, **kernel.kwargs)

    # If attention has a window, move the padding of a prompt from its end to its start. The index of a key then tells
    # its distance from the completion, which a static mask needs.
    if limits.window and prompt_mask.size:
        padding = jnp.argmax(prompt_mask[::-1])
        prompt_keys, prompt_values = (jnp.roll(x, padding, axis=1) for x in (prompt_keys, prompt_values))
        prompt_mask = jnp.roll(prompt_mask, padding)
    keys = jnp.concatenate([keys, prompt_keys], axis=1)
    values = jnp.concatenate([values, prompt_values], axis=1)
    # Segment ids only hide the prompt's padding: all queries are in segment 1, and hidden keys in segment 0.
    key_segments = jnp.concatenate([jnp.ones_like(token_index), prompt_mask.astype(jnp.int32)])
    kernel_segments = splash.SegmentIds(jnp.ones_like(token_index), key_segments)
    attended = kernel(query.reshape(k * r, t, h), keys, values, kernel_segments)
    # The output at padding is set to 0, so that padding has no gradient.
    return jnp.where(segment_ids[None, :, None] > 0, attended, 0).reshape(k, r, t, h)
