"""TPU kernels of a decoding round: attention to the sequences' own pages, and the write of their new tokens.

Shapes: K key heads, R query heads per key head, head size h; p pages of s tokens; S sequences with up to n pages each.
`attend_own` runs a grid of programs: each program computes up to `pages_of_program` pages of one sequence. Each page is
an operand, whose index map looks up the page's number in a table. While one program computes, the TPU copies the pages
of the next program.

Rows of a TPU's memory have 128 lanes. Its compiler lays out keys and values as [s, h] if h is a multiple of 128,
otherwise as [h, s]. The kernels use these layouts too, because another layout would make each program copy all pages.
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

MAX_PAGES_OF_PROGRAM = 8  # largest number of pages that one program computes
SUBLANES = 16  # rows of the smallest tile of memory for bfloat16, which is SUBLANES x LANES
# Bytes of fast memory for the pages of two programs: one program computes while the pages of the next one are copied.
# The number is half of the compiler's limit.
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
    first_seen_token, visible_pages = first_visible(length, window, page_tokens, table.shape[1])
    pages_of_program = min(_count_pages_of_program(pages), visible_pages)
    programs_of_sequence = -(-visible_pages // pages_of_program)  # rounded up
    # A program computes all heads, so that a page is copied at once.
    keys, values = _swap_layout(pages, h)

    def sequence_spec(*block: int) -> pl.BlockSpec:
        """Specifies the block of one sequence in an array whose first axis is S."""
        return pl.BlockSpec((None, *block), lambda sequence, *_: (sequence, 0, 0, 0))

    kernel = partial(_attend, soft_cap=soft_cap, pages_of_program=pages_of_program)
    page_specs = [_page_spec(pages_of_program, i, keys.shape, programs_of_sequence) for i in range(pages_of_program)]
    weighted_values, highest_score, weight_sum = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(sequences, programs_of_sequence),
            # The operands are the query, the pages of keys, and the pages of values.
            in_specs=[sequence_spec(k, r, h), *page_specs, *page_specs],
            out_specs=[sequence_spec(k, r, h), sequence_spec(k, r, 1), sequence_spec(k, r, 1)],
        ),
        out_shape=[jax.ShapeDtypeStruct((sequences, k, r, last_axis), jnp.float32) for last_axis in (h, 1, 1)],
        # "parallel" lets the two cores of some chips divide the sequences.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(
        _program_pages(
            table=table,
            first_seen_token=first_seen_token,
            length=length,
            page_tokens=page_tokens,
            pages_of_program=pages_of_program,
            programs_of_sequence=programs_of_sequence,
            page_count=pages.values.shape[1],
        ),
        first_seen_token,
        length,
        jnp.swapaxes(query, 0, 1),
        *[keys] * pages_of_program,
        *[values] * pages_of_program,
    )
    return PartialAttention(
        *(jnp.swapaxes(x, 0, 1) for x in (weighted_values, highest_score[..., 0], weight_sum[..., 0]))
    )


def write_own(pages: Pages, page: Array, offset: Array, tokens: KeyValue, *, interpret: bool = False) -> Pages:
    """Returns the pages with one new token of each sequence written, by a kernel with the effect of `Pages.write`.

    page: page of each token [S]; tokens of a page out of range are not written. offset: index of each token in its page
    [S]. tokens: keys and values [K, S, 1, h]. interpret: whether to emulate the kernel, for tests. The kernel exists,
    because the scatter of `Pages.write` needs another memory layout, for which the compiler would copy all pages twice.
    """
    k, page_count, h, _ = pages.keys.shape
    sequences, page_arrays, tokens_are_rows = len(page), _swap_layout(pages, h), h % LANES == 0
    page_bytes = sum(array.nbytes for array in pages[:2]) // page_count
    most_tokens = max(1, COPY_BYTES // page_bytes)
    # The largest divisor of the number of sequences, so that all programs write equally many tokens.
    tokens_of_program = next(count for count in range(min(most_tokens, sequences), 0, -1) if sequences % count == 0)
    token_shape = (k, 1, h) if tokens_are_rows else (k, h, 1)
    new_tokens = [jnp.swapaxes(x[:, :, 0], 0, 1).reshape(sequences, *token_shape) for x in tokens]
    # The pages stay in the large memory of the device. The kernel copies the pages that it changes to buffers and back.
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    written_pages = pl.pallas_call(
        partial(_write, tokens_of_program=tokens_of_program, axis=1 if tokens_are_rows else 2),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(sequences // tokens_of_program,),
            in_specs=[
                *[pl.BlockSpec((tokens_of_program, *token_shape), lambda i, *_: (i, 0, 0, 0))] * 2,
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
        input_output_aliases={4: 0, 5: 1},  # the new pages take the memory of the old pages
        interpret=interpret,
        name="paged_write",
    )(page.astype(jnp.int32), offset.astype(jnp.int32), *new_tokens, *page_arrays)
    return Pages(*_swap_layout(Pages(*written_pages), h))


def _swap_layout(pages: Pages, h: int) -> tuple[Array, Array]:
    """Converts keys and values from the layout of `Pages` to the layout of the kernels, or back.

    In `Pages`, keys are [K, p, h, s] and values [K, p, s, h]. In the kernels, both are [K, p, s, h] if the head size h
    is a multiple of LANES, otherwise [K, p, h, s].
    """
    if h % LANES == 0:
        return jnp.swapaxes(pages.keys, 2, 3), pages.values
    return pages.keys, jnp.swapaxes(pages.values, 2, 3)


def _count_pages_of_program(pages: Pages) -> int:
    """Returns how many pages one program computes. The number depends on the shape of pages, not on the sequences."""
    bytes_of_two_copies = 2 * sum(x.nbytes for x in pages[:2]) // pages.keys.shape[1]
    return max(1, min(MAX_PAGES_OF_PROGRAM, COPY_BYTES // bytes_of_two_copies))


def _page_spec(
    pages_of_program: int, page_index: int, shape: tuple[int, ...], programs_of_sequence: int
) -> pl.BlockSpec:
    """Specifies one page, of keys or of values, that each program reads. shape: shape of all pages.

    page_index: index of the page among the pages of its program.
    """

    def block_index(sequence: Any, step: Any, program_pages: Any, *_: Any) -> tuple[Any, ...]:
        """Looks up the page's number in the result of `_program_pages`. step: index among the sequence's programs."""
        program = sequence * programs_of_sequence + step
        return 0, program_pages[program * pages_of_program + page_index], 0, 0

    return pl.BlockSpec((shape[0], None, *shape[2:]), block_index)


def _program_pages(
    table: Array,
    first_seen_token: Array,
    length: Array,
    page_tokens: int,
    pages_of_program: int,
    programs_of_sequence: int,
    page_count: int,
) -> jax.Array:
    """Returns the numbers of the pages that each program reads: [S * programs_of_sequence * pages_of_program].

    If a program needs no i-th page, its i-th number is that of the program before it, because a TPU does not copy an
    operand again that stays the same.
    """
    # The k-th page that a sequence's programs read is entry `page_places[:, k]` of the sequence's row in the table.
    first_page = first_seen_token // page_tokens
    page_places = first_page[:, None] + jnp.arange(programs_of_sequence * pages_of_program)[None]
    page_numbers = jnp.take_along_axis(table, jnp.minimum(page_places, table.shape[1] - 1), axis=1)
    page_numbers = page_numbers.reshape(-1, pages_of_program)  # one row for each program
    is_needed = (page_places * page_tokens < length[:, None]).reshape(-1, pages_of_program)
    # Find, for each program and i, the last program up to this program that needs its i-th page.
    program_or_0 = jnp.where(is_needed, jnp.arange(len(is_needed))[:, None], 0)
    last_program = jax.lax.cummax(program_or_0, axis=0)
    page_numbers = jnp.take_along_axis(page_numbers, last_program, axis=0)
    return jnp.minimum(page_numbers, page_count - 1).reshape(-1).astype(jnp.int32)


def _attend(
    program_pages: Any,
    first_seen_token: Any,
    length: Any,
    query: Any,
    *refs: Any,
    soft_cap: float,
    pages_of_program: int,
) -> None:
    """Runs one program of `attend_own`: adds `pages_of_program` pages of one sequence to the attention of all heads.

    first_seen_token, length: range of the tokens that each sequence's query sees. query: [K, R, h]. refs: pages of
    keys, pages of values, then the outputs weighted_values [K, R, h], highest_score and weight_sum [K, R, 1], which the
    programs of a sequence update one after the other.
    """
    del program_pages  # Only the index maps of the operands read these page numbers.
    keys, values = refs[:pages_of_program], refs[pages_of_program : 2 * pages_of_program]
    weighted_values, highest_score, weight_sum = refs[2 * pages_of_program :]
    page_axes = "ksh" if query.shape[-1] % LANES == 0 else "khs"  # axes of a page, as letters for einsum
    page_tokens = keys[0].shape[page_axes.index("s")]
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
    first_page = jax.lax.div(first_seen_token[sequence], page_tokens) + step * pages_of_program
    first_token = first_page * page_tokens

    @pl.when(first_token < length[sequence])
    def _add_pages():
        token_places = first_token + jax.lax.broadcasted_iota(jnp.int32, (1, 1, page_tokens), 2)
        places_by_page = [token_places + index * page_tokens for index in range(pages_of_program)]
        first_seen, end = first_seen_token[sequence], length[sequence]
        # All lists in this function have one entry for each page of the program.
        is_visible = [(places >= first_seen) & (places < end) for places in places_by_page]
        scores = [soft_capped(product(f"krh,{page_axes}->krs", query[...], page[...]), soft_cap) for page in keys]
        scores = [jnp.where(visible, score, HIDDEN_SCORE) for visible, score in zip(is_visible, scores, strict=True)]
        new_highest = jnp.maximum(highest_score[...], jnp.max(reduce(jnp.maximum, scores), axis=-1, keepdims=True))
        # Weights of hidden keys are set to 0, because exp(0) = 1 where the highest score is HIDDEN_SCORE.
        weights = [
            jnp.where(visible, jnp.exp(score - new_highest), 0.0)
            for visible, score in zip(is_visible, scores, strict=True)
        ]
        # The sums over earlier pages were computed with a lower highest score, so they are rescaled.
        rescale = jnp.exp(highest_score[...] - new_highest)
        rounded_weights = [weight.astype(query.dtype) for weight in weights]
        page_values = [
            product(f"krs,{page_axes}->krh", weight, page[...])
            for weight, page in zip(rounded_weights, values, strict=True)
        ]
        weighted_values[...] = reduce(jnp.add, page_values, rescale * weighted_values[...])
        weight_sum[...] = rescale * weight_sum[...] + jnp.sum(reduce(jnp.add, weights), axis=-1, keepdims=True)
        highest_score[...] = new_highest


def _write(page: Any, offset: Any, *refs: Any, tokens_of_program: int, axis: int) -> None:
    """Runs one program of `write_own`: copies the pages of some tokens to buffers, writes the tokens, and copies back.

    page, offset: page of each token, and its index in the page. refs: new keys and values, old pages, new pages,
    buffers, semaphore. axis: token axis of a page in its buffer.
    """
    tokens, stored_pages, buffers, semaphore = refs[:2], refs[4:6], refs[6:8], refs[8]
    first_token, page_count = pl.program_id(0) * tokens_of_program, stored_pages[0].shape[1]

    def for_each_token(run: Any) -> None:
        """Calls run(index) for each token of the program whose page exists. index: index of the token."""

        @pl.loop(0, tokens_of_program)
        def _(index: Array) -> None:
            pl.when(page[first_token + index] < page_count)(partial(run, index))

    def page_copies(index: Array, back: bool) -> list[Any]:
        """Returns the copies of a token's pages, of keys and of values: to the buffers, or back from the buffers."""
        page_number, copies = page[first_token + index], []
        for pages, buffer in zip(stored_pages, buffers, strict=True):
            stored_page, buffered_page = pages.at[:, page_number], buffer.at[index]
            source, target = (buffered_page, stored_page) if back else (stored_page, buffered_page)
            copies.append(pltpu.make_async_copy(source, target, semaphore))
        return copies

    def write_token(index: Array) -> None:
        """Writes a token's keys and values to the buffers of its pages."""
        for token, buffer in zip(tokens, buffers, strict=True):
            # The selection is in float32, because some TPUs cannot select among bfloat16.
            old_rows, new_rows = buffer[index].astype(jnp.float32), token[index].astype(jnp.float32)
            at_offset = jax.lax.broadcasted_iota(jnp.int32, old_rows.shape, axis) == offset[first_token + index]
            buffer[index] = jnp.where(at_offset, new_rows, old_rows).astype(buffer.dtype)

    def copy_pages(back: bool) -> None:
        # All copies start before the first wait, so that they run at the same time.
        for_each_token(lambda index: [copy.start() for copy in page_copies(index, back)] and None)
        for_each_token(lambda index: [copy.wait() for copy in page_copies(index, back)] and None)

    copy_pages(back=False)
    for_each_token(write_token)
    copy_pages(back=True)
