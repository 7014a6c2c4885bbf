"""The sampled distribution: one definition of temperature, top-k and top-p for sampler and trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxrl_llm.structs import Array, PyTree

# Largest number of tokens per block in `draw`: divides most vocabularies, and is the width of a TPU vector.
BLOCK = 128


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: temperature, then top-k, then top-p of the rest (vLLM's order). 0, 0, 1 switch each off."""

    temperature: float = 1.0  # 0: greedy; log-probabilities are of the plain softmax
    top_k: int = 0
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution leaves out tokens, each policy its own."""
        return self.top_k > 0 or self.top_p < 1


def support(
    logits: Float[Array, "*n V"], sampling: Sampling, token: Int[Array, "*n"] | None = None
) -> Float[Array, "*n V"]:
    """Divides logits [..., V] by the temperature and sets them to -inf outside the support of the sampled distribution.

    token [...], if given, always belongs to the support. Otherwise, a later policy could exclude a sampled token, and
    the log-ratio would not be finite.
    All ties at a threshold are kept, so the support depends only on the logits.
    """
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    masked_logits = logits
    if sampling.top_k:
        count = jnp.array(min(sampling.top_k, logits.shape[-1]), jnp.float32)
        threshold = _threshold(logits, jnp.ones_like(logits), count)
        masked_logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if sampling.top_p < 1:
        weights = jnp.exp(masked_logits - jnp.max(masked_logits, axis=-1, keepdims=True))
        enough = sampling.top_p * jnp.sum(weights, axis=-1, keepdims=True)
        threshold = _threshold(masked_logits, weights, enough)
        masked_logits = jnp.where(masked_logits >= threshold, masked_logits, -jnp.inf)
    if token is not None and masked_logits is not logits:
        # Only top-k and top-p can leave the token out of the support.
        chosen = jax.nn.one_hot(token, logits.shape[-1], dtype=bool)
        masked_logits = jnp.where(chosen, logits, masked_logits)
    return masked_logits


def _threshold(logits: Float[Array, "*n V"], weights: Float[Array, "*n V"], enough: Array) -> Float[Array, "*n 1"]:
    """Returns the smallest of the logits [..., V] above which all others together weigh less than `enough`.

    A sort of the vocabulary would find it too, and is slower (docs/LOG.md). This halves the range of the floats 32
    times, with one sum each. Read as integers, the bits of positive floats have their order, and those of
    negative floats the opposite one.
    """
    order = _turned(jax.lax.bitcast_convert_type(logits.astype(jnp.float32), jnp.int32))
    high = jnp.max(order, axis=-1, keepdims=True)

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        # The mean of both, whose sum may not fit into 32 bits.
        middle = (low & high) + ((low ^ high) >> 1)
        above = jnp.sum(jnp.where(order > middle, weights, 0.0), axis=-1, keepdims=True)
        return jnp.where(above < enough, low, middle), jnp.where(above < enough, middle, high)

    low = jnp.full_like(high, jnp.iinfo(jnp.int32).min)
    _, smallest = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jax.lax.bitcast_convert_type(_turned(smallest), jnp.float32)


def _turned(bits: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Turns the bits after the sign of negative numbers [...], and so turns them back."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def log_distribution(logits: Float[Array, "*n V"], sampling: Sampling) -> Float[Array, "*n V"]:
    """Returns log-probabilities [..., V] of the sampled distribution, -inf outside its support."""
    return jax.nn.log_softmax(support(logits, sampling), axis=-1)


def draw(
    masked_logits: Float[Array, "*n V"], uniform: Float[Array, "*n 2"]
) -> tuple[Int[Array, "*n"], Float[Array, "*n"]]:
    """Samples by inverse CDF in two levels, with two uniform numbers per row instead of V Gumbel numbers.

    masked_logits [..., V] from `support`, uniform [..., 2] in [0, 1) -> tokens [...] int32 and their log-probabilities
    [...]. It samples a block of tokens, then a token in the block: one float32 sum over the whole vocabulary would
    lose the tail. It never samples a token of probability zero.
    """
    # About the square root of V: then both levels sum equally few numbers, and lose equally few bits.
    size = min(1 << (math.isqrt(masked_logits.shape[-1]).bit_length() - 1), BLOCK)
    top = jnp.max(masked_logits, axis=-1, keepdims=True)
    padded = jnp.pad(
        masked_logits,
        [(0, 0)] * (masked_logits.ndim - 1) + [(0, -masked_logits.shape[-1] % size)],
        constant_values=-jnp.inf,
    )
    blocks = padded.reshape(*masked_logits.shape[:-1], -1, size)
    weights = jnp.sum(jnp.exp(blocks - top[..., None]), axis=-1)
    block = _invert(weights, uniform[..., 0])
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    within = _invert(jnp.exp(inside - top), uniform[..., 1])
    chosen = jnp.take_along_axis(inside, within[..., None], axis=-1)[..., 0]
    return block * size + within, chosen - top[..., 0] - jnp.log(jnp.sum(weights, axis=-1))


def _invert(weights: Float[Array, "*n V"], uniform: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Returns the first index with positive weight and a cumulative weight above uniform x total."""
    # XLA's cumsum is not exactly monotone, so the total is the maximum and not the last entry.
    cdf, some = jnp.cumsum(weights, axis=-1), weights > 0
    total = jnp.max(jnp.where(some, cdf, 0.0), axis=-1)
    return jnp.argmax(some & (cdf > (uniform * total)[..., None]), axis=-1).astype(jnp.int32)


def token_logprobs_and_residuals(logits: Array, token: Array, sampling: Sampling) -> tuple[tuple[Array, Array], PyTree]:
    """Returns log-probability [...] of token [...] and entropy [...] of the sampled distribution, from logits [..., V].

    Also returns residuals for the backward pass: (logits, token, log_total, entropy). log_total and entropy [...] save
    it two sums over V, also where it computes the logits again.
    """
    masked_logits = support(logits, sampling, token)
    top = jnp.max(masked_logits, axis=-1, keepdims=True)
    weights = jnp.exp(masked_logits - top)
    total = jnp.sum(weights, axis=-1)
    # Outside the support, 0 x -inf would be NaN.
    mean = jnp.sum(jnp.where(weights > 0, weights * (masked_logits - top), 0.0), axis=-1) / total
    log_total = jnp.log(total) + top[..., 0]
    entropy = jnp.log(total) - mean
    chosen = jnp.take_along_axis(masked_logits, token[..., None], axis=-1)[..., 0]
    return (chosen - log_total, entropy), (logits, token, log_total, entropy)


def token_logprobs_gradient(
    sampling: Sampling, residuals: PyTree, gradients: tuple[Array, Array]
) -> tuple[Array, None]:
    """Returns the gradient with respect to the logits [..., V], from those of the log-probability and the entropy.

    With probabilities p, log-probabilities l and entropy H, at temperature 1:
    d l_token / d logits = onehot(token) - p, and d H / d logits = -p (l + H). Other temperatures divide both.
    """
    # The gradient is written by hand, because autodiff would also keep the softmax and the masked logits [..., V].
    logits, token, log_total, entropy = residuals
    logprob_gradient, entropy_gradient = (x[..., None] for x in gradients)
    logprobs = support(logits, sampling, token) - log_total[..., None]
    p = jnp.exp(logprobs)
    surprise = jnp.where(p > 0, logprobs, 0.0) + entropy[..., None]
    # A comparison, not a scatter: the compiler fuses it with the products.
    chosen = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == token[..., None]
    gradient = jnp.where(chosen, logprob_gradient, 0.0) - p * (logprob_gradient + entropy_gradient * surprise)
    return gradient / (sampling.temperature or 1.0), None
