"""`attend` for rows of completions with one TPU kernel (forward and backward): JAX's splash attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh

from jaxrl_llm.models.attention import KeyValue, no_prompt, over_mesh
from jaxrl_llm.structs import Array

BLOCK = 512  # queries, and keys, per kernel block
# Number of bits for a query's index within its row; the bits above hold the start of its completion.
BITS = 16


def fits(device: Any, head_dim: int, dtype: str, length: int) -> bool:
    """Whether the kernel runs on this device with this head size, dtype and row length."""
    # float32 is left out, because the kernel has no precision argument and would multiply in bf16.
    # start << BITS must stay a positive int32.
    return device.platform == "tpu" and length < 2 ** (31 - BITS) and head_dim % 64 == 0 and dtype == "bfloat16"


class AttentionLimits(NamedTuple):
    """AttentionLimits of attention; 0: none."""

    window: int = 0  # tokens that a token sees, itself included
    soft_cap: float = 0.0  # bound of scores: soft_cap * tanh(score / soft_cap)
    # Index [B, N, T] of the last token that a token sees, at most `ahead` after it; only for rows without a prompt.
    reach: Array | None = None
    ahead: int = 0


@dataclass(frozen=True)
class _Visible(splash.Mask):
    """Mask of queries [T] over keys [T + P], the row's before the prompt's. With a window, prompts end at P.

    ahead: there is no prompt, and `mask_function` gets the first and the last key that a query sees.

    A query sees its completion up to itself, and the whole prompt. Segment ids cannot express this: the kernel
    compares them for equality, and the prompt belongs to every segment.
    The kernel skips the blocks that are empty in `__getitem__`. In the other blocks it calls `mask_function` with
    the values of `q_sequence`: the query's index, and at run time also the start of its completion.
    `__getitem__` has all keys that a query may see, wherever its completion starts.
    """

    length: int
    prompt: int
    window: int
    ahead: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length + self.prompt

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.length, dtype=np.int32)

    def mask_function(self, query: Any, key: Any) -> Any:
        start, index = query >> BITS, query & (2**BITS - 1)
        if self.ahead:
            return (start <= key) & (key <= index)
        return self._seen(start, index - start, index, key)

    def _seen(self, start: Any, position: Any, index: Any, key: Any) -> Any:
        """Whether a query sees a key. `index` and `key` count in the row, `position` in the query's completion."""
        in_completion, in_prompt = (start <= key) & (key <= index), key >= self.length
        if self.window:
            in_completion = in_completion & (key > index - self.window)
            in_prompt = in_prompt & (key - self.shape[1] > position - self.window)
        return in_completion | in_prompt

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        index, key = self.q_sequence[block[0], None], np.arange(self.shape[1])[None, block[1]]
        return self._seen(0, 0, index, key) | (index < key) & (key <= index + self.ahead)


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
    """Attends with the TPU's kernel: query [B, K, N, R, T, h], row [B, K, N, T, h] -> the shape of query.

    prompt [B, K, P, h], prompt_mask [B, P].
    segment_ids [B, N, T]: a number per completion, 0 for padding. The tokens of a completion are contiguous.
    A token sees its prompt, itself and the earlier tokens of its completion. The output at padding is 0.
    """
    k, t = query.shape[1], query.shape[-2]
    # Blocks are multiples of 128, the lanes of a TPU register.
    block = min(BLOCK, t + -t % 128)
    if prompt is None or prompt_mask is None:
        prompt, prompt_mask = no_prompt(query)

    def padded(x: Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, -x.shape[axis] % block if i == axis % x.ndim else 0) for i in range(x.ndim)])

    row_arrays = (padded(query, -2), padded(row.keys, -2), padded(row.values, -2), padded(segment_ids, -1))
    row_arrays += () if limits.reach is None else (padded(limits.reach, -1),)
    prompt_arrays = (padded(prompt.keys, -2), padded(prompt.values, -2), padded(prompt_mask, -1))
    attend_row = partial(_attend_row, block=block, limits=limits._replace(reach=None), interpret=interpret)
    axes = (1, 1, 1) + (0,) * (len(row_arrays) - 3)
    attend = over_mesh(jax.vmap(jax.vmap(attend_row, in_axes=(axes, None), out_axes=1)), mesh, k)
    return attend(row_arrays, prompt_arrays)[..., :t, :]


def _attend_row(
    row: tuple[Array, ...], prompt: tuple[Array, ...], *, block: int, limits: AttentionLimits, interpret: bool
) -> jax.Array:
    """Attention of one row and its prompt, both padded to blocks: query [K, R, T, h] -> [K, R, T, h]."""
    (query, keys, values, segment_ids, *reach), (prompt_keys, prompt_values, prompt_mask) = row, prompt
    k, r, t, h = query.shape
    # All heads have the same mask. It is static: the kernel finds its empty blocks when it is compiled.
    masks = splash.MultiHeadMask([_Visible(t, prompt_mask.size, limits.window, limits.ahead)] * (k * r))
    sizes = splash.BlockSizes(block, block, block, block, block, block, block, block)
    kernel: Any = splash.make_splash_mha_single_device(
        masks, block_sizes=sizes, attn_logits_soft_cap=limits.soft_cap or None, interpret=interpret
    )

    index = jnp.arange(t, dtype=jnp.int32)
    # A padding token is a completion of one token: the softmax needs at least one visible key.
    first = (segment_ids == 0) | (segment_ids != jnp.roll(segment_ids, 1)) | (index == 0)
    start = jax.lax.cummax(jnp.where(first, index, 0))
    end = index
    if reach:
        # Padding of the kernel's blocks sees itself.
        end = jnp.maximum(reach[0], index)
        start = jnp.maximum(start, index - limits.window + 1) if limits.window else start
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    # The completions' starts are known only at run time, so they replace the static q_sequence of `_Visible`.
    kernel = type(kernel)(*(i._replace(q_sequence=start << BITS | end) for i in infos), **kernel.kwargs)

    # Its padding goes from the end of a prompt to its beginning: then a key's place alone tells its distance from the
    # completion, which a static mask needs.
    if limits.window and prompt_mask.size:
        behind = jnp.argmax(prompt_mask[::-1])
        prompt_keys, prompt_values = (jnp.roll(x, behind, axis=1) for x in (prompt_keys, prompt_values))
        prompt_mask = jnp.roll(prompt_mask, behind)
    keys = jnp.concatenate([keys, prompt_keys], axis=1)
    values = jnp.concatenate([values, prompt_values], axis=1)
    # Segment ids only hide the prompt's padding: all queries are in segment 1, hidden keys in 0.
    real = jnp.concatenate([jnp.ones_like(index), prompt_mask.astype(jnp.int32)])
    out = kernel(query.reshape(k * r, t, h), keys, values, splash.SegmentIds(jnp.ones_like(index), real))
    # Padding is set to 0, so that it gives no gradient.
    return jnp.where(segment_ids[None, :, None] > 0, out, 0).reshape(k, r, t, h)
