"""Attention of decoding: queries attend to keys and values in pages, and to the prompt of their group.

A page holds the keys and values of a fixed number of tokens. A sequence is a completion while it is sampled: its tokens
fill several pages. A prompt is one large page, which all G sequences of its group read.

Shapes on a device: K key heads, R query heads per key head, head size h; p pages of s tokens; e prompts; S sequences
that compute T tokens each. A page has Q queries per head: T of its sequence, or G x T of a group for a prompt.

`attend` uses plain JAX. It finds the largest score of a sequence over prompt and pages first, so its weights equal the
weights of the trainer's attention, also after rounding to bfloat16. The kernels for GPUs and TPUs read each page once
and return a `PartialAttention`: weighted values o_1, highest score m_1 and sum of weights l_1. The prompt gives o_2,
m_2 and l_2. Both are combined by maxima and sums (arXiv 2205.14135): m = max_i m_i, l = sum_i exp(m_i - m) l_i, and
the attention is sum_i exp(m_i - m) o_i / l.
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
# Score of a key that a query must not see. It is finite, because -inf would give NaN for a page without a visible key.
# A quarter of the lowest number is low enough, and the sum of two hidden scores is finite too.
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

        keys = jnp.zeros((*lead, head_dim, tokens), dtype)
        values = jnp.zeros((*lead, tokens, head_dim), dtype)
        scale = jnp.zeros((*lead, tokens), jnp.float32) if dtype == "int8" else None
        return cls(keys, values, scale, scale)

    def from_tokens(self, tokens: KeyValue) -> Pages:
        """Returns new full pages in the format of these pages. tokens: keys and values [K, p, s, h]."""
        if self.key_scale is None:
            return Pages(jnp.swapaxes(tokens.keys, 2, 3), tokens.values)
        (keys, key_scale), (values, value_scale) = map(_quantize_int8, tokens)
        return Pages(jnp.swapaxes(keys, 2, 3), values, key_scale, value_scale)

    def write(self, page: Array, offset: Array, tokens: KeyValue) -> Pages:
        """Returns the pages with the new tokens of S sequences, T of each, written into them.

        page: page of each token [S, T]; tokens of a page out of range are not written. offset: index of each token in
        its page [S, T]. tokens: keys and values [K, S, T, h] of K heads with size h.
        """
        new_tokens = self.from_tokens(tokens)  # keys [K, S, h, T], values [K, S, T, h], scales [K, S, T]

        def write_tokens(stored: Array, new: Array) -> jax.Array:
            return stored.at[:, page, offset].set(new, mode="drop")

        # A slice separates the two index arrays of the keys, so NumPy's rules put the axes [S, T] first.
        new_keys = jnp.moveaxis(new_tokens.keys, (0, 2), (2, 3))  # [S, T, K, h]
        keys = self.keys.at[:, page, :, offset].set(new_keys, mode="drop")
        # The values, and the scales of int8 pages, have the token axis directly after the page axis.
        without_keys = jax.tree.map(write_tokens, self._replace(keys=None), new_tokens._replace(keys=None))
        return without_keys._replace(keys=keys)

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
    places: Array  # [S, T] index of each token in its sequence; a token reads the pages up to its own place
    is_real: Array  # [S, T] False for padding, whose attention is not used
    members: Array  # [e, G] numbers of the G sequences that share each of e prompts
    member: Array  # [S] index of each sequence in the flattened `members`


class LayerCache(NamedTuple):
    """Keys and values of one layer for decoding, and memory for scores."""

    prompts: Pages  # one page for each prompt
    pages: Pages  # pages of sequences
    # Memory [K, n, S, T * R * s] in which `attend` keeps the scores of its first loop for its second loop. Its content
    # before and after `attend` has no meaning. If None, `attend` computes the scores twice.
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

    Two loops run over the columns of `readers.table`, from the first to the last page that a real token sees. So the
    time follows the number of real tokens, not the width of the table. The caller gives the memory for scores, because
    memory of this function would be cleared, for the whole width of the table, at each token.
    """
    prompts, pages, score_memory = cache
    page_tokens, column_count = pages.keys.shape[3], readers.table.shape[1]
    score_queries = partial(score, soft_cap=soft_cap, precision=precision)
    weigh_by_scores = partial(weigh_values, dtype=query.dtype, precision=precision)
    first_column, end_column = _visible_columns(readers, window, page_tokens)

    def score_column(column: Array | int) -> tuple[Pages, jax.Array]:
        """Returns the page of each sequence in a column of the table, and the scores [K, S, T, R, s] of its tokens."""
        page_numbers = jax.lax.dynamic_index_in_dim(readers.table, column, axis=1, keepdims=False)
        column_pages = pages.take(jnp.minimum(page_numbers, pages.keys.shape[1] - 1))
        key_place = column * page_tokens + jnp.arange(page_tokens)[None, None]
        query_place = readers.places[..., None]
        is_hidden = key_place > query_place
        if window:
            is_hidden |= key_place <= query_place - window
        return column_pages, score_queries(query, column_pages, jnp.where(is_hidden, HIDDEN_SCORE, 0.0))

    def over_columns(step: Callable[[Array | int, PyTree], PyTree], start: PyTree) -> PyTree:
        """Returns the result of a loop whose step returns the new state for a column and the state before it."""
        return step(0, start) if column_count == 1 else jax.lax.fori_loop(first_column, end_column, step, start)

    def update_highest(column: Array | int, state: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        """Returns the highest score of each query up to this column, and the memory with the scores of the column."""
        highest_score, memory = state
        _, column_scores = score_column(column)
        if memory is not None:
            flat_scores = column_scores.reshape(*column_scores.shape[:2], -1)
            memory = jax.lax.dynamic_update_index_in_dim(memory, flat_scores, column, axis=1)
        return jnp.maximum(highest_score, jnp.max(column_scores, axis=-1)), memory

    def add_values(column: Array | int, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds the weighted values and the weights of this column to `sums`."""
        # If the scores are in memory, the compiler drops their second computation.
        column_pages, column_scores = score_column(column)
        if score_memory is not None:
            stored_scores = jax.lax.dynamic_index_in_dim(score_memory, column, axis=1)
            column_scores = stored_scores.reshape(column_scores.shape)
        return jax.tree.map(jnp.add, sums, weigh_by_scores(column_scores, highest_score, column_pages))

    # First find the highest score of each query. Prompt and pages share this maximum, so they share one softmax.
    prompt_scores = score_queries(group_rows(query, readers), prompts, prompt_hidden)
    highest_of_prompts = member_rows(jnp.max(prompt_scores, axis=-1), readers)
    highest_score, score_memory = over_columns(update_highest, (highest_of_prompts, score_memory))
    # Then sum up the weighted values. The sums follow the order of the tokens, so their rounding does not depend on
    # where the scheduler puts pages.
    prompt_sums = weigh_by_scores(prompt_scores, group_rows(highest_score, readers), prompts)
    zero_sums = jnp.zeros(query.shape, jnp.float32), jnp.zeros(query.shape[:-1], jnp.float32)
    page_sums = over_columns(add_values, zero_sums)
    weighted_values, weight_sums = (
        member_rows(of_prompt, readers) + of_pages for of_prompt, of_pages in zip(prompt_sums, page_sums, strict=True)
    )
    return weighted_values / weight_sums[..., None], cache._replace(scores=score_memory)


def _visible_columns(readers: PageReaders, window: int, page_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the range of columns of `readers.table` whose pages some real token sees: first column, end column.

    window: number of tokens that a token sees, 0 = unlimited. page_tokens: number of tokens of a page.
    """
    column_count = readers.table.shape[1]
    last_place = jnp.max(jnp.where(readers.is_real, readers.places, -1))
    first_place = 0
    if window:
        window_starts = readers.places - window + 1
        first_place = jnp.min(jnp.where(readers.is_real, window_starts, column_count * page_tokens))
    first_column = jnp.maximum(first_place, 0) // page_tokens
    return first_column, jnp.minimum(last_place // page_tokens + 1, column_count)


def score(
    query: Array, pages: Pages, hidden: Array, *, soft_cap: float, precision: jax.lax.Precision | None
) -> jax.Array:
    """Returns the float32 scores of attention [K, p, Q, R, s] of Q queries per page for the s tokens of the page.

    query [K, p, Q, R, h]: Q queries of each of p pages, for K key heads and R query heads per key head. hidden
    [p, Q, s], or [p, 1, s] if all queries see the same tokens: 0, or HIDDEN_SCORE for a hidden token.
    """
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = product("kpqrh,kphs->kpqrs", query, pages.keys.astype(query.dtype))
    if pages.key_scale is not None:
        scores *= pages.key_scale[:, :, None, None]
    return soft_capped(scores, soft_cap) + hidden[None, :, :, None]


def weigh_values(
    scores: Array, highest_score: Array, pages: Pages, *, dtype: jnp.dtype, precision: jax.lax.Precision | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of each page's values, weighted by exp(score - highest_score), and the sum of the weights.

    scores [K, p, Q, R, s]: scores of Q queries per page for its s tokens. highest_score [K, p, Q, R]: highest score of
    each query, over all pages. dtype: dtype of the products. The sums are [K, p, Q, R, h] and [K, p, Q, R].
    """
    weights = _compute_once(jnp.exp(scores - highest_score[..., None]))
    scaled_weights = weights if pages.value_scale is None else weights * pages.value_scale[:, :, None, None]
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    weighted_values = product("kpqrs,kpsh->kpqrh", scaled_weights.astype(dtype), pages.values.astype(dtype))
    return weighted_values, jnp.sum(weights, axis=-1)


def _quantize_int8(x: Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys or values x [..., h] as int8, and the scales [...] by which the integers are multiplied."""
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
    """Returns the attention of queries to the prompt of their sequence, but not to the pages of the sequence.

    query [K, S, T, R, h]: T tokens of each of S sequences, for K key heads and R query heads per key head. hidden, with
    the shape [e, G * T or 1, P]: 0, or HIDDEN_SCORE for a hidden prompt token.
    """
    scores = score(group_rows(query, readers), prompts, hidden, soft_cap=soft_cap, precision=precision)
    highest_score = _compute_once(jnp.max(scores, axis=-1))
    weighted_values, weight_sum = weigh_values(scores, highest_score, prompts, dtype=query.dtype, precision=precision)
    by_group = PartialAttention(weighted_values, highest_score, weight_sum)
    return jax.tree.map(lambda x: member_rows(x, readers), by_group)


def finish(first: PartialAttention, second: PartialAttention) -> jax.Array:
    """Returns attention [..., h], in float32, to the keys of both parts, such as a prompt and the pages after it."""
    weighted_values, _, weight_sum = combine(first, second)
    return weighted_values / weight_sum[..., None]


def first_visible(length: Array, window: int, page: int, count: int) -> tuple[jax.Array, int]:
    """Returns the index [S] of the first token that each sequence's last token sees, and the most pages that it sees.

    length: number of tokens of each sequence [S]. window: number of tokens that a token sees, 0 = unlimited. page:
    number of tokens of a page. count: number of pages of the longest sequence.
    """
    if not window:
        return jnp.zeros_like(length), count
    most_pages = -(-window // page) + 1  # rounded up; one more, because a window may begin within a page
    return jnp.maximum(length - window, 0), min(count, most_pages)


def combine(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Combines the attention of a query to two sets of keys, as if the two sets had been one."""
    highest_score = jnp.maximum(first.highest_score, second.highest_score)
    # The weights of both parts are rescaled to the higher one of their two highest scores.
    first_factor = _compute_once(jnp.exp(first.highest_score - highest_score))
    second_factor = _compute_once(jnp.exp(second.highest_score - highest_score))
    weighted_values = (
        first_factor[..., None] * first.weighted_values + second_factor[..., None] * second.weighted_values
    )
    weight_sum = _compute_once(first_factor * first.weight_sum + second_factor * second.weight_sum)
    return PartialAttention(weighted_values, highest_score, weight_sum)


def _compute_once(x: Array) -> jax.Array:
    """Returns x, behind a barrier on CPUs: their compiler would recompute x for each element of results that use x."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)
