"""Attention of a decoding round to the sequences' own pages, by a Triton kernel for GPUs.

The letters of shapes are those of `paged_attention`. The kernel runs one program for each sequence, key head and part
of the sequence, and the parts are combined afterwards. Splitting a sequence into parts keeps a GPU busy also when it
decodes few sequences.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxrl_llm.models.attention import soft_capped
from jaxrl_llm.models.attention_gpu import is_ampere_or_newer
from jaxrl_llm.models.paged_attention import HIDDEN_SCORE, Pages, PartialAttention, combine, first_visible
from jaxrl_llm.structs import Array

SMALLEST_TILE = 16  # smallest side of a matrix product in Triton
TOKENS_OF_PART = 256  # tokens of a part; longer parts are used where a sequence would have more than MAX_PARTS parts
MAX_PARTS = 16


def fits(device: Any, head_dim: int, dtype: str, page_tokens: int) -> bool:
    """Returns whether the kernel supports this device, head size, dtype and number of tokens of a page."""
    # Sides of Triton's arrays are powers of 2.
    sides_fit = all(SMALLEST_TILE <= x <= 256 and x & (x - 1) == 0 for x in (head_dim, page_tokens))
    return is_ampere_or_newer(device) and sides_fit and dtype in ("bfloat16", "float32")


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
    """Returns attention [K, S, R] of a query [K, S, R, h] to the pages of its sequence.

    table: numbers of each sequence's pages [S, n], in order. length: number of tokens in these pages [S].
    window: number of last tokens that are seen, 0 = all. soft_cap: bound of scores, 0 = unbounded. interpret: whether
    to emulate the kernel, for tests. weight_sum is 0 for a sequence without tokens.
    """
    k, sequences, r, h = query.shape
    page_tokens = pages.values.shape[2]
    start, visible_pages = first_visible(length, window, page_tokens, table.shape[1])
    # The number of parts is independent of the number of sequences, so that other sequences do not change the rounding.
    pages_of_part = max(1, TOKENS_OF_PART // page_tokens, -(-visible_pages // MAX_PARTS))
    parts = -(-visible_pages // pages_of_part)
    head_padding = max(SMALLEST_TILE, pl.next_power_of_2(r)) - r
    query = jnp.pad(query, ((0, 0), (0, 0), (0, head_padding), (0, 0)))

    def whole_array(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    scalars = jnp.minimum(table, pages.values.shape[1] - 1).astype(jnp.int32), start, length
    padded_heads = r + head_padding
    page_arrays = jax.tree.leaves(pages)
    outputs = [((padded_heads, h), (0, 0)), ((padded_heads,), (0,)), ((padded_heads,), (0,))]
    padded_outputs = pl.pallas_call(
        partial(_attend, soft_cap=soft_cap, pages_of_part=pages_of_part),
        grid=(sequences, k, parts),
        in_specs=[
            *map(whole_array, scalars),
            pl.BlockSpec((None, None, padded_heads, h), lambda row, head, part: (head, row, 0, 0)),
            *map(whole_array, page_arrays),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, *shape), lambda row, head, part, zeros=zeros: (part, head, row, *zeros))
            for shape, zeros in outputs
        ],
        out_shape=[jax.ShapeDtypeStruct((parts, k, sequences, *shape), jnp.float32) for shape, _ in outputs],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, query, *page_arrays)
    partials = PartialAttention(*(x[:, :, :, :r] for x in padded_outputs))
    # The parts are combined in order. A part without tokens changes nothing.
    return reduce(combine, [jax.tree.map(lambda x, i=i: x[i], partials) for i in range(parts)])


def _attend(
    table: Any,
    start: Any,
    length: Any,
    query: Any,
    keys: Any,
    values: Any,
    *refs: Any,
    soft_cap: float,
    pages_of_part: int,
) -> None:
    """Runs one program of the kernel: one key head, and `pages_of_part` pages of one sequence.

    query: queries [R, h] of the head. refs: scales of keys and values if the pages are int8, then the outputs
    weighted_values [R, h], highest_score [R] and weight_sum [R].
    """
    scales, outputs = refs[:-3], refs[-3:]
    sequence, head, part = (pl.program_id(i) for i in range(3))
    page_tokens, (r, h) = values.shape[2], query.shape
    first_token, end_token = start[sequence], length[sequence]
    heads = query[...]
    # HIGHEST precision, because float32 products would be rounded to TF32 by default.
    precision = jax.lax.Precision.HIGHEST if heads.dtype == jnp.float32 else None
    product = partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    def attend_page(page_index: Array, pages_before: PartialAttention) -> PartialAttention:
        """Adds one page of the sequence to the attention to the pages before it."""
        token_places = page_index * page_tokens + jnp.arange(page_tokens)
        is_visible = ((token_places >= first_token) & (token_places < end_token))[None]
        page = table[sequence, page_index]
        scores = product(heads, keys[head, page].astype(heads.dtype))
        scores = scores * scales[0][head, page][None] if scales else scores
        scores = jnp.where(is_visible, soft_capped(scores, soft_cap), HIDDEN_SCORE)
        highest_score = jnp.maximum(pages_before.highest_score, jnp.max(scores, axis=1))
        # Weights of hidden keys are set to 0, because exp(0) = 1 where the highest score is HIDDEN_SCORE.
        weights = jnp.where(is_visible, jnp.exp(scores - highest_score[:, None]), 0.0)
        rescale = jnp.exp(pages_before.highest_score - highest_score)
        scaled_weights = weights * scales[1][head, page][None] if scales else weights
        page_values = product(scaled_weights.astype(heads.dtype), values[head, page].astype(heads.dtype))
        return PartialAttention(
            rescale[:, None] * pages_before.weighted_values + page_values,
            highest_score,
            rescale * pages_before.weight_sum + jnp.sum(weights, axis=1),
        )

    first_page = first_token // page_tokens + part * pages_of_part
    end_page = jnp.minimum(first_page + pages_of_part, (end_token + page_tokens - 1) // page_tokens)
    zeros = partial(jnp.zeros, dtype=jnp.float32)
    no_attention = PartialAttention(zeros((r, h)), jnp.full((r,), HIDDEN_SCORE, jnp.float32), zeros((r,)))
    for ref, x in zip(outputs, jax.lax.fori_loop(first_page, end_page, attend_page, no_attention), strict=True):
        ref[...] = x
