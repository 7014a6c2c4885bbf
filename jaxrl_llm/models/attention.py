"""Softmax attention of completion rows to their own tokens and to the prompt of their group.

Shapes: B prompts, N rows per prompt, T tokens per row, S keys per row, K key heads, R query heads per key head, head
size h. Arrays are head-major: the head axis precedes the token axis, so products need no transpose.
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
    """Attention masks of B prompts with N completion rows each: True where one of T tokens sees a key."""

    row: Array  # [B, N, T, S] bool, for the S keys of the token's row
    # [B, N, T, P] bool, for the keys of the P prompt tokens; [B, 1, 1, P] if all tokens of the rows see the same prompt
    # tokens; None without a prompt.
    prompt: Array | None = None


def attend(
    query: Array,
    row: KeyValue,
    visible: Visible,
    prompt: KeyValue | None = None,
    *,
    soft_cap: float = 0.0,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
    """Returns softmax attention [B, K, N, R, T, h] of a query [B, K, N, R, T, h] to its row and its prompt.

    The axes are prompts, key heads, rows, query heads per key head, tokens, and the head size.
    row: keys and values [B, K, N, S, h]. prompt: keys and values [B, K, P, h], None without a prompt. soft_cap: bound
    of the scores, which are products of query and key, by soft_cap * tanh(score / soft_cap); 0 = unbounded. Scores and
    softmax are float32.
    """
    # The letters of the einsum expressions are the lower-case letters of the shapes, with s for keys of the row.
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    # The lowest finite number hides a key, because with -inf a query without a visible key would give NaN.
    hidden_score = jnp.finfo(jnp.float32).min
    if query.shape[4] == 1:
        # Decoding has one token per row. The keys come first, so that a CPU need not rearrange them for every token.
        # The compiler would swap the factors and drop the transpose (`swapaxes`) if the barrier were missing.
        row_scores = product("bknsh,bknrh->bknsr", row.keys, query[..., 0, :])
        row_scores = jax.lax.platform_dependent(row_scores, cpu=jax.lax.optimization_barrier, default=lambda x: x)
        row_scores = jnp.swapaxes(row_scores, -1, -2)[..., None, :]
    else:
        row_scores = product("bknrth,bknsh->bknrts", query, row.keys)
    scores = [jnp.where(visible.row[:, None, :, None], soft_capped(row_scores, soft_cap), hidden_score)]
    if prompt is not None and visible.prompt is not None:
        prompt_scores = product("bknrth,bkph->bknrtp", query, prompt.keys)
        scores.append(jnp.where(visible.prompt[:, None, :, None], soft_capped(prompt_scores, soft_cap), hidden_score))
    # `scores` and `weights` have an entry for the row and, if the query sees a prompt, an entry for the prompt. They
    # share one maximum, so they share one softmax. The maximum needs no gradient, because the softmax does not depend
    # on the number that is subtracted from all scores.
    highest_by_part = jnp.stack([jnp.max(part_scores, axis=-1) for part_scores in scores])
    highest_score = jnp.max(highest_by_part, axis=0)[..., None]
    weights = [jnp.exp(part_scores - jax.lax.stop_gradient(highest_score)) for part_scores in scores]
    weight_sum = sum(jnp.sum(part_weights, axis=-1, keepdims=True) for part_weights in weights)
    weighted_values = product("bknrts,bknsh->bknrth", weights[0].astype(query.dtype), row.values)
    if prompt is not None:
        from_prompt = product("bknrtp,bkph->bknrth", weights[1].astype(query.dtype), prompt.values)
        weighted_values = weighted_values + from_prompt
    # The division by the sum of weights comes last, so that one division serves row and prompt.
    return (weighted_values / weight_sum).astype(query.dtype)


def soft_capped(x: Array, soft_cap: float) -> jax.Array:
    """Bounds scores or logits x smoothly: returns soft_cap * tanh(x / soft_cap), or x if soft_cap is 0."""
    return soft_cap * jnp.tanh(x / soft_cap) if soft_cap else x


def hide_tokens(logits: Array, tokens: tuple[int, ...], hidden_logit: float = -jnp.inf) -> jax.Array:
    """Returns logits [..., V] in which the logits of these token ids are replaced by `hidden_logit`."""
    if not tokens:
        return logits
    # Token ids are compared one by one, because a mask would be a constant of the size of the vocabulary in memory.
    token_ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_hidden = reduce(jnp.logical_or, [token_ids == hidden_id for hidden_id in tokens])
    return jnp.where(is_hidden, hidden_logit, logits)


def causal_mask(segment_ids: Array, window: int = 0, last_visible: Array | None = None) -> jax.Array:
    """Returns a mask [B, N, T, T]: a token of a row sees itself and the earlier tokens of its completion.

    segment_ids [B, N, T]: number of each token's completion. window: number of tokens that a token sees, itself
    included; 0 = unlimited. last_visible [B, N, T]: index of the last token that a token sees, None = the token itself.
    """
    # Start with a mask by the order of the tokens: `tril` hides later tokens, unless `last_visible` decides about them.
    length = segment_ids.shape[-1]
    highest_diagonal = 0 if last_visible is None else length
    visible = jnp.tril(jnp.ones((length, length), bool), highest_diagonal)
    if window:
        visible = jnp.triu(visible, 1 - window)
    visible = visible[None, None]
    if last_visible is not None:
        key_index = jnp.arange(length)[None, None, None]
        visible = visible & (key_index <= last_visible[..., None])
    is_same_completion = segment_ids[..., :, None] == segment_ids[..., None, :]
    return visible & is_same_completion


def tree_mask(segment_ids: Array, ends: Array, positions: Array, window: int = 0) -> jax.Array:
    """Returns the mask [B, N, T, T] of completions that are trees: a token sees the path from the root to itself.

    segment_ids [B, N, T]: number of each token's completion. ends [B, N, T]: index in the row after the last token that
    sees each token. positions [B, N, T]: position of each token on its path. window: number of tokens that a token
    sees, itself included; 0 = unlimited.
    """
    query_index = jnp.arange(ends.shape[-1])[None, None, :, None]
    visible = causal_mask(segment_ids) & (query_index < ends[..., None, :])
    if not window:
        return visible
    distance = positions[..., :, None] - positions[..., None, :]
    return visible & (distance < window)


def prompt_visibility(mask: Array, positions: Array | None = None, window: int = 0) -> jax.Array:
    """Returns a mask [B, N, T, P]: the prompt tokens that each token of a row sees; [B, 1, 1, P] without a window.

    mask: True on real prompt tokens [B, P]. positions [B, N, T]: index of each row token, counted from the first
    prompt token. window: number of tokens that a token sees, itself included; 0 = unlimited.
    """
    real_tokens = mask[:, None, None]
    if not window or positions is None:
        return real_tokens
    distance = positions[..., None] - prompt_positions(mask)[:, :, None]
    return real_tokens & (distance < window)


def prompt_positions(mask: Array) -> jax.Array:
    """Returns the position [B, 1, P] of each prompt token, counted from the first real token of mask [B, P]."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)[:, None]


def empty_prompt(query: Array) -> tuple[KeyValue, jax.Array]:
    """Returns keys, values and mask of prompts of length 0, for rows without a prompt. query: [B, K, N, R, T, h]."""
    b, k, *_, h = query.shape
    no_tokens = jnp.zeros((b, k, 0, h), query.dtype)
    return KeyValue(no_tokens, no_tokens), jnp.zeros((b, 0), bool)


def shard_kernel(kernel: Callable[..., jax.Array], mesh: Mesh | None, kv_heads: int) -> Callable[..., jax.Array]:
    """Returns an attention kernel that runs on each shard of a mesh; without a mesh, `kernel` itself.

    kernel((query, keys, values, ...) of rows, (keys, values, mask) of prompts): returns the attention output. The
    compiler cannot partition a kernel, so `shard_map` does. Prompts are sharded over data and fsdp, and key heads over
    tensor if the axis size divides their number.
    """
    if mesh is None:
        return kernel
    heads_spec = sharding.heads_spec(kv_heads, mesh)  # of query, keys, values and output
    prompts_spec = P(("data", "fsdp"))  # of arrays without heads, such as masks

    def on_shards(row_arrays: tuple[Array, ...], prompt_arrays: tuple[Array, ...]) -> jax.Array:
        row_specs = (heads_spec,) * 3 + (prompts_spec,) * (len(row_arrays) - 3)
        in_specs = row_specs, (heads_spec, heads_spec, prompts_spec)
        # check_vma is off, because a Pallas kernel does not declare over which mesh axes its output varies.
        sharded = jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=heads_spec, check_vma=False)
        return sharded(row_arrays, prompt_arrays)

    return on_shards


def head_major(query: Array, key: Array, value: Array) -> tuple[jax.Array, KeyValue]:
    """Moves the head axes of query, key and value before the token axis, as `attend` expects.

    The query changes from [B, N, T, K * R, h] to [B, K, N, R, T, h]. Key and value change from [B, N, T, K, h] to
    [B, K, N, T, h]. K: key heads; R: query heads per key head; h: head size.
    """
    b, n, t, k, h = key.shape
    # The R query heads of a key head are neighbours in a checkpoint, as `repeat_kv` of transformers expects.
    query = query.reshape((b, n, t, k, -1, h)).transpose((0, 3, 1, 4, 2, 5))
    return query, KeyValue(key.transpose(0, 3, 1, 2, 4), value.transpose(0, 3, 1, 2, 4))


def token_major(attended: Array) -> jax.Array:
    """Moves the token axis of the output of `attend` before the heads: [B, K, N, R, T, h] -> [B, N, T, K * R, h]."""
    b, _, n, _, t, h = attended.shape
    return attended.transpose((0, 2, 4, 1, 3, 5)).reshape(b, n, t, -1, h)
