"""`attend` for rows of completions with cuDNN's flash attention (forward and backward), through `jax.nn`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.models.attention import KeyValue, Visible, no_prompt, over_mesh
from jaxrl_llm.structs import Array

# Lengths are padded to a multiple of it: cuDNN accepts no odd length with a mask.
TILE = 64


def is_ampere(device: Any) -> bool:
    """Whether a device is an NVIDIA GPU of compute capability 8.0 or more."""
    capability = getattr(device, "compute_capability", "")
    return device.platform == "gpu" and capability[:1].isdigit() and float(capability) >= 8.0


def fits(device: Any, head_dim: int, dtype: str, soft_cap: float) -> bool:
    """Whether cuDNN's kernel runs on this device with these heads and scores."""
    # cuDNN's kernel has no version for float32 or for bounded scores.
    return is_ampere(device) and head_dim % 8 == 0 and head_dim <= 128 and dtype == "bfloat16" and not soft_cap


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
    """Attends with cuDNN: query [B, K, N, R, T, h], row [B, K, N, T, h], prompt [B, K, P, h] -> the shape of query.

    segment_ids [B, N, T]: a number per completion, 0 for padding. The output at padding is 0.
    """
    prompt_visible = visible.prompt
    if prompt is None or prompt_visible is None:
        prompt, mask = no_prompt(query)
        prompt_visible = mask[:, None, None]
    attend = over_mesh(partial(_attend, implementation=implementation), mesh, kv_heads=query.shape[1])
    return attend((query, *row, segment_ids, visible.row), (*prompt, prompt_visible))


def _attend(
    rows: tuple[Array, ...], prompts: tuple[Array, ...], *, implementation: Literal["cudnn", "xla"]
) -> jax.Array:
    (query, keys, values, segment_ids, row_visible), (prompt_keys, prompt_values, prompt_visible) = rows, prompts
    b, k, n, r, t, h = query.shape
    p = prompt_visible.shape[-1]
    more_queries, more_keys = -t % TILE, -(t + p) % TILE
    length = lambda more: ((0, 0), (0, more), (0, 0), (0, 0))  # noqa: E731

    def row_major(row: Array, prompt: Array) -> jax.Array:
        # CuDNN cannot share keys between rows.
        prompt = jnp.broadcast_to(prompt[:, :, None], (b, k, n, p, h))
        return jnp.concatenate([row, prompt], axis=3).transpose(0, 2, 3, 1, 4).reshape(b * n, t + p, k, h)

    prompt_visible = jnp.broadcast_to(prompt_visible, (b, n, t, p))
    visible = jnp.concatenate([row_visible, prompt_visible], axis=-1).reshape(b * n, 1, t, t + p)
    out = jax.nn.dot_product_attention(
        jnp.pad(query.transpose(0, 2, 4, 1, 3, 5).reshape(b * n, t, k * r, h), length(more_queries)),
        jnp.pad(row_major(keys, prompt_keys), length(more_keys)),
        jnp.pad(row_major(values, prompt_values), length(more_keys)),
        # False: padded queries see nothing. Their output is cut off below.
        mask=jnp.pad(visible, ((0, 0), (0, 0), (0, more_queries), (0, more_keys))),
        # The query has it.
        scale=1.0,
        implementation=implementation,
    )
    out = out[:, :t].reshape(b, n, t, k, r, h).transpose(0, 3, 1, 4, 2, 5)
    # Padding is set to 0, so that it gives no gradient.
    return jnp.where(segment_ids[:, None, :, None, :, None] > 0, out, 0)
