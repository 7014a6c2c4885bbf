"""Attention of decoding, to keys and values in pages, and to the prompt of a group.

Shapes on a device: K key heads, R query heads per key head, head size h; p pages of s tokens; S sequences that compute
T tokens each. A prompt is one page, which all members of its group read: a page has Q queries per head, those of its
sequence (Q = T) or those of its group (Q = G x T).

Pages are read where they are. The plain form, `attend`, first finds the largest score of a sequence, over its prompt
and its pages, so its weights are those of the trainer's attention, also after they are rounded to bfloat16. A kernel
reads the pages once: its softmax is joined with that of the prompt by maxima and sums (arXiv 2205.14135),
m = max_i m_i, l = sum_i exp(m_i - m) l_i, out = sum_i exp(m_i - m) o_i / l.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.attention import KeyValue, bounded
from jaxrl_llm.structs import Array

SMALLEST = float(jnp.finfo(jnp.float32).tiny)  # of the scale of a token whose keys or values are all 0
# A finite number, because with -inf a page of which a query sees nothing would give NaN. The sum of two is finite too.
HIDDEN = float(jnp.finfo(jnp.float32).min) / 4


class Pages(NamedTuple):
    """Keys and values of one layer, with a leading axis of d devices outside of `shard_map`."""

    # A token is a column: both products of attention then run along contiguous memory, for which a CPU needs half
    # the time.
    keys: Array  # [K, p, h, s]
    values: Array  # [K, p, s, h]
    # Scales of int8 pages, which multiply a token's integers. A scale depends on one token in one head.
    key_scale: Array | None = None  # [K, p, s]
    value_scale: Array | None = None  # [K, p, s]

    @classmethod
    def empty(cls, lead: tuple[int, ...], tokens: int, head_dim: int, dtype: str) -> Pages:
        """Returns pages of zeros. lead: the axes d, K, p."""

        def zeros(*axes: int) -> jax.Array:
            return jnp.zeros((*lead, *axes), dtype)

        scale = jnp.zeros((*lead, tokens), jnp.float32) if dtype == "int8" else None
        return cls(zeros(head_dim, tokens), zeros(tokens, head_dim), scale, scale)

    def of_tokens(self, tokens: KeyValue) -> Pages:
        """Returns pages as these, each full of tokens: keys and values [K, p, s, h]."""
        if self.key_scale is None:
            return Pages(jnp.swapaxes(tokens.keys, 2, 3), tokens.values)
        (keys, key_scale), (values, value_scale) = map(_in_int8, tokens)
        return Pages(jnp.swapaxes(keys, 2, 3), values, key_scale, value_scale)

    def write(self, page: Array, offset: Array, tokens: KeyValue) -> Pages:
        """Writes keys and values [K, S, T, h] of tokens to `offset` [S, T] of `page` [S, T]; out of range: nowhere."""
        new = self.of_tokens(tokens)

        def write(x: Array, rows: Array) -> jax.Array:
            return x.at[:, page, offset].set(rows, mode="drop")

        # The two index arrays of the keys are apart, so that their axes come first.
        keys = self.keys.at[:, page, :, offset].set(jnp.moveaxis(new.keys, (0, 2), (2, 3)), mode="drop")
        return jax.tree.map(write, self._replace(keys=None), new._replace(keys=None))._replace(keys=keys)

    def take(self, page: Array) -> Pages:
        """Returns a copy of some pages."""
        return jax.tree.map(lambda x: x[:, page], self)

    def replace(self, page: Array, pages: Pages) -> Pages:
        """Writes pages to where `take` has them from; out of range: nowhere."""
        return jax.tree.map(lambda x, new: x.at[:, page].set(new, mode="drop"), self, pages)


class Partial(NamedTuple):
    """Attention to some of a query's keys, before the division by the sum of weights. In float32."""

    out: Array  # [..., h] sum of values, each with its weight exp(score - top)
    top: Array  # [...] largest score
    total: Array  # [...] sum of weights


class Readers(NamedTuple):
    """Who reads what, on a device."""

    table: Array  # [S, n] pages of each sequence, in order; out of range: it has no more
    owner: Array  # [p] sequence of each page
    members: Array  # [e, G] sequences of each prompt
    member: Array  # [S] place of each sequence in `members`, without the axis of e


def attend(
    query: Array,
    prompts: Pages,
    pages: Pages,
    hidden: tuple[Array, Array],
    readers: Readers,
    *,
    soft_cap: float = 0.0,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
    """Attends to prompts and pages: query [K, S, T, R, h] -> [K, S, T, R, h] in float32.

    hidden: masks of pages [p, T, s] and of prompts [e, G * T or 1, P], as `score` takes them.
    """
    score_all = partial(score, soft_cap=soft_cap, precision=precision)
    page_scores = score_all(query[:, readers.owner], pages, hidden[0])
    prompt_scores = score_all(by_group(query, readers), prompts, hidden[1])
    # One maximum for both makes one softmax.
    top = jnp.maximum(
        by_member(jnp.max(prompt_scores, axis=-1), readers),
        over_pages(jnp.maximum, jnp.max(page_scores, axis=-1), readers),
    )
    weigh_all = partial(weigh, dtype=query.dtype, precision=precision)
    from_pages = weigh_all(page_scores, top[:, readers.owner], pages)
    from_prompts = weigh_all(prompt_scores, by_group(top, readers), prompts)
    out, total = (
        by_member(x, readers) + over_pages(jnp.add, y, readers) for x, y in zip(from_prompts, from_pages, strict=True)
    )
    return out / total[..., None]


def score(
    query: Array, pages: Pages, hidden: Array, *, soft_cap: float, precision: jax.lax.Precision | None
) -> jax.Array:
    """Returns the scores of query [K, p, Q, R, h] for the tokens of its page: [K, p, Q, R, s] in float32.

    hidden [p, Q, s], or [p, 1, s] if all queries see the same tokens: 0, or HIDDEN for a token that is not seen.
    """
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = product("kpqrh,kphs->kpqrs", query, pages.keys.astype(query.dtype))
    if pages.key_scale is not None:
        scores *= pages.key_scale[:, :, None, None]
    return bounded(scores, soft_cap) + hidden[None, :, :, None]


def weigh(
    scores: Array, top: Array, pages: Pages, *, dtype: jnp.dtype, precision: jax.lax.Precision | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums [K, p, Q, R, h] of values, weighted by exp(score - top), and the sums of weights."""
    weights = _once(jnp.exp(scores - top[..., None]))
    scaled = weights if pages.value_scale is None else weights * pages.value_scale[:, :, None, None]
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    out = product("kpqrs,kpsh->kpqrh", scaled.astype(dtype), pages.values.astype(dtype))
    return out, jnp.sum(weights, axis=-1)


def _in_int8(x: Array) -> tuple[jax.Array, jax.Array]:
    """Returns numbers [..., h] as integers, and what each [...] is multiplied by."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    return jnp.round(x / jnp.maximum(scale, SMALLEST)[..., None]).astype(jnp.int8), scale


def over_pages(operation: Callable[[Array, Array], Array], x: Array, readers: Readers) -> jax.Array:
    """Joins numbers [K, p, ...] of pages, by a sum or a maximum, in the order of each sequence: [K, S, ...]."""
    count = x.shape[1]
    nothing = 0.0 if operation is jnp.add else 2 * HIDDEN

    def page(j: Array | int) -> Array:
        place = jax.lax.dynamic_index_in_dim(readers.table, j, axis=1, keepdims=False)
        have = (place < count).reshape(1, -1, *(1,) * (x.ndim - 2))
        return jnp.where(have, x[:, jnp.minimum(place, count - 1)], nothing)

    # The loop follows the order of the tokens, so the numbers do not depend on where the scheduler puts pages. One sum
    # over an axis of pages would take a CPU thirty times as long.
    return jax.lax.fori_loop(1, readers.table.shape[1], lambda j, joined: operation(joined, page(j)), page(0))


def by_group(x: Array, readers: Readers) -> jax.Array:
    """Returns numbers [K, S, T, ...] of sequences by their prompts: [K, e, G * T, ...]."""
    return x[:, readers.members].reshape(len(x), len(readers.members), -1, *x.shape[3:])


def by_member(x: Array, readers: Readers) -> jax.Array:
    """Returns numbers [K, e, G * T, ...] of prompts by their sequences: [K, S, T, ...]."""
    return x.reshape(len(x), readers.members.size, -1, *x.shape[3:])[:, readers.member]


def attend_prompts(
    query: Array,
    prompts: Pages,
    hidden: Array,
    readers: Readers,
    *,
    soft_cap: float = 0.0,
    precision: jax.lax.Precision | None = None,
) -> Partial:
    """Attends to prompts alone: query [K, S, T, R, h] -> Partial [K, S, T, R]. hidden: mask, as for `attend`."""
    scores = score(by_group(query, readers), prompts, hidden, soft_cap=soft_cap, precision=precision)
    top = _once(jnp.max(scores, axis=-1))
    out, total = weigh(scores, top, prompts, dtype=query.dtype, precision=precision)
    return jax.tree.map(lambda x: by_member(x, readers), Partial(out, top, total))


def join(left: Partial, right: Partial) -> jax.Array:
    """Returns attention to the keys of both: [..., h] in float32."""
    out, _, total = both(left, right)
    return out / total[..., None]


def seen_from(length: Array, window: int, page: int, count: int) -> tuple[jax.Array, int]:
    """Returns the first place that the last token of sequences of `length` [S] sees, and the most pages that it sees.

    page: the tokens of a page; count: the pages of the longest sequence.
    """
    if not window:
        return jnp.zeros_like(length), count
    return jnp.maximum(length - window, 0), min(count, -(-window // page) + 1)


def both(left: Partial, right: Partial) -> Partial:
    """Joins attention to two sets of keys."""
    top = jnp.maximum(left.top, right.top)
    mine, theirs = (_once(jnp.exp(part.top - top)) for part in (left, right))
    out = mine[..., None] * left.out + theirs[..., None] * right.out
    return Partial(out, top, _once(mine * left.total + theirs * right.total))


def _once(x: Array) -> jax.Array:
    # A CPU's compiler would compute it again for each element of what it is used for.
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)
