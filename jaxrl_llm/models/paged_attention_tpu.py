"""Attention of a decode step to a sequence's own pages, and the write of its token, with TPU kernels.

Letters are those of `paged_attention`. `attend_own` has a program for each sequence and `each` of its pages, and reads
no other page. A page is an operand of its own: its index map looks up in the table which page is copied, and while one
program computes, the pages of the next are copied.

The lanes of a TPU's memory are 128 wide, and its compiler lays arrays out so that they are full: keys and values as
[s, h], if h fills them, otherwise as [h, s], if s does. The kernel takes them so. In any other order, or if neither
fills them, each program of the engine would copy all pages.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_llm.models.attention import KeyValue, bounded
from jaxrl_llm.models.paged_attention import HIDDEN, Pages, Partial, seen_from
from jaxrl_llm.structs import Array

MOST = 8  # pages of a program
LANES, SUBLANES = 128, 16  # the least tile of memory, of bfloat16
# Memory for the pages of two programs: one program's pages are copied while the other computes. The compiler allows
# twice as much.
BYTES = 8 * 2**20


def fits(device: Any, head_dim: int, dtype: str, page: int) -> bool:
    """Whether the kernel runs on this device with this head size, dtype and number of tokens of a page."""
    lanes = head_dim % LANES == 0 or page % LANES == 0
    whole = lanes and head_dim % SUBLANES == 0 and page % SUBLANES == 0
    return device.platform == "tpu" and whole and dtype in ("bfloat16", "float32")


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
    each = min(_pages_of_program(pages), width)
    steps = -(-width // each)
    # A program has all heads: a page is one copy.
    keys, values = _as_stored(pages, h)

    def row_spec(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *block), lambda row, *_: (row, 0, 0, 0))

    kernel = partial(_attend, soft_cap=soft_cap, each=each)
    out, top, total = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows, steps),
            in_specs=[row_spec(k, r, h), *[_page(each, i, keys.shape, steps) for i in range(each)] * 2],
            out_specs=[row_spec(k, r, h), row_spec(k, r, 1), row_spec(k, r, 1)],
        ),
        out_shape=[jax.ShapeDtypeStruct((rows, k, r, last), jnp.float32) for last in (h, 1, 1)],
        # Where a chip has two cores, each takes half of the sequences.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(
        _copied(table, start, length, page, each, steps, pages.values.shape[1]),
        start,
        length,
        jnp.swapaxes(query, 0, 1),
        *[keys] * each,
        *[values] * each,
    )
    return Partial(*(jnp.swapaxes(x, 0, 1) for x in (out, top[..., 0], total[..., 0])))


def write_own(pages: Pages, page: Array, offset: Array, tokens: KeyValue, *, interpret: bool = False) -> Pages:
    """Writes a token [K, S, 1, h] to `offset` [S] of `page` [S] of each sequence; out of range: nowhere.

    What `Pages.write` does. Its scatter has an order of its own, for which the compiler copies all pages, twice.
    """
    k, count, h, _ = pages.keys.shape
    rows, stored, by_rows = len(page), _as_stored(pages, h), h % LANES == 0
    limit = max(1, BYTES // (sum(x.nbytes for x in pages[:2]) // count))
    each = next(x for x in range(min(limit, rows), 0, -1) if rows % x == 0)
    shape = (rows, k, 1, h) if by_rows else (rows, k, h, 1)
    new = [jnp.swapaxes(x[:, :, 0], 0, 1).reshape(shape) for x in tokens]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        partial(_write, each=each, axis=1 if by_rows else 2),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows // each,),
            in_specs=[*[pl.BlockSpec((each, *shape[1:]), lambda i, *_: (i, 0, 0, 0))] * 2, anywhere, anywhere],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[*(pltpu.VMEM((each, k, *x.shape[2:]), x.dtype) for x in stored), pltpu.SemaphoreType.DMA],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored],
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
        name="paged_write",
    )(page.astype(jnp.int32), offset.astype(jnp.int32), *new, *stored)
    return Pages(*_as_stored(Pages(*written), h))


def _as_stored(pages: Pages, h: int) -> tuple[Array, Array]:
    """Returns keys and values in the order of the module's first lines, or from there in that of `Pages`."""
    keys, values = pages.keys, pages.values
    return (jnp.swapaxes(keys, 2, 3), values) if h % LANES == 0 else (keys, jnp.swapaxes(values, 2, 3))


def _pages_of_program(pages: Pages) -> int:
    """Returns how many pages a program has. It does not depend on the sequences, so neither do their numbers."""
    twice = 2 * sum(x.nbytes for x in pages[:2]) // pages.keys.shape[1]
    return max(1, min(MOST, BYTES // twice))


def _page(each: int, i: int, shape: tuple[int, ...], steps: int) -> pl.BlockSpec:
    """Returns which page of all, of this shape, is operand i of a program."""
    at = lambda row, step, copied, *_: (0, copied[(row * steps + step) * each + i], 0, 0)  # noqa: E731
    return pl.BlockSpec((shape[0], None, *shape[2:]), at)


def _copied(table: Array, start: Array, length: Array, page: int, each: int, steps: int, count: int) -> jax.Array:
    """Returns the pages of all programs, one program after the other: [S * steps * each].

    A program without an i-th page has that of the program before it, which is not copied again.
    """
    place = (start // page)[:, None] + jnp.arange(steps * each)[None]
    wanted = (place * page < length[:, None]).reshape(-1, each)
    found = jnp.take_along_axis(table, jnp.minimum(place, table.shape[1] - 1), axis=1)
    index = jnp.where(wanted, jnp.arange(len(wanted))[:, None], 0)
    found = jnp.take_along_axis(found.reshape(-1, each), jax.lax.cummax(index, axis=0), axis=0)
    return jnp.minimum(found, count - 1).reshape(-1).astype(jnp.int32)


def _attend(copied: Any, start: Any, length: Any, query: Any, *refs: Any, soft_cap: float, each: int) -> None:
    """One program: query [K, R, h], `each` keys and values -> out [K, R, h], top and total [K, R, 1]."""
    del copied
    keys, values, (out, top, total) = refs[:each], refs[each : 2 * each], refs[2 * each :]
    axes = "ksh" if query.shape[-1] % LANES == 0 else "khs"
    page = keys[0].shape[axes.index("s")]
    row, step = pl.program_id(0), pl.program_id(1)
    # Float32 is multiplied as such: by default it would be rounded to bfloat16.
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(step == 0)
    def _():
        out[...] = jnp.zeros(out.shape, jnp.float32)
        top[...] = jnp.full(top.shape, HIDDEN, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)

    # `div` and not `//`, whose sign would make JAX ask for this machine's TPU: a machine without one can compile too.
    first = (jax.lax.div(start[row], page) + step * each) * page

    @pl.when(first < length[row])
    def _():
        place = first + jax.lax.broadcasted_iota(jnp.int32, (1, 1, page), 2)
        seen = [(place + i * page >= start[row]) & (place + i * page < length[row]) for i in range(each)]
        scores = [bounded(product(f"krh,{axes}->krs", query[...], x[...]), soft_cap) for x in keys]
        scores = [jnp.where(see, x, HIDDEN) for see, x in zip(seen, scores, strict=True)]
        highest = jnp.maximum(top[...], jnp.max(reduce(jnp.maximum, scores), axis=-1, keepdims=True))
        # If nothing is seen, the highest score is HIDDEN, and exp(0) is not 0.
        weights = [jnp.where(see, jnp.exp(x - highest), 0.0) for see, x in zip(seen, scores, strict=True)]
        before = jnp.exp(top[...] - highest)
        rounded = [x.astype(query.dtype) for x in weights]
        new = [product(f"krs,{axes}->krh", weight, x[...]) for weight, x in zip(rounded, values, strict=True)]
        out[...] = reduce(jnp.add, new, before * out[...])
        total[...] = before * total[...] + jnp.sum(reduce(jnp.add, weights), axis=-1, keepdims=True)
        top[...] = highest


def _write(page: Any, offset: Any, *refs: Any, each: int, axis: int) -> None:
    """One program: writes `each` tokens, whose pages are copied from the memory and back. axis: a page's token axis."""
    tokens, pages_out, buffers, arrived = refs[:2], refs[4:6], refs[6:8], refs[8]
    first = pl.program_id(0) * each

    def for_each(do: Any) -> None:
        @pl.loop(0, each)
        def _(i: Array) -> None:
            pl.when(page[first + i] < pages_out[0].shape[1])(partial(do, i))

    def copies(i: Array, back: bool) -> list[Any]:
        pairs = [(x.at[:, page[first + i]], buffer.at[i]) for x, buffer in zip(pages_out, buffers, strict=True)]
        return [
            pltpu.make_async_copy(b, a, arrived) if back else pltpu.make_async_copy(a, b, arrived) for a, b in pairs
        ]

    def change(i: Array) -> None:
        for token, buffer in zip(tokens, buffers, strict=True):
            # The selection is float32, because not all TPUs select among bfloat16.
            old, new = buffer[i].astype(jnp.float32), token[i].astype(jnp.float32)
            at = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis) == offset[first + i]
            buffer[i] = jnp.where(at, new, old).astype(buffer.dtype)

    def all_copies(back: bool) -> None:
        for_each(lambda i: [copy.start() for copy in copies(i, back)] and None)
        for_each(lambda i: [copy.wait() for copy in copies(i, back)] and None)

    all_copies(back=False)
    for_each(change)
    all_copies(back=True)
