"""The distribution that is sampled, and that is scored: one definition for both."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxrl_llm.structs import Array


@dataclass(frozen=True)
class Sampling:
    """Temperature first, then top-k, then top-p of what is left (vLLM's order). 0, 0, 1 switch each off."""

    temperature: float = 1.0  # 0: greedy, reported under the plain softmax
    top_k: int = 0
    top_p: float = 1.0


def log_distribution(logits: Array, sampling: Sampling, token: Array | None = None) -> jax.Array:
    """Log-probabilities [..., V] of the distribution sampled, -inf outside its support.

    token [...], if given, always belongs to the support. A token that was drawn does so
    under the policy that drew it; under a later policy this keeps the ratio finite.
    Ties at a threshold are all kept, so the support is a function of the logits alone.
    """
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    kept = logits
    if sampling.top_k:
        threshold = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][..., -1:]
        kept = jnp.where(logits >= threshold, logits, -jnp.inf)
    if sampling.top_p < 1:
        ordered = jnp.sort(kept, axis=-1, descending=True)
        probs = jax.nn.softmax(ordered, axis=-1)
        inside = jnp.cumsum(probs, axis=-1) - probs < sampling.top_p  # mass of the better ones
        threshold = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        kept = jnp.where(kept >= threshold, kept, -jnp.inf)
    if token is not None and kept is not logits:
        chosen = jax.nn.one_hot(token, logits.shape[-1], dtype=bool)
        kept = jnp.where(chosen, logits, kept)
    return jax.nn.log_softmax(kept, axis=-1)


def draw(logprobs: Array, uniform: Array) -> jax.Array:
    """Inverse-CDF sampling in two levels: two uniform numbers a row instead of V Gumbel ones.

    logprobs [..., V], uniform [..., 2] in [0, 1) -> tokens [...] int32. First a block of about
    sqrt(V) tokens, then a token of it: a single float32 sum over a whole vocabulary would lose
    its tail. A token of probability zero is never drawn.
    """
    size = max(math.isqrt(logprobs.shape[-1]), 1)
    probs = jnp.exp(logprobs)
    probs = jnp.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, -probs.shape[-1] % size)])
    blocks = probs.reshape(*probs.shape[:-1], -1, size)
    block = _invert(jnp.sum(blocks, axis=-1), uniform[..., 0])
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * size + _invert(inside, uniform[..., 1])


def _invert(weights: Array, uniform: Array) -> jax.Array:
    """The first index whose cumulative weight is above uniform x total, among those that weigh anything."""
    cdf, some = jnp.cumsum(weights, axis=-1), weights > 0  # XLA's cumsum is not monotone to the last bit
    total = jnp.max(jnp.where(some, cdf, 0.0), axis=-1)
    return jnp.argmax(some & (cdf > (uniform * total)[..., None]), axis=-1).astype(jnp.int32)


def token_logprobs(logits: Array, token: Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Log-probability of token [...] and entropy [...] of the distribution sampled, from logits [..., V]."""
    logprobs = log_distribution(logits, sampling, token)
    chosen = jnp.take_along_axis(logprobs, token[..., None], axis=-1)[..., 0]
    inside = jnp.isfinite(logprobs)
    entropy = -jnp.sum(jnp.where(inside, jnp.exp(logprobs) * jnp.where(inside, logprobs, 0.0), 0.0), axis=-1)
    return chosen, entropy
