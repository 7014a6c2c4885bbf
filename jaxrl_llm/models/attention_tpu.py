"""`attend` for rows of completions as one TPU kernel, forward and backward: JAX's splash attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh

from jaxrl_llm.models.attention import KeyValue, no_prompt, over_mesh
from jaxrl_llm.structs import Array

BLOCK = 512  # queries, and keys, that the kernel holds at once
BITS = 16  # of a query's index within its row


def fits(device: Any, head_dim: int, dtype: str, length: int) -> bool:
    """Whether the kernel runs on this device and takes heads of this size, this dtype, and rows of this length."""
    # float32 would be multiplied in bf16: the kernel has no precision to ask for.
    return device.platform == "tpu" and length < 2 ** (31 - BITS) and head_dim % 64 == 0 and dtype == "bfloat16"


@dataclass(frozen=True)
class _Visible(splash.Mask):
    """What queries [T] see of keys [T + P], the row's first: their completion so far, and the prompt.

    Segment ids alone cannot say so: they are compared for equality, and the prompt is of all segments.
    The kernel skips the blocks that `__getitem__` says are empty, and asks `mask_function` within the
    others, with `q_sequence` for the queries: by default their indices, here also where their
    completion starts. `__getitem__` takes it to start at 0, where it sees most.
    """

    length: int
    prompt: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length + self.prompt

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.length, dtype=np.int32)

    def mask_function(self, query: Array, key: Array) -> Array:
        start, index = query >> BITS, query & (2**BITS - 1)
        return (start <= key) & (key <= index) | (key >= self.length)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        return self.mask_function(self.q_sequence[block[0], None], np.arange(self.shape[1])[None, block[1]])


def attend_tpu(
    query: Array,
    own: KeyValue,
    segment_ids: Array,
    prompt: KeyValue | None = None,
    prompt_mask: Array | None = None,
    *,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """query [B, K, N, R, T, h], own [B, K, N, T, h], prompt [B, K, P, h] and its mask [B, P] -> like query.

    segment_ids [B, N, T]: 0 for padding, else one number for each completion, whose tokens are neighbors.
    A token sees its prompt and its completion so far; padding gives 0.
    """
    k, t = query.shape[1], query.shape[-2]
    block = min(BLOCK, t + -t % 128)
    if prompt is None or prompt_mask is None:
        prompt, prompt_mask = no_prompt(query)

    def padded(x: Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, -x.shape[axis] % block if i == axis % x.ndim else 0) for i in range(x.ndim)])

    row = (padded(query, -2), padded(own.keys, -2), padded(own.values, -2), padded(segment_ids, -1))
    shared = (padded(prompt.keys, -2), padded(prompt.values, -2), padded(prompt_mask, -1))
    one = partial(_attend_row, block=block, interpret=interpret)
    attend = over_mesh(jax.vmap(jax.vmap(one, in_axes=((1, 1, 1, 0), None), out_axes=1)), mesh, k)
    return attend(row, shared)[..., :t, :]


def _attend_row(row: tuple[Array, ...], prompt: tuple[Array, ...], *, block: int, interpret: bool) -> jax.Array:
    """One row and its prompt, both padded to blocks: query [K, R, T, h] and so on -> [K, R, T, h]."""
    (query, keys, values, segment_ids), (prompt_keys, prompt_values, prompt_mask) = row, prompt
    k, r, t, h = query.shape
    masks = splash.MultiHeadMask([_Visible(t, prompt_mask.size)] * (k * r))
    sizes = splash.BlockSizes(block, block, block, block, block, block, block, block)
    kernel: Any = splash.make_splash_mha_single_device(masks, block_sizes=sizes, interpret=interpret)

    index = jnp.arange(t, dtype=jnp.int32)
    # Padding sees itself and the prompt: a row that sees nothing has no softmax.
    first = (segment_ids == 0) | (segment_ids != jnp.roll(segment_ids, 1)) | (index == 0)
    start = jax.lax.cummax(jnp.where(first, index, 0))
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    kernel = type(kernel)(*(i._replace(q_sequence=start << BITS | index) for i in infos), **kernel.kwargs)

    scaled = (query * jnp.asarray(h**-0.5, query.dtype)).reshape(k * r, t, h)
    keys = jnp.concatenate([keys, prompt_keys], axis=1)
    values = jnp.concatenate([values, prompt_values], axis=1)
    real = jnp.concatenate([jnp.ones_like(index), prompt_mask.astype(jnp.int32)])
    out = kernel(scaled, keys, values, splash.SegmentIds(jnp.ones_like(index), real))
    return jnp.where(segment_ids[None, :, None] > 0, out, 0).reshape(k, r, t, h)  # no gradient comes from padding
