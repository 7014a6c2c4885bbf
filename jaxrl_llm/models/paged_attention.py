"""Attention of decoding, to keys and values in pages, and to the prompt of a group.

Shapes on a device: K key heads, R query heads per key head, head size h; p pages of s tokens; S sequences that compute
T tokens each. A prompt is one page, which all members of its group read: a page has Q queries per head, those of its
sequence (Q = T) or those of its group (Q = G x T).

Pages are read where they are, and the softmax of a sequence is put together from those of its pages:
m = max_p m_p, l = sum_p exp(m_p - m) l_p, out = sum_p exp(m_p - m) o_p / l (arXiv 2205.14135).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.attention import KeyValue, bounded
from jaxrl_llm.structs import Array

# Not -inf: a page of which a query sees nothing would give NaN. Two of them can be added.
HIDDEN = float(jnp.finfo(jnp.float32).min) / 4


class Pages(NamedTuple):
    """Keys and values of one layer, with a leading axis of d devices outside of `shard_map`."""

    # A token is a column: both products of attention then run along contiguous memory, for which a CPU needs half
    # the time.
    keys: Array  # [K, p, h, s]
    values: Array  # [K, p, s, h]

    @classmethod
    def empty(cls, lead: tuple[int, ...], tokens: int, head_dim: int, dtype: str) -> Pages:
        """Returns pages of zeros. lead: the axes d, K, p."""
        return cls(jnp.zeros((*lead, head_dim, tokens), dtype), jnp.zeros((*lead, tokens, head_dim), dtype))

    def write(self, page: Array, offset: Array, tokens: KeyValue) -> Pages:
        """Writes keys and values [K, S, T, h] of tokens to `offset` [S, T] of `page` [S, T]; out of range: nowhere."""
        # The two index arrays of the keys are apart, so that their axes come first.
        keys = self.keys.at[:, page, :, offset].set(jnp.moveaxis(tokens.keys, 0, 2), mode="drop")
        return Pages(keys, self.values.at[:, page, offset].set(tokens.values, mode="drop"))

    def take(self, page: Array) -> Pages:
        """Returns a copy of some pages."""
        return Pages(self.keys[:, page], self.values[:, page])

    def replace(self, page: Array, pages: Pages) -> Pages:
        """Writes pages to where `take` has them from; out of range: nowhere."""
        return Pages(*(x.at[:, page].set(new, mode="drop") for x, new in zip(self, pages, strict=True)))


class Partial(NamedTuple):
    """Attention to some of a query's keys, before the division by the sum of weights. In float32."""

    out: Array  # [..., h] sum of values, each with its weight exp(score - top)
    top: Array  # [...] largest score
    total: Array  # [...] sum of weights


def attend_pages(
    query: Array, pages: Pages, hidden: Array, *, soft_cap: float = 0.0, precision: jax.lax.Precision | None = None
) -> Partial:
    """Attends to each page alone: query [K, p, Q, R, h] of its owner -> Partial [K, p, Q, R].

    hidden [p, Q, s], or [p, 1, s] if all queries see the same tokens: 0, or HIDDEN for a token that is not seen.
    """
    scores = jnp.einsum("kpqrh,kphs->kpqrs", query, pages.keys, precision=precision, preferred_element_type=jnp.float32)
    scores = bounded(scores, soft_cap) + hidden[None, :, :, None]
    top = _once(jnp.max(scores, axis=-1))
    weights = _once(jnp.exp(scores - top[..., None]))
    out = jnp.einsum(
        "kpqrs,kpsh->kpqrh",
        weights.astype(query.dtype),
        pages.values,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return Partial(out, top, jnp.sum(weights, axis=-1))


def by_sequence(pages: Partial, table: Array) -> Partial:
    """Joins the pages [K, p, Q, R] of each sequence, in their order: table [S, n] -> Partial [K, S, Q, R].

    table: the pages of a sequence; out of range: it has no more.
    """
    count = pages.top.shape[1]

    def page(j: Array | int) -> Partial:
        place = jax.lax.dynamic_index_in_dim(table, j, axis=1, keepdims=False)
        part = jax.tree.map(lambda x: x[:, jnp.minimum(place, count - 1)], pages)
        return part._replace(top=jnp.where((place < count)[None, :, None, None], part.top, 2 * HIDDEN))

    # In the order of the tokens, wherever the pages are: the numbers do not depend on the scheduler. A loop, because
    # for one sum over an axis of pages a CPU needs thirty times as long.
    return jax.lax.fori_loop(1, table.shape[1], lambda j, joined: both(joined, page(j)), page(0))


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
