"""Softmax attention of completion rows to their own tokens and to the prompt of their group.

Shapes: B prompts, N rows per prompt, T tokens per row, K key heads, R query heads per key head, head size h.
Keys are stored head-major, so that each product is a batched matrix product without a transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_llm.machine import sharding
from jaxrl_llm.structs import Array


class KeyValue(NamedTuple):
    """Keys and values, of prompts [B, K, P, h] or of rows [B, K, N, S, h]."""

    keys: Array
    values: Array


class Visible(NamedTuple):
    """The keys that a token of a row sees."""

    row: Array  # [B, N, T, S] bool, of its row
    prompt: Array | None = None  # [B, N, T, P] bool, of its prompt; [B, 1, 1, P], if all tokens see the same ones


def attend(
    query: Array,
    row: KeyValue,
    visible: Visible,
    prompt: KeyValue | None = None,
    *,
    soft_cap: float = 0.0,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
    """Computes softmax attention of query [B, K, N, R, T, h] to its row and its prompt -> the same shape.

    Keys and values are row [B, K, N, S, h] and prompt [B, K, P, h]. A score is the product of query and key, bounded
    by soft_cap * tanh(score / soft_cap); 0: not bounded. Scores and softmax are float32.
    """
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    # The lowest finite number hides a key, because with -inf a query without a visible key would give NaN.
    hidden = jnp.finfo(jnp.float32).min
    if query.shape[4] == 1:
        # This is decoding. The keys come first, so that a CPU need not rearrange them for every token. The barrier
        # keeps the compiler from turning the product around, together with the transpose that follows.
        scored = product("bknsh,bknrh->bknsr", row.keys, query[..., 0, :])
        scored = jax.lax.platform_dependent(scored, cpu=jax.lax.optimization_barrier, default=lambda x: x)
        scored = jnp.swapaxes(scored, -1, -2)[..., None, :]
    else:
        scored = product("bknrth,bknsh->bknrts", query, row.keys)
    scores = [jnp.where(visible.row[:, None, :, None], bounded(scored, soft_cap), hidden)]
    if prompt is not None and visible.prompt is not None:
        shared = product("bknrth,bkph->bknrtp", query, prompt.keys)
        scores.append(jnp.where(visible.prompt[:, None, :, None], bounded(shared, soft_cap), hidden))
    # One maximum for both parts makes one softmax. The result does not depend on it, so it needs no gradient.
    top = jnp.max(jnp.stack([jnp.max(s, axis=-1) for s in scores]), axis=0)[..., None]
    weights = [jnp.exp(s - jax.lax.stop_gradient(top)) for s in scores]
    total = sum(jnp.sum(w, axis=-1, keepdims=True) for w in weights)
    # Weights are rounded to the query's dtype before the products, and divided after their sum: one division for both
    # parts.
    out = product("bknrts,bknsh->bknrth", weights[0].astype(query.dtype), row.values)
    if prompt is not None:
        out = out + product("bknrtp,bkph->bknrth", weights[1].astype(query.dtype), prompt.values)
    return (out / total).astype(query.dtype)


def bounded(x: Array, soft_cap: float) -> jax.Array:
    """Returns soft_cap * tanh(x / soft_cap), or x if soft_cap is 0."""
    return soft_cap * jnp.tanh(x / soft_cap) if soft_cap else x


def without(logits: Array, tokens: tuple[int, ...], value: float = -jnp.inf) -> jax.Array:
    """Returns logits [..., V] that are `value` at these tokens."""
    if not tokens:
        return logits
    # A comparison for each, which the compiler fuses: a mask would be a constant of the size of the vocabulary.
    at = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(reduce(jnp.logical_or, [at == token for token in tokens]), value, logits)


def causal_within(segment_ids: Array, window: int = 0, reach: Array | None = None) -> jax.Array:
    """Causal mask [B, N, T, T] within rows: a token sees itself and earlier tokens of equal segment_ids [B, N, T].

    window: the number of tokens that it sees, with itself; 0: all. reach [B, N, T]: index of the last token that it
    sees, beyond the window too; None: itself.
    """
    # Equal segment ids alone would also show later tokens of the same completion.
    causal = jnp.tril(jnp.ones((segment_ids.shape[-1],) * 2, bool), 0 if reach is None else segment_ids.shape[-1])
    if window:
        causal = jnp.triu(causal, 1 - window)
    causal = causal[None, None]
    if reach is not None:
        causal = causal & (jnp.arange(reach.shape[-1])[None, None, None] <= reach[..., None])
    return causal & (segment_ids[..., :, None] == segment_ids[..., None, :])


def in_prompt(mask: Array, positions: Array | None = None, window: int = 0) -> jax.Array:
    """Returns which tokens of prompts [B, P] are seen from positions [B, N, T], which count from the prompt's first.

    -> [B, N, T, P], or [B, 1, 1, P] without a window.
    """
    if not window or positions is None:
        return mask[:, None, None]
    return mask[:, None, None] & (positions[..., None] - prompt_positions(mask)[:, :, None] < window)


def prompt_positions(mask: Array) -> jax.Array:
    """Position of each prompt token [B, 1, P], counted from the first real token."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)[:, None]


def no_prompt(query: Array) -> tuple[KeyValue, jax.Array]:
    """Keys, values and mask of prompts of length 0, for query [B, K, N, R, T, h]."""
    b, k, *_, h = query.shape
    return KeyValue(*(jnp.zeros((b, k, 0, h), query.dtype),) * 2), jnp.zeros((b, 0), bool)


def over_mesh(kernel: Callable[..., jax.Array], mesh: Mesh | None, kv_heads: int) -> Callable[..., jax.Array]:
    """Runs `kernel((query, keys, values, ...), (keys, values, mask))` of rows and prompts on each shard.

    The compiler cannot partition a kernel, so `shard_map` does. Prompts are sharded over data and fsdp; key heads
    over tensor, if the axis size divides their number.
    """
    if mesh is None:
        return kernel
    heads = sharding.heads_spec(kv_heads, mesh)
    rows = P(("data", "fsdp"))

    def on_shards(row_arrays: tuple[Array, ...], prompt_arrays: tuple[Array, ...]) -> jax.Array:
        # check_vma is off: a Pallas kernel does not say over which mesh axes its output varies.
        specs = (heads,) * 3 + (rows,) * (len(row_arrays) - 3), (heads, heads, rows)
        run = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
        return run(row_arrays, prompt_arrays)

    return on_shards


def head_major(query: Array, key: Array, value: Array) -> tuple[jax.Array, KeyValue]:
    """Reorders projections [B, N, T, heads, h] -> query [B, K, N, R, T, h], keys and values [B, K, N, T, h]."""
    b, n, t, kv_heads, size = key.shape
    # The R query heads of a key head stand together in a checkpoint, as `repeat_kv` of transformers reads them.
    query = query.reshape(b, n, t, kv_heads, -1, size).transpose(0, 3, 1, 4, 2, 5)
    return query, KeyValue(key.transpose(0, 3, 1, 2, 4), value.transpose(0, 3, 1, 2, 4))


def token_major(attended: Array) -> jax.Array:
    """Reorders the output of `attend`: [B, K, N, R, T, h] -> [B, N, T, heads, h]."""
    b, _, n, _, t, size = attended.shape
    return attended.transpose(0, 2, 4, 1, 3, 5).reshape(b, n, t, -1, size)
