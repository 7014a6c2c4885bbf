"""TPU kernels of a decoding round: attention to the sequences' own pages, and the write of their new tokens.

The letters of shapes are those of `paged_attention`. `attend_own` runs one program for each sequence and each
`pages_of_program` of its pages. Each page is an operand, whose index map looks up the page's number in a table. While
one program computes, the TPU copies the pages of the next program.

Rows of a TPU's memory have 128 lanes. Its compiler lays out keys and values as [s, h] if h fills the lanes, otherwise
as [h, s] if s does. The kernels use the same layouts, because any other layout would make each program copy all pages.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_llm.models.attention import KeyValue, soft_capped
from jaxrl_llm.models.paged_attention import HIDDEN_SCORE, LANES, Pages, PartialAttention, first_visible
from jaxrl_llm.structs import Array

MAX_PAGES_OF_PROGRAM = 8  # largest number of pages of a program
SUBLANES = 16  # smallest tile of memory for bfloat16, with LANES
# Bytes for the pages of two programs, one that computes and one whose pages are copied; half of the compiler's limit.
COPY_BYTES = 8 * 2**20


def fits(device: Any, head_dim: int, dtype: str, page_tokens: int) -> bool:
    """Returns whether the kernels support this device, head size, dtype and number of tokens of a page."""
    full_lanes = head_dim % LANES == 0 or page_tokens % LANES == 0
    full_tiles = full_lanes and head_dim % SUBLANES == 0 and page_tokens % SUBLANES == 0
    return device.platform == "tpu" and full_tiles and dtype in ("bfloat16", "float32")


def attend_own(
    query: Array,
    pages: Pages,
    table: Array,
    length: Array,
    window: int = 0,
    soft_cap: float = 0.0,
    *,
    interpret: bool = False,
) -> PartialAttention:
    """Returns attention [K, S, R] of a query [K, S, R, h] to the pages of its sequence, by the TPU kernel.

    The axes are key heads, sequences, query heads per key head, and the head size.
    table: numbers of each sequence's pages [S, n], in order. length: number of tokens in these pages [S].
    window: number of last tokens that are seen, 0 = all. soft_cap: bound of scores, 0 = unbounded. interpret: whether
    to emulate the kernel, for tests. weight_sum is 0 for a sequence without tokens.
    """
    k, sequences, r, h = query.shape
    page_tokens = pages.values.shape[2]
    start, visible_pages = first_visible(length, window, page_tokens, table.shape[1])
    pages_of_program = min(_count_pages_of_program(pages), visible_pages)
    steps = -(-visible_pages // pages_of_program)
    # A program computes all heads, so that a page is copied at once.
    keys, values = _as_stored(pages, h)

    def row_spec(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *block), lambda row, *_: (row, 0, 0, 0))

    kernel = partial(_attend, soft_cap=soft_cap, pages_of_program=pages_of_program)
    weighted_values, highest_score, weight_sum = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(sequences, steps),
            in_specs=[
                row_spec(k, r, h),
                *[_page_spec(pages_of_program, i, keys.shape, steps) for i in range(pages_of_program)] * 2,
            ],
            out_specs=[row_spec(k, r, h), row_spec(k, r, 1), row_spec(k, r, 1)],
        ),
        out_shape=[jax.ShapeDtypeStruct((sequences, k, r, last_axis), jnp.float32) for last_axis in (h, 1, 1)],
        # "parallel" lets the two cores of some chips divide the sequences.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(
        _program_pages(
            table=table,
            start=start,
            length=length,
            page_tokens=page_tokens,
            pages_of_program=pages_of_program,
            steps=steps,
            page_count=pages.values.shape[1],
        ),
        start,
        length,
        jnp.swapaxes(query, 0, 1),
        *[keys] * pages_of_program,
        *[values] * pages_of_program,
    )
    return PartialAttention(
        *(jnp.swapaxes(x, 0, 1) for x in (weighted_values, highest_score[..., 0], weight_sum[..., 0]))
    )


def write_own(pages: Pages, page: Array, offset: Array, tokens: KeyValue, *, interpret: bool = False) -> Pages:
    """Returns the pages with one new token of each sequence written, as `Pages.write` does.

    page: page of each token [S]; tokens of a page out of range are not written. offset: index of each token in its page
    [S]. tokens: keys and values [K, S, 1, h]. interpret: whether to emulate the kernel, for tests. The kernel exists,
    because the scatter of `Pages.write` needs another memory layout, for which the compiler would copy all pages twice.
    """
    k, page_count, h, _ = pages.keys.shape
    sequences, page_arrays, tokens_are_rows = len(page), _as_stored(pages, h), h % LANES == 0
    page_bytes = sum(array.nbytes for array in pages[:2]) // page_count
    most_tokens = max(1, COPY_BYTES // page_bytes)
    # The largest divisor of the number of sequences, so that all programs write equally many tokens.
    tokens_of_program = next(count for count in range(min(most_tokens, sequences), 0, -1) if sequences % count == 0)
    shape = (sequences, k, 1, h) if tokens_are_rows else (sequences, k, h, 1)
    new_tokens = [jnp.swapaxes(x[:, :, 0], 0, 1).reshape(shape) for x in tokens]
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        partial(_write, tokens_of_program=tokens_of_program, axis=1 if tokens_are_rows else 2),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(sequences // tokens_of_program,),
            in_specs=[
                *[pl.BlockSpec((tokens_of_program, *shape[1:]), lambda i, *_: (i, 0, 0, 0))] * 2,
                any_memory,
                any_memory,
            ],
            out_specs=[any_memory, any_memory],
            scratch_shapes=[
                *(pltpu.VMEM((tokens_of_program, k, *x.shape[2:]), x.dtype) for x in page_arrays),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in page_arrays],
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
        name="paged_write",
    )(page.astype(jnp.int32), offset.astype(jnp.int32), *new_tokens, *page_arrays)
    return Pages(*_as_stored(Pages(*written), h))


def _as_stored(pages: Pages, h: int) -> tuple[Array, Array]:
    """Converts keys and values from the layout of `Pages` to the layout of the kernels, and back."""
    keys, values = pages.keys, pages.values
    return (jnp.swapaxes(keys, 2, 3), values) if h % LANES == 0 else (keys, jnp.swapaxes(values, 2, 3))


def _count_pages_of_program(pages: Pages) -> int:
    """Returns the number of pages of a program, which depends only on the shape of pages, not on the sequences."""
    bytes_of_two_copies = 2 * sum(x.nbytes for x in pages[:2]) // pages.keys.shape[1]
    return max(1, min(MAX_PAGES_OF_PROGRAM, COPY_BYTES // bytes_of_two_copies))


def _page_spec(pages_of_program: int, i: int, shape: tuple[int, ...], steps: int) -> pl.BlockSpec:
    """Returns the block specification of operand i of a program: one page of keys or values of this shape."""

    def page_index(row: Any, step: Any, program_pages: Any, *_: Any) -> tuple[Any, ...]:
        return 0, program_pages[(row * steps + step) * pages_of_program + i], 0, 0

    return pl.BlockSpec((shape[0], None, *shape[2:]), page_index)


def _program_pages(
    table: Array, start: Array, length: Array, page_tokens: int, pages_of_program: int, steps: int, page_count: int
) -> jax.Array:
    """Returns the page numbers of all programs, in the order of the programs: [S * steps * pages_of_program].

    Where a program has no i-th page, it gets the i-th page of the program before it, which is not copied again.
    """
    page_places = (start // page_tokens)[:, None] + jnp.arange(steps * pages_of_program)[None]
    is_needed = (page_places * page_tokens < length[:, None]).reshape(-1, pages_of_program)
    page_ids = jnp.take_along_axis(table, jnp.minimum(page_places, table.shape[1] - 1), axis=1)
    last_program = jnp.where(is_needed, jnp.arange(len(is_needed))[:, None], 0)
    page_ids = jnp.take_along_axis(page_ids.reshape(-1, pages_of_program), jax.lax.cummax(last_program, axis=0), axis=0)
    return jnp.minimum(page_ids, page_count - 1).reshape(-1).astype(jnp.int32)


def _attend(
    program_pages: Any, start: Any, length: Any, query: Any, *refs: Any, soft_cap: float, pages_of_program: int
) -> None:
    """Runs one program of the kernel: all heads, and `pages_of_program` pages of one sequence.

    query: [K, R, h]. refs: pages of keys, pages of values, then the outputs weighted_values [K, R, h], highest_score
    and weight_sum [K, R, 1], which the programs of a sequence update one after the other.
    """
    del program_pages
    keys, values, (weighted_values, highest_score, weight_sum) = (
        refs[:pages_of_program],
        refs[pages_of_program : 2 * pages_of_program],
        refs[2 * pages_of_program :],
    )
    axes = "ksh" if query.shape[-1] % LANES == 0 else "khs"
    page_tokens = keys[0].shape[axes.index("s")]
    sequence, step = pl.program_id(0), pl.program_id(1)
    # HIGHEST precision, because float32 products would be rounded to bfloat16 by default.
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    @pl.when(step == 0)
    def _clear_outputs():
        weighted_values[...] = jnp.zeros(weighted_values.shape, jnp.float32)
        highest_score[...] = jnp.full(highest_score.shape, HIDDEN_SCORE, jnp.float32)
        weight_sum[...] = jnp.zeros(weight_sum.shape, jnp.float32)

    # `div` replaces `//`, whose sign handling would make JAX look for a TPU on the machine that compiles.
    first_token = (jax.lax.div(start[sequence], page_tokens) + step * pages_of_program) * page_tokens

    @pl.when(first_token < length[sequence])
    def _add_pages():
        token_places = first_token + jax.lax.broadcasted_iota(jnp.int32, (1, 1, page_tokens), 2)
        places_by_page = [token_places + index * page_tokens for index in range(pages_of_program)]
        is_visible = [(places >= start[sequence]) & (places < length[sequence]) for places in places_by_page]
        # All lists below have one entry for each page of the program.
        scores = [soft_capped(product(f"krh,{axes}->krs", query[...], page[...]), soft_cap) for page in keys]
        scores = [jnp.where(visible, score, HIDDEN_SCORE) for visible, score in zip(is_visible, scores, strict=True)]
        new_highest = jnp.maximum(highest_score[...], jnp.max(reduce(jnp.maximum, scores), axis=-1, keepdims=True))
        # Weights of hidden keys are set to 0, because exp(0) = 1 where the highest score is HIDDEN_SCORE.
        weights = [
            jnp.where(visible, jnp.exp(score - new_highest), 0.0)
            for visible, score in zip(is_visible, scores, strict=True)
        ]
        # The sums of earlier pages were made with a lower highest score.
        rescale = jnp.exp(highest_score[...] - new_highest)
        rounded_weights = [weight.astype(query.dtype) for weight in weights]
        page_values = [
            product(f"krs,{axes}->krh", weight, page[...]) for weight, page in zip(rounded_weights, values, strict=True)
        ]
        weighted_values[...] = reduce(jnp.add, page_values, rescale * weighted_values[...])
        weight_sum[...] = rescale * weight_sum[...] + jnp.sum(reduce(jnp.add, weights), axis=-1, keepdims=True)
        highest_score[...] = new_highest


def _write(page: Any, offset: Any, *refs: Any, tokens_of_program: int, axis: int) -> None:
    """Runs one program of the kernel: copies the pages of some tokens from memory, writes the tokens, and copies back.

    refs: new keys and values, old pages, new pages, buffers, semaphore. axis: token axis of a page in its buffer.
    """
    tokens, pages_out, buffers, semaphore = refs[:2], refs[4:6], refs[6:8], refs[8]
    first_token = pl.program_id(0) * tokens_of_program

    def for_each(run: Any) -> None:
        """Calls run(index) for each token of the program whose page exists. index: index of the token."""

        @pl.loop(0, tokens_of_program)
        def _(index: Array) -> None:
            pl.when(page[first_token + index] < pages_out[0].shape[1])(partial(run, index))

    def copies_of(index: Array, back: bool) -> list[Any]:
        """Returns the copies of a token's pages, of keys and of values: to the buffers, or back from them."""
        number = page[first_token + index]
        pairs = [(out.at[:, number], buffer.at[index]) for out, buffer in zip(pages_out, buffers, strict=True)]
        return [
            pltpu.make_async_copy(buffer, stored, semaphore)
            if back
            else pltpu.make_async_copy(stored, buffer, semaphore)
            for stored, buffer in pairs
        ]

    def write_token(index: Array) -> None:
        for token, buffer in zip(tokens, buffers, strict=True):
            # The selection is in float32, because some TPUs cannot select among bfloat16.
            old_rows, new_rows = buffer[index].astype(jnp.float32), token[index].astype(jnp.float32)
            at_offset = jax.lax.broadcasted_iota(jnp.int32, old_rows.shape, axis) == offset[first_token + index]
            buffer[index] = jnp.where(at_offset, new_rows, old_rows).astype(buffer.dtype)

    def copy_all(back: bool) -> None:
        # All copies start before the first wait, so that they run at the same time.
        for_each(lambda index: [copy.start() for copy in copies_of(index, back)] and None)
        for_each(lambda index: [copy.wait() for copy in copies_of(index, back)] and None)

    copy_all(back=False)
    for_each(write_token)
    copy_all(back=True)
