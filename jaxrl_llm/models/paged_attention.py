"""Attention of decoding: queries attend to keys and values in pages, and to the prompt of their group.

Shapes on a device: K key heads, R query heads per key head, head size h; p pages of s tokens; e prompts; S sequences
that compute T tokens each. A prompt is one page, which all members of its group read. A page has Q queries per head:
those of its sequence (Q = T), or those of its group (Q = G x T).

`attend` uses plain JAX. It finds the largest score of a sequence over prompt and pages first, so its weights equal
those of the trainer's attention, also after rounding to bfloat16. The kernels for GPUs and TPUs read each page once and
return a `PartialAttention`, which is combined with that of the prompt by maxima and sums (arXiv 2205.14135):
m = max_i m_i, l = sum_i exp(m_i - m) l_i, out = sum_i exp(m_i - m) o_i / l.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.attention import KeyValue, soft_capped
from jaxrl_llm.structs import Array, PyTree

SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)  # smallest divisor of int8 values, for a token of zeros
# Score of a hidden key. It is finite, because with -inf a page without a visible key would give NaN. The sum of two
# such scores is finite too.
HIDDEN_SCORE = float(jnp.finfo(jnp.float32).min) / 4
LANES = 128  # width of a TPU's registers, and tokens of a page there


class Pages(NamedTuple):
    """The pages of one layer on one device: keys and values of tokens, for K key heads, p pages and s tokens of a page.

    h: head size. Outside of `shard_map`, the arrays have a leading axis of devices.
    """

    # Keys have the token axis last, because both products of attention then read contiguous memory, which takes a CPU
    # half the time.
    keys: Array  # [K, p, h, s]
    values: Array  # [K, p, s, h]
    # Scales by which the integers of int8 pages are multiplied, one per token and head; None for other dtypes.
    key_scale: Array | None = None  # [K, p, s]
    value_scale: Array | None = None  # [K, p, s]

    @classmethod
    def empty(cls, lead: tuple[int, ...], tokens: int, head_dim: int, dtype: str) -> Pages:
        """Returns pages of zeros. lead: sizes of the leading axes (d, K, p). tokens: s, number of tokens of a page."""

        def zeros(*axes: int) -> jax.Array:
            return jnp.zeros((*lead, *axes), dtype)

        scale = jnp.zeros((*lead, tokens), jnp.float32) if dtype == "int8" else None
        return cls(zeros(head_dim, tokens), zeros(tokens, head_dim), scale, scale)

    def from_tokens(self, tokens: KeyValue) -> Pages:
        """Returns new full pages in the format of these pages. tokens: keys and values [K, p, s, h]."""
        if self.key_scale is None:
            return Pages(jnp.swapaxes(tokens.keys, 2, 3), tokens.values)
        (keys, key_scale), (values, value_scale) = map(_in_int8, tokens)
        return Pages(jnp.swapaxes(keys, 2, 3), values, key_scale, value_scale)

    def write(self, page: Array, offset: Array, tokens: KeyValue) -> Pages:
        """Returns the pages with the new tokens of S sequences, T of each, written into them.

        page: page of each token [S, T]; tokens of a page out of range are not written. offset: index of each token in
        its page [S, T]. tokens: keys and values [K, S, T, h] of K heads with size h.
        """
        new_pages = self.from_tokens(tokens)

        def write_rows(x: Array, rows: Array) -> jax.Array:
            return x.at[:, page, offset].set(rows, mode="drop")

        # The two index arrays of the keys are separated by a slice, so NumPy's rules put their axes first.
        keys = self.keys.at[:, page, :, offset].set(jnp.moveaxis(new_pages.keys, (0, 2), (2, 3)), mode="drop")
        return jax.tree.map(write_rows, self._replace(keys=None), new_pages._replace(keys=None))._replace(keys=keys)

    def take(self, page: Array) -> Pages:
        """Returns a copy of the pages with these numbers."""
        return jax.tree.map(lambda x: x[:, page], self)

    def replace(self, page: Array, pages: Pages) -> Pages:
        """Returns these pages with the pages numbered `page` replaced by `pages`; numbers out of range are skipped."""
        return jax.tree.map(lambda x, new: x.at[:, page].set(new, mode="drop"), self, pages)


class PartialAttention(NamedTuple):
    """Attention of a query to a part of its keys, in float32, before the division by the sum of weights."""

    weighted_values: Array  # [..., h] sum of values, weighted by exp(score - highest_score)
    highest_score: Array  # [...] largest score
    weight_sum: Array  # [...] sum of weights


class PageReaders(NamedTuple):
    """Which of S sequences read which pages, and which of e prompts, on one device."""

    table: Array  # [S, n] numbers of each sequence's pages, in the order of its tokens; a number out of range: no page
    places: Array  # [S, T] place of each token in its sequence; a token reads the pages up to its own place
    is_real: Array  # [S, T] False for tokens whose attention nobody uses
    members: Array  # [e, G] numbers of the sequences that share each prompt
    member: Array  # [S] index of each sequence in `members`, flattened


class LayerCache(NamedTuple):
    """Keys and values of a layer, of prompts and of sequences, and memory for the scores of its pages."""

    prompts: Pages
    pages: Pages  # pages of sequences
    # Memory with any content [K, n, S, T * R * s] that keeps scores while `attend` runs; None: it computes them twice.
    scores: Array | None = None


def attend(
    query: Array,
    cache: LayerCache,
    prompt_hidden: Array,
    readers: PageReaders,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    precision: jax.lax.Precision | None = None,
) -> tuple[jax.Array, LayerCache]:
    """Returns attention, in float32, of queries to the prompt and the pages of their sequence, and the cache.

    Query and attention are [K, S, T, R, h]: key heads, sequences, tokens of a sequence, query heads per key head, head
    size. prompt_hidden [e, G * T or 1, P]: 0, or HIDDEN_SCORE for a hidden prompt token. readers: pages and prompt of
    each sequence. window: number of tokens that a token sees, 0 = unlimited. soft_cap: bound of scores, 0 = unbounded.

    Both loops run over the columns of `readers.table`, from the first page to the last one that a real token sees. So
    the time follows the number of real tokens, not the width of the table. The caller gives the memory for scores,
    because memory of this function would be cleared, for the whole width of the table, at each token.
    """
    prompts, pages, scores = cache
    size, columns = pages.keys.shape[3], readers.table.shape[1]
    score_all = partial(score, soft_cap=soft_cap, precision=precision)
    weigh_all = partial(weigh_values, dtype=query.dtype, precision=precision)
    first, end = _visible_columns(readers, window, size)

    def score_column(column: Array | int) -> tuple[Pages, jax.Array]:
        """Returns the page of each sequence in a column of the table, and the scores [K, S, T, R, s] of its tokens."""
        number = jax.lax.dynamic_index_in_dim(readers.table, column, axis=1, keepdims=False)
        page = pages.take(jnp.minimum(number, pages.keys.shape[1] - 1))
        key_place, query_place = column * size + jnp.arange(size)[None, None], readers.places[..., None]
        hidden = key_place > query_place
        hidden |= key_place <= query_place - window if window else False
        return page, score_all(query, page, jnp.where(hidden, HIDDEN_SCORE, 0.0))

    def over_columns(step: Callable[[Array | int, PyTree], PyTree], start: PyTree) -> PyTree:
        return step(0, start) if columns == 1 else jax.lax.fori_loop(first, end, step, start)

    def update_highest(column: Array | int, so_far: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        """Returns the highest score of each query so far, and the memory with the scores of this column."""
        highest_score, memory = so_far
        _, new_scores = score_column(column)
        if memory is not None:
            flat_scores = new_scores.reshape(*new_scores.shape[:2], -1)
            memory = jax.lax.dynamic_update_index_in_dim(memory, flat_scores, column, axis=1)
        return jnp.maximum(highest_score, jnp.max(new_scores, axis=-1)), memory

    def add_values(column: Array | int, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds the weighted values and the weights of this column to `sums`."""
        # If the scores are in memory, the compiler drops their second computation.
        page, column_scores = score_column(column)
        if scores is not None:
            stored_scores = jax.lax.dynamic_index_in_dim(scores, column, axis=1)
            column_scores = stored_scores.reshape(column_scores.shape)
        return jax.tree.map(jnp.add, sums, weigh_all(column_scores, highest_score, page))

    # Prompt and pages share one maximum, so they share one softmax. The sums follow the order of the tokens, so their
    # rounding does not depend on where the scheduler puts pages.
    prompt_scores = score_all(group_rows(query, readers), prompts, prompt_hidden)
    highest_of_prompts = member_rows(jnp.max(prompt_scores, axis=-1), readers)
    highest_score, scores = over_columns(update_highest, (highest_of_prompts, scores))
    from_prompts = weigh_all(prompt_scores, group_rows(highest_score, readers), prompts)
    zeros = jnp.zeros(query.shape, jnp.float32), jnp.zeros(query.shape[:-1], jnp.float32)
    from_pages = over_columns(add_values, zeros)
    weighted_values, weight_sums = (
        member_rows(of_prompts, readers) + of_pages
        for of_prompts, of_pages in zip(from_prompts, from_pages, strict=True)
    )
    return weighted_values / weight_sums[..., None], cache._replace(scores=scores)


def _visible_columns(readers: PageReaders, window: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first column of the table that a real token sees, and the column after the last one.

    window: number of tokens that a token sees, 0 = unlimited. size: tokens of a page.
    """
    columns = readers.table.shape[1]
    last_place = jnp.max(jnp.where(readers.is_real, readers.places, -1))
    first_place = jnp.min(jnp.where(readers.is_real, readers.places - window + 1, columns * size)) if window else 0
    return jnp.maximum(first_place, 0) // size, jnp.minimum(last_place // size + 1, columns)


def score(
    query: Array, pages: Pages, hidden: Array, *, soft_cap: float, precision: jax.lax.Precision | None
) -> jax.Array:
    """Returns the scores of attention, in float32, of the queries of each page for the tokens of the page.

    query [K, p, Q, R, h]: Q queries of each of p pages, for K key heads and R query heads per key head. The scores are
    [K, p, Q, R, s], for s tokens of a page. hidden [p, Q, s], or [p, 1, s] if all queries see the same tokens: 0, or
    HIDDEN_SCORE for a hidden token.
    """
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = product("kpqrh,kphs->kpqrs", query, pages.keys.astype(query.dtype))
    if pages.key_scale is not None:
        scores *= pages.key_scale[:, :, None, None]
    return soft_capped(scores, soft_cap) + hidden[None, :, :, None]


def weigh_values(
    scores: Array, highest_score: Array, pages: Pages, *, dtype: jnp.dtype, precision: jax.lax.Precision | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of the values of each page, weighted by exp(score - highest_score), and the sums of weights.

    scores [K, p, Q, R, s]: scores of Q queries per page for its s tokens. highest_score: [K, p, Q, R]. dtype: dtype of
    the products. The sums of values are [K, p, Q, R, h], and those of weights [K, p, Q, R].
    """
    weights = _compute_once(jnp.exp(scores - highest_score[..., None]))
    scaled_weights = weights if pages.value_scale is None else weights * pages.value_scale[:, :, None, None]
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    weighted_values = product("kpqrs,kpsh->kpqrh", scaled_weights.astype(dtype), pages.values.astype(dtype))
    return weighted_values, jnp.sum(weights, axis=-1)


def _in_int8(x: Array) -> tuple[jax.Array, jax.Array]:
    """Returns x [..., h] as int8, and the scales [...] by which the integers are multiplied."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    return jnp.round(x / jnp.maximum(scale, SMALLEST_SCALE)[..., None]).astype(jnp.int8), scale


def group_rows(x: Array, readers: PageReaders) -> jax.Array:
    """Regroups an array of sequences by prompt, so that a group's queries meet their prompt in one product.

    x [K, S, T, ...]: for S sequences of T tokens. Returns [K, e, G * T, ...], for e prompts of G sequences each.
    """
    return x[:, readers.members].reshape(len(x), len(readers.members), -1, *x.shape[3:])


def member_rows(x: Array, readers: PageReaders) -> jax.Array:
    """Undoes `group_rows`: regroups an array [K, e, G * T, ...] of prompts by sequence, to [K, S, T, ...]."""
    return x.reshape(len(x), readers.members.size, -1, *x.shape[3:])[:, readers.member]


def attend_prompts(
    query: Array,
    prompts: Pages,
    hidden: Array,
    readers: PageReaders,
    *,
    soft_cap: float = 0.0,
    precision: jax.lax.Precision | None = None,
) -> PartialAttention:
    """Returns the attention of queries to the prompt of their sequence alone.

    query [K, S, T, R, h]: T tokens of each of S sequences, for K key heads and R query heads per key head. hidden [e, G
    * T or 1, P]: 0, or HIDDEN_SCORE for a hidden prompt token.
    """
    scores = score(group_rows(query, readers), prompts, hidden, soft_cap=soft_cap, precision=precision)
    highest_score = _compute_once(jnp.max(scores, axis=-1))
    weighted_values, weight_sum = weigh_values(scores, highest_score, prompts, dtype=query.dtype, precision=precision)
    return jax.tree.map(lambda x: member_rows(x, readers), PartialAttention(weighted_values, highest_score, weight_sum))


def finish(first: PartialAttention, second: PartialAttention) -> jax.Array:
    """Returns attention [..., h], in float32, to the keys of both parts, divided by the sum of weights."""
    weighted_values, _, total = combine(first, second)
    return weighted_values / total[..., None]


def first_visible(length: Array, window: int, page: int, count: int) -> tuple[jax.Array, int]:
    """Returns the index [S] of the first token that a sequence's last token sees, and the most pages that it sees.

    length: number of tokens of each sequence [S]. window: number of tokens that a token sees, 0 = unlimited. page:
    number of tokens of a page. count: number of pages of the longest sequence.
    """
    if not window:
        return jnp.zeros_like(length), count
    return jnp.maximum(length - window, 0), min(count, -(-window // page) + 1)


def combine(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Combines attention to two sets of keys."""
    highest_score = jnp.maximum(first.highest_score, second.highest_score)
    first_factor, second_factor = (
        _compute_once(jnp.exp(part.highest_score - highest_score)) for part in (first, second)
    )
    weighted_values = (
        first_factor[..., None] * first.weighted_values + second_factor[..., None] * second.weighted_values
    )
    return PartialAttention(
        weighted_values,
        highest_score,
        _compute_once(first_factor * first.weight_sum + second_factor * second.weight_sum),
    )


def _compute_once(x: Array) -> jax.Array:
    # If the barrier were missing, the compiler for CPUs would recompute x for each element of the results that use x.
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)
