"""Attention of a decode step to a sequence's own pages, with one GPU kernel (Triton), which reads no other page.

Letters are those of `paged_attention`. The kernel has a program for each sequence, key head and part of the sequence;
parts are put together as pages are. So there are programs enough for a GPU that decodes few sequences.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxrl_llm.models.attention import bounded
from jaxrl_llm.models.attention_gpu import is_ampere
from jaxrl_llm.models.paged_attention import HIDDEN, Pages, Partial, both, seen_from
from jaxrl_llm.structs import Array

TILE = 16  # the smallest side of a matrix product
PART = 256  # tokens of a part, unless it makes more than MOST parts
MOST = 16


def fits(device: Any, head_dim: int, dtype: str, page: int) -> bool:
    """Whether the kernel runs on this device with these heads and pages."""
    # Sides of Triton's arrays are powers of 2.
    sides = all(TILE <= x <= 256 and x & (x - 1) == 0 for x in (head_dim, page))
    return is_ampere(device) and sides and dtype in ("bfloat16", "float32")


def attend_own(
    query: Array,
    pages: Pages,
    table: Array,
    length: Array,
    window: int = 0,
    soft_cap: float = 0.0,
    *,
    interpret: bool = False,
) -> Partial:
    """Attends to the first `length` [S] tokens of sequences: query [K, S, R, h] -> Partial [K, S, R].

    table [S, n]: the pages of each sequence, in order. window: only so many of the last tokens are seen; 0: all.
    Without a token to see, total is 0.
    """
    k, rows, r, h = query.shape
    page = pages.values.shape[2]
    start, width = seen_from(length, window, page, table.shape[1])
    # The parts do not depend on the number of sequences, so that a sequence's numbers do not either.
    each = max(1, PART // page, -(-width // MOST))
    parts = -(-width // each)
    more = max(TILE, pl.next_power_of_2(r)) - r
    query = jnp.pad(query, ((0, 0), (0, 0), (0, more), (0, 0)))

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    scalars = jnp.minimum(table, pages.values.shape[1] - 1).astype(jnp.int32), start, length
    heads = r + more
    stored = jax.tree.leaves(pages)
    outputs = [((heads, h), (0, 0)), ((heads,), (0,)), ((heads,), (0,))]
    padded = pl.pallas_call(
        partial(_attend, soft_cap=soft_cap, each=each),
        grid=(rows, k, parts),
        in_specs=[
            *map(whole, scalars),
            pl.BlockSpec((None, None, heads, h), lambda row, head, part: (head, row, 0, 0)),
            *map(whole, stored),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, *shape), lambda row, head, part, zeros=zeros: (part, head, row, *zeros))
            for shape, zeros in outputs
        ],
        out_shape=[jax.ShapeDtypeStruct((parts, k, rows, *shape), jnp.float32) for shape, _ in outputs],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, query, *stored)
    partials = Partial(*(x[:, :, :, :r] for x in padded))
    # One after the other: a part without tokens changes nothing.
    return reduce(both, [jax.tree.map(lambda x, i=i: x[i], partials) for i in range(parts)])


def _attend(
    table: Any, start: Any, length: Any, query: Any, keys: Any, values: Any, *refs: Any, soft_cap: float, each: int
) -> None:
    """One program: query [R, h] and the pages -> out [R, h], top and total [R], of `each` pages of a sequence.

    refs: the scales of keys and values, if they are in int8, and the outputs.
    """
    scales, out = refs[:-3], refs[-3:]
    row, head, part = (pl.program_id(i) for i in range(3))
    page, (r, h) = values.shape[2], query.shape
    begin, end = start[row], length[row]
    heads = query[...]
    # Float32 is multiplied as such: by default it would be rounded to TF32.
    precision = jax.lax.Precision.HIGHEST if heads.dtype == jnp.float32 else None
    product = partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    def attend(j: Array, before: Partial) -> Partial:
        place = j * page + jnp.arange(page)
        seen = ((place >= begin) & (place < end))[None]
        at = table[row, j]
        scores = product(heads, keys[head, at].astype(heads.dtype))
        scores = scores * scales[0][head, at][None] if scales else scores
        scores = jnp.where(seen, bounded(scores, soft_cap), HIDDEN)
        top = jnp.maximum(before.top, jnp.max(scores, axis=1))
        # If nothing is seen, the highest score is HIDDEN, and exp(0) is not 0.
        weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
        less = jnp.exp(before.top - top)
        scaled = weights * scales[1][head, at][None] if scales else weights
        new = product(scaled.astype(heads.dtype), values[head, at].astype(heads.dtype))
        return Partial(less[:, None] * before.out + new, top, less * before.total + jnp.sum(weights, axis=1))

    first = begin // page + part * each
    last = jnp.minimum(first + each, (end + page - 1) // page)
    zeros = partial(jnp.zeros, dtype=jnp.float32)
    nothing = Partial(zeros((r, h)), jnp.full((r,), HIDDEN, jnp.float32), zeros((r,)))
    for ref, x in zip(out, jax.lax.fori_loop(first, last, attend, nothing), strict=True):
        ref[...] = x
