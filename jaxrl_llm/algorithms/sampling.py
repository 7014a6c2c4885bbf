"""The sampled distribution: one definition of temperature, top-k and top-p for sampler and trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxrl_llm.algorithms.thresholds import TOP_P_BLOCKS, top_k_threshold, top_p_threshold
from jaxrl_llm.structs import Array, PyTree

# Largest number of tokens per block in `draw_tokens`. It divides most vocabularies, and is the width of a TPU vector.
MAX_BLOCK = 128


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, applied in vLLM's order: temperature, then top-k, then top-p of the remaining tokens."""

    temperature: float = 1.0  # 0 = greedy, with the log-probabilities of the softmax at temperature 1
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution excludes some tokens; different policies exclude different tokens."""
        return self.top_k > 0 or self.top_p < 1


def mask_logits(
    logits: Float[Array, "*n V"], sampling: Sampling, token: Int[Array, "*n"] | None = None
) -> Float[Array, "*n V"]:
    """Divides logits [..., V] by the temperature and sets them to -inf outside the support of the sampled distribution.

    The support holds the tokens that top-k and top-p leave. token [...]: token that always belongs to the support, None
    for no such token; without it, a later policy could exclude a sampled token, and the log-ratio would be infinite.
    All ties at a threshold are kept, so the support depends only on the logits.
    """
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    masked_logits = logits
    if sampling.top_k:
        masked_logits = jnp.where(logits >= top_k_threshold(logits, sampling.top_k), logits, -jnp.inf)
    if sampling.top_p < 1:
        threshold = top_p_threshold(masked_logits, sampling.top_p, few_left=0 < sampling.top_k <= TOP_P_BLOCKS)
        masked_logits = jnp.where(masked_logits >= threshold, masked_logits, -jnp.inf)
    if token is not None and masked_logits is not logits:
        # Only top-k and top-p can leave the token out of the support.
        chosen = jax.nn.one_hot(token, logits.shape[-1], dtype=bool)
        masked_logits = jnp.where(chosen, logits, masked_logits)
    return masked_logits


def log_distribution(logits: Float[Array, "*n V"], sampling: Sampling) -> Float[Array, "*n V"]:
    """Returns log-probabilities [..., V] of the sampled distribution, -inf outside its support."""
    return jax.nn.log_softmax(mask_logits(logits, sampling), axis=-1)


def draw_tokens(
    masked_logits: Float[Array, "*n V"], uniform: Float[Array, "*n 2"]
) -> tuple[Int[Array, "*n"], Float[Array, "*n"]]:
    """Samples by inverse CDF in two levels, with two uniform numbers per row instead of V Gumbel numbers.

    masked_logits [..., V] from `mask_logits`, uniform [..., 2] in [0, 1) -> tokens [...] int32 and their
    log-probabilities [...]. It samples a block of tokens, then a token in the block: one float32 sum over the whole
    vocabulary would lose the tail. It never samples a token of probability zero.
    """
    # Blocks have about sqrt(V) tokens, so that both levels sum equally few numbers, and lose equally few bits.
    block_size = min(1 << (math.isqrt(masked_logits.shape[-1]).bit_length() - 1), MAX_BLOCK)
    highest_logit = jnp.max(masked_logits, axis=-1, keepdims=True)
    padded = jnp.pad(
        masked_logits,
        [(0, 0)] * (masked_logits.ndim - 1) + [(0, -masked_logits.shape[-1] % block_size)],
        constant_values=-jnp.inf,
    )
    blocks = padded.reshape(*masked_logits.shape[:-1], -1, block_size)
    weights = jnp.sum(jnp.exp(blocks - highest_logit[..., None]), axis=-1)
    block = _invert_cdf(weights, uniform[..., 0])
    block_logits = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    index_in_block = _invert_cdf(jnp.exp(block_logits - highest_logit), uniform[..., 1])
    chosen = jnp.take_along_axis(block_logits, index_in_block[..., None], axis=-1)[..., 0]
    return block * block_size + index_in_block, chosen - highest_logit[..., 0] - jnp.log(jnp.sum(weights, axis=-1))


def _invert_cdf(weights: Float[Array, "*n V"], uniform: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Returns the first index with positive weight and a cumulative weight above uniform x total."""
    # The total is the maximum and not the last entry, because XLA's cumsum is not exactly monotone.
    cdf, is_possible = jnp.cumsum(weights, axis=-1), weights > 0
    total = jnp.max(jnp.where(is_possible, cdf, 0.0), axis=-1)
    return jnp.argmax(is_possible & (cdf > (uniform * total)[..., None]), axis=-1).astype(jnp.int32)


def token_logprobs_and_residuals(logits: Array, token: Array, sampling: Sampling) -> tuple[tuple[Array, Array], PyTree]:
    """Returns log-probability [...] of token [...] and entropy [...] of the sampled distribution, from logits [..., V].

    Also returns residuals for the backward pass: (logits, token, log_total, entropy). log_total and entropy [...] save
    the backward pass two sums over V, even if it recomputes the logits.
    """
    masked_logits = mask_logits(logits, sampling, token)
    highest_logit = jnp.max(masked_logits, axis=-1, keepdims=True)
    weights = jnp.exp(masked_logits - highest_logit)
    total = jnp.sum(weights, axis=-1)
    # Outside the support the term is set to 0, because 0 x -inf would be NaN.
    mean_difference = jnp.sum(jnp.where(weights > 0, weights * (masked_logits - highest_logit), 0.0), axis=-1) / total
    log_total = jnp.log(total) + highest_logit[..., 0]
    entropy = jnp.log(total) - mean_difference
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
    logprobs = mask_logits(logits, sampling, token) - log_total[..., None]
    p = jnp.exp(logprobs)
    surprise = jnp.where(p > 0, logprobs, 0.0) + entropy[..., None]
    # A comparison replaces a scatter, because the compiler fuses a comparison with the products.
    chosen = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == token[..., None]
    gradient = jnp.where(chosen, logprob_gradient, 0.0) - p * (logprob_gradient + entropy_gradient * surprise)
    return gradient / (sampling.temperature or 1.0), None
