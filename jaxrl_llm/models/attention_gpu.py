"""Attention of completion rows on NVIDIA GPUs, by cuDNN's flash attention (forward and backward) through `jax.nn`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.models.attention import KeyValue, Visible, empty_prompt, shard_kernel
from jaxrl_llm.structs import Array

# Lengths are padded to a multiple of this, because cuDNN accepts no odd length with a mask.
LENGTH_MULTIPLE = 64


def is_ampere_or_newer(device: Any) -> bool:
    """Returns whether a device is an NVIDIA GPU of compute capability 8.0 or more."""
    capability = getattr(device, "compute_capability", "")
    return device.platform == "gpu" and capability[:1].isdigit() and float(capability) >= 8.0


def fits(device: Any, head_dim: int, dtype: str, soft_cap: float) -> bool:
    """Returns whether cuDNN's kernel supports this device, head size, dtype and soft cap of scores (0 = none)."""
    # cuDNN's kernel has no version for float32 or for soft-capped scores.
    return is_ampere_or_newer(device) and head_dim % 8 == 0 and head_dim <= 128 and dtype == "bfloat16" and not soft_cap


def attend_gpu(
    query: Array,
    row: KeyValue,
    segment_ids: Array,
    visible: Visible,
    prompt: KeyValue | None = None,
    *,
    mesh: Mesh | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Returns attention [B, K, N, R, T, h] of a query [B, K, N, R, T, h] to its row and its prompt, computed by cuDNN.

    Shapes: B prompts, K key-value heads, N rows of each prompt, R query heads of a key-value head, T tokens of a row,
    P tokens of a prompt, h numbers of a head. A row may hold several completions.
    row: keys and values [B, K, N, T, h]. segment_ids [B, N, T]: index of each token's completion in its row, from 1; 0
    for padding, where the output is 0. visible: masks of the rows. prompt: keys and values [B, K, P, h], None without a
    prompt. implementation: "xla" computes the same on any device, for tests.
    """
    prompt_visible = visible.prompt
    if prompt is None or prompt_visible is None:
        prompt, mask = empty_prompt(query)
        prompt_visible = mask[:, None, None]
    attend = shard_kernel(partial(_attend, implementation=implementation), mesh, kv_heads=query.shape[1])
    return attend((query, *row, segment_ids, visible.row), (*prompt, prompt_visible))


def _attend(
    rows: tuple[Array, ...], prompts: tuple[Array, ...], *, implementation: Literal["cudnn", "xla"]
) -> jax.Array:
    """Returns attention [B, K, N, R, T, h] on one device. cuDNN needs arrays [rows, tokens, heads, h].

    rows: query, keys, values, segment ids and mask of the rows. prompts: keys, values and mask of the prompts.
    """
    (query, keys, values, segment_ids, row_visible), (prompt_keys, prompt_values, prompt_visible) = rows, prompts
    b, k, n, r, t, h = query.shape  # prompts, key heads, rows, query heads per key head, tokens, head size
    p = prompt_visible.shape[-1]  # tokens of a prompt
    query_padding, key_padding = -t % LENGTH_MULTIPLE, -(t + p) % LENGTH_MULTIPLE

    def pad_length(array: Array, padding: int) -> jax.Array:
        """Pads the token axis of an array [rows, tokens, heads, h]."""
        return jnp.pad(array, ((0, 0), (0, padding), (0, 0), (0, 0)))

    def row_with_prompt(row: Array, prompt: Array) -> jax.Array:
        """Returns keys or values of each row and its prompt: [rows, tokens of row and prompt, heads, h]."""
        # The prompt is copied for each row, because cuDNN cannot share keys between rows.
        prompt = jnp.broadcast_to(prompt[:, :, None], (b, k, n, p, h))
        return jnp.concatenate([row, prompt], axis=3).transpose(0, 2, 3, 1, 4).reshape(b * n, t + p, k, h)

    prompt_visible = jnp.broadcast_to(prompt_visible, (b, n, t, p))
    visible = jnp.concatenate([row_visible, prompt_visible], axis=-1).reshape(b * n, 1, t, t + p)
    output = jax.nn.dot_product_attention(
        pad_length(query.transpose((0, 2, 4, 1, 3, 5)).reshape(b * n, t, k * r, h), query_padding),
        pad_length(row_with_prompt(keys, prompt_keys), key_padding),
        pad_length(row_with_prompt(values, prompt_values), key_padding),
        # Padded queries see nothing. Their output is cut off below.
        mask=jnp.pad(visible, ((0, 0), (0, 0), (0, query_padding), (0, key_padding))),
        scale=1.0,  # The query is already scaled.
        implementation=implementation,
    )
    output = output[:, :t].reshape((b, n, t, k, r, h)).transpose((0, 3, 1, 4, 2, 5))
    # The output at padding is set to 0, so that padding has no gradient.
    return jnp.where(segment_ids[:, None, :, None, :, None] > 0, output, 0)
