"""Softmax attention of completion rows to their own tokens and to the prompt of their group.

Shapes: B prompts, N rows per prompt, T tokens per row, K key heads, R query heads per key head, head size h.
Keys are stored head-major, so that each product is a batched matrix product without a transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_llm import sharding
from jaxrl_llm.structs import Array


class KeyValue(NamedTuple):
    """Keys and values, of prompts [B, K, P, h] or of rows [B, K, N, S, h]."""

    keys: Array
    values: Array


def attend(
    query: Array,
    own: KeyValue,
    own_visible: Array,
    prompt: KeyValue | None = None,
    prompt_mask: Array | None = None,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
    """Computes softmax attention of query [B, K, N, R, T, h] to its row and its prompt -> the same shape.

    own [B, K, N, S, h] has the mask own_visible [B, N, T, S]; prompt [B, K, P, h] has the mask prompt_mask [B, P].
    Scores and softmax are float32.
    """
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    hidden = jnp.finfo(jnp.float32).min  # not -inf: a query without a visible key would give NaN
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    if query.shape[4] == 1:
        # Decoding. With the keys first, a CPU need not rearrange them for every token. The barrier keeps its compiler
        # from turning the product around, together with the transpose that follows.
        scored = product("bknsh,bknrh->bknsr", own.keys, query[..., 0, :])
        scored = jax.lax.platform_dependent(scored, cpu=jax.lax.optimization_barrier, default=lambda x: x)
        scored = jnp.swapaxes(scored, -1, -2)[..., None, :]
    else:
        scored = product("bknrth,bknsh->bknrts", query, own.keys)
    scores = [jnp.where(own_visible[:, None, :, None], scored, hidden)]
    if prompt is not None and prompt_mask is not None:
        shared = product("bknrth,bkph->bknrtp", query, prompt.keys)
        scores.append(jnp.where(prompt_mask[:, None, None, None, None], shared, hidden))
    # One maximum for both parts makes one softmax. The result does not depend on it, so it needs no gradient.
    top = jnp.max(jnp.stack([jnp.max(s, axis=-1) for s in scores]), axis=0)[..., None]
    weights = [jnp.exp(s - jax.lax.stop_gradient(top)) for s in scores]
    total = sum(jnp.sum(w, axis=-1, keepdims=True) for w in weights)
    out = product("bknrts,bknsh->bknrth", weights[0].astype(query.dtype), own.values)
    if prompt is not None:
        out = out + product("bknrtp,bkph->bknrth", weights[1].astype(query.dtype), prompt.values)
    return (out / total).astype(query.dtype)


def causal_within(segment_ids: Array) -> jax.Array:
    """Causal mask [B, N, T, T] within rows: a token sees itself and earlier tokens of equal segment_ids [B, N, T]."""
    causal = jnp.tril(jnp.ones((segment_ids.shape[-1],) * 2, bool))
    return causal[None, None] & (segment_ids[..., :, None] == segment_ids[..., None, :])


def no_prompt(query: Array) -> tuple[KeyValue, jax.Array]:
    """Keys, values and mask of prompts of length 0, for query [B, K, N, R, T, h]."""
    b, k, *_, h = query.shape
    return KeyValue(*(jnp.zeros((b, k, 0, h), query.dtype),) * 2), jnp.zeros((b, 0), bool)


def over_mesh(kernel: Callable[..., jax.Array], mesh: Mesh | None, kv_heads: int) -> Callable[..., jax.Array]:
    """Runs `kernel((query, keys, values, segment_ids), (keys, values, mask))` of rows and prompts on each shard.

    The compiler cannot partition a kernel, so `shard_map` does. Prompts are sharded over data and fsdp; key heads
    over tensor, if the axis size divides their number.
    """
    if mesh is None:
        return kernel
    heads = sharding.heads_spec(kv_heads, mesh)
    rows = P(("data", "fsdp"))
    specs = ((heads, heads, heads, rows), (heads, heads, rows))
    return jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)


def head_major(query: Array, key: Array, value: Array) -> tuple[jax.Array, KeyValue]:
    """A layer's projections [B, N, T, heads, h] -> query [B, K, N, R, T, h], keys and values [B, K, N, T, h]."""
    b, n, t, kv_heads, size = key.shape
    query = query.reshape(b, n, t, kv_heads, -1, size).transpose(0, 3, 1, 4, 2, 5)
    return query, KeyValue(key.transpose(0, 3, 1, 2, 4), value.transpose(0, 3, 1, 2, 4))


def token_major(attended: Array) -> jax.Array:
    """[B, K, N, R, T, h] -> [B, N, T, heads, h]."""
    b, _, n, _, t, size = attended.shape
    return attended.transpose(0, 2, 4, 1, 3, 5).reshape(b, n, t, -1, size)


def rotary(positions: Array, size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [B, N, T, size / 2] of rotary position embedding (arXiv 2104.09864)."""
    frequencies = 1.0 / (theta ** (jnp.arange(size // 2, dtype=jnp.float32) / (size // 2)))
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, angles: tuple[Array, Array]) -> jax.Array:
    """Applies `rotary`'s cosine and sine to x [B, N, T, heads, h]. Pairs dimension i with i + h / 2."""
    cos, sin = (a[..., None, :] for a in angles)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
