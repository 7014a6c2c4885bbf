"""Searches for the thresholds of top-k and top-p that sort no vocabulary.

Every search keeps all logits that equal the threshold, and its result for a row depends on this row alone.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Shaped

from jaxrl_llm.structs import Array

# Number of tokens per block. Blocks are small, so that a vocabulary that is split over devices splits no block.
BLOCK = 32
# Number of passes of top-p over the vocabulary, and of blocks that are searched after them.
TOP_P_PASSES, TOP_P_BLOCKS = 3, 128
# Where a pass of top-p tries thresholds around its estimate, as parts of the range that holds the right one.
TOP_P_OFFSETS = -0.1, -0.03, -0.01, 0.01, 0.03, 0.1


def top_k_threshold(logits: Float[Array, "*n V"], k: int) -> Float[Array, "*n 1"]:
    """Returns the k-th largest logit [..., 1], or the smallest logit if k > V."""
    k = min(k, logits.shape[-1])
    if logits.shape[-1] < 4 * k * BLOCK:
        return _threshold(logits, jnp.ones_like(logits), k)
    # Of all logits above the k-th largest block maximum, each lies in one of the at most k - 1 blocks above it.
    maxima = jnp.max(_split_into_blocks(logits), axis=-1)
    bound = _threshold(maxima, jnp.ones_like(maxima), k)
    candidates = _gather_blocks(logits, maxima > bound, k)
    return jnp.maximum(bound, _threshold(candidates, jnp.ones_like(candidates), k))


def top_p_threshold(logits: Float[Array, "*n V"], p: float, *, few_left: bool = False) -> Float[Array, "*n 1"]:
    """Returns the largest logit that, with all larger ones, has at least the share p of the weight: [..., 1].

    few_left: whether top-k has set all but at most TOP_P_BLOCKS logits to -inf.
    """
    logits = jax.lax.stop_gradient(logits)
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    vocab_size = logits.shape[-1]

    def search_all_logits() -> Float[Array, "*n 1"]:
        return _threshold(logits, jnp.exp(logits - log_total), p)

    if vocab_size < 4 * TOP_P_BLOCKS * BLOCK:
        return search_all_logits()
    weights = jnp.exp(logits - log_total)

    def log_odds_over_p(share: Array) -> Array:
        share = jnp.clip(share, 1e-6, 1 - 1e-6)
        return jnp.log(share / (1 - share)) - math.log(p / (1 - p))

    def narrow(_: Array, bracket: tuple[Array, ...]) -> tuple[Array, ...]:
        low, high, share_above_low, share_above_high = bracket
        # The log-odds of the share are nearly linear in the threshold, so their line gives a good estimate.
        excess_at_low = log_odds_over_p(share_above_low)
        estimate = excess_at_low / (excess_at_low - log_odds_over_p(share_above_high))
        near_estimate = [jnp.clip(estimate + offset, 0, 1) for offset in TOP_P_OFFSETS]
        fractions = jnp.concatenate([estimate / 2, (1 + estimate) / 2, *near_estimate], axis=-1)
        thresholds = low + fractions * (high - low)
        shares = _weights_above(logits, weights, thresholds)
        is_low = shares >= p
        return (
            jnp.max(jnp.where(is_low, thresholds, low), axis=-1, keepdims=True),
            jnp.min(jnp.where(is_low, high, thresholds), axis=-1, keepdims=True),
            jnp.min(jnp.where(is_low, shares, share_above_low), axis=-1, keepdims=True),
            jnp.max(jnp.where(is_low, share_above_high, shares), axis=-1, keepdims=True),
        )

    # The logits up to this one have less than the share 1 - p, because each of the V logits has less than (1 - p) / V.
    low = log_total + math.log((1 - p) / vocab_size) - 1
    smallest_logit = jnp.min(logits, axis=-1, keepdims=True)
    low = jnp.maximum(low, smallest_logit - 1e-6 * jnp.maximum(jnp.abs(smallest_logit), 1))
    start = low, jnp.max(logits, axis=-1, keepdims=True), jnp.ones_like(low), jnp.zeros_like(low)
    low, high, _, share_above_high = jax.lax.fori_loop(0, 0 if few_left else TOP_P_PASSES, narrow, start)
    has_candidates = jnp.any(_split_into_blocks((logits > low) & (logits <= high)), axis=-1)
    candidates = _gather_blocks(logits, has_candidates, TOP_P_BLOCKS)
    candidates = jnp.where((candidates > low) & (candidates <= high), candidates, -jnp.inf)
    threshold = _threshold(candidates, jnp.exp(candidates - log_total), p - share_above_high)
    # If rounding leaves the candidates too little weight, all of them are kept, as the sum for `low` decided.
    smallest = jnp.min(jnp.where(candidates > -jnp.inf, candidates, jnp.inf), axis=-1, keepdims=True)
    threshold = jnp.where(threshold > low, threshold, smallest)
    is_exact = jnp.sum(has_candidates, axis=-1, keepdims=True) <= TOP_P_BLOCKS
    # If equal logits of a row lie in more blocks, all rows are searched once more. All devices do so together, because
    # the sums need them all if the vocabulary is split over devices.
    all_exact = jnp.all(is_exact)
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        all_exact = jax.lax.pmin(all_exact.astype(jnp.int32), axes) > 0
    full_threshold = jax.lax.cond(all_exact, lambda: threshold, search_all_logits)
    # An exact row keeps its threshold, so that the rounding of its sums does not depend on the other rows.
    return jnp.where(is_exact, threshold, full_threshold)


def _weights_above(
    logits: Float[Array, "*n V"], weights: Float[Array, "*n V"], thresholds: Float[Array, "*n count"]
) -> Float[Array, "*n count"]:
    """Returns the sum of the weights whose logits are above each threshold."""
    blocks, weight_blocks = _split_into_blocks(logits), _split_into_blocks(weights)
    above = tuple(
        jnp.where(blocks > thresholds[..., i, None, None], weight_blocks, 0.0) for i in range(thresholds.shape[-1])
    )
    # All sums are one reduction: XLA then reads the logits once, and on a CPU it stores none of the selected weights.
    # It adds one weight after another, so each sum is over a block, because rounding would grow with the vocabulary.
    zeros = tuple(jnp.zeros((), weights.dtype) for _ in above)
    block_sums = jax.lax.reduce(above, zeros, lambda left, right: tuple(map(jnp.add, left, right)), (blocks.ndim - 1,))
    return jnp.stack([jnp.sum(sums, axis=-1) for sums in block_sums], axis=-1)


def _split_into_blocks(values: Shaped[Array, "*n V"]) -> Shaped[Array, "*n blocks block"]:
    """Splits the last axis into blocks of BLOCK values. The last block is padded with -inf, or with False."""
    missing = -values.shape[-1] % BLOCK
    if missing:
        padding = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
        values = jnp.pad(values, padding, constant_values=False if values.dtype == bool else -jnp.inf)
    return values.reshape(*values.shape[:-1], -1, BLOCK)


def _gather_blocks(
    logits: Float[Array, "*n V"], is_chosen: Bool[Array, "*n blocks"], count: int
) -> Float[Array, "*n candidates"]:
    """Returns the logits of the first `count` chosen blocks [..., count * BLOCK], and -inf after them."""
    # Neither `jax.lax.top_k` nor a sort finds the blocks: on a mesh the first would gather the rows of all devices, and
    # the second takes longer than this search saves (docs/log/sampling.md).
    blocks = _split_into_blocks(logits)
    ranks = jnp.cumsum(is_chosen, axis=-1).reshape(-1, is_chosen.shape[-1])
    # Chosen block number i is the first block up to which i + 1 blocks are chosen.
    indices = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(1, count + 1)))(ranks)
    rows = blocks.reshape(-1, *blocks.shape[-2:])
    chosen = jax.vmap(lambda row, indices: row.at[indices].get(mode="fill", fill_value=-jnp.inf))(rows, indices)
    return chosen.reshape(*logits.shape[:-1], -1)


def _threshold(
    logits: Float[Array, "*n V"], weights: Float[Array, "*n V"], enough_weight: Array | float
) -> Float[Array, "*n 1"]:
    """Returns the smallest logit above which all logits together weigh less than `enough_weight`: [..., 1].

    logits, weights: [..., V]. Sorting the vocabulary would be slower (docs/LOG.md). This search halves the range of
    float32 numbers 32 times, with one sum over V each. It compares floats by their bits as integers, whose order is
    that of positive floats and the opposite of that of negative ones.
    """
    ordered_bits = _ordered_bits(jax.lax.bitcast_convert_type(logits.astype(jnp.float32), jnp.int32))
    high = jnp.max(ordered_bits, axis=-1, keepdims=True)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # This is the mean of low and high, computed without their sum, which may not fit into 32 bits.
        middle = (low & high) + ((low ^ high) >> 1)
        weight_above = jnp.sum(jnp.where(ordered_bits > middle, weights, 0.0), axis=-1, keepdims=True)
        return jnp.where(weight_above < enough_weight, low, middle), jnp.where(
            weight_above < enough_weight, middle, high
        )

    low = jnp.full_like(high, jnp.iinfo(jnp.int32).min)
    _, smallest = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jax.lax.bitcast_convert_type(_ordered_bits(smallest), jnp.float32)


def _ordered_bits(bits: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Flips the bits after the sign of negative numbers [...], so that integers have the order of the floats.

    The function is its own inverse.
    """
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
