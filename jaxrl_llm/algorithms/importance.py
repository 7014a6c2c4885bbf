"""Weights and masks of the policy loss: importance weights, off-policy mask and entropy mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrl_llm.algorithms.kl import k3
from jaxrl_llm.algorithms.losses import Metrics, importance_ratio, sequence_mean
from jaxrl_llm.config.schema import NotNegative, Positive
from jaxrl_llm.structs import Array

ImportanceFn: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Metrics]]

# Upper bound of a weight in importance/raw_*, so that a single token cannot dominate the mean of thousands.
RAW_WEIGHT_BOUND = 10.0


def make_importance_weights(
    off_policy: bool = False,
    dtype: str = "float32",
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    action: Literal["auto", "none", "truncate", "mask"] = "none",
    low: NotNegative = 0.0,
    high: Positive = 2.0,
) -> ImportanceFn:
    """Returns the function `correct(trainer, sampler, mask) -> (weights of the policy loss [B, G, C], metrics)`.

    trainer and sampler [B, G, C] are log-probabilities of the sampled tokens, by the trainer and by the engine. With
    d = trainer - sampler, w is exp(d) per token (level "token"), exp(sum d) per sequence ("sequence"), or exp(mean d)
    per sequence ("geometric"). Sums and means are over the mask.
    action "truncate" returns min(w, high) (arXiv 2505.24298). "mask" returns w within [low, high], and 0 outside
    (IcePop, arXiv 2510.18855). "none" returns 1, but the metrics describe w. "auto" is "truncate" if off_policy, else
    "none". off_policy: another engine or older weights may have sampled.
    importance/kl is the k3 estimate of KL(sampler || trainer). importance/raw_mean and raw_square are of exp(d) per
    token, before any action: the health rules judge by them whether engine and trainer agree. importance/rounding is
    the relative rounding error of dtype, the number type that both compute in.
    """
    if action == "auto":
        action = "truncate" if off_policy else "none"

    def correct(
        trainer: Float[Array, "B G C"], sampler: Float[Array, "B G C"], mask: Bool[Array, "B G C"]
    ) -> tuple[Array, Metrics]:
        """Returns the weights of the tokens in the loss [B, G, C], and metrics of the ratios.

        trainer, sampler: log-probabilities of the sampled tokens. mask: True on trained tokens.
        """
        # The weights are constants of the loss: no gradient flows through them.
        log_ratio = jnp.where(mask, jax.lax.stop_gradient(trainer) - sampler, 0.0)
        log_weights = {
            "token": log_ratio,
            "sequence": jnp.sum(log_ratio, axis=-1, keepdims=True),
            "geometric": sequence_mean(log_ratio, mask),
        }[level]
        raw_weights = importance_ratio(jnp.broadcast_to(log_weights, log_ratio.shape))
        if action == "none":
            loss_weights = jnp.ones_like(raw_weights)
        elif action == "truncate":
            loss_weights = jnp.minimum(raw_weights, high)
        else:
            loss_weights = jnp.where((raw_weights >= low) & (raw_weights <= high), raw_weights, 0.0)
        measured_weights = raw_weights if action == "none" else loss_weights
        bounded_weights = jnp.minimum(importance_ratio(log_ratio), RAW_WEIGHT_BOUND)
        metrics = {
            "importance/mean": measured_weights,
            "importance/weight_min": raw_weights,
            "importance/weight_max": raw_weights,
            "importance/square": measured_weights**2,  # mean^2 / square is the effective sample size as a share.
            # Outside the mask, the sampler's value replaces the trainer's, so that padding is never exponentiated.
            "importance/kl": k3(sampler, jnp.where(mask, trainer, sampler)),
            "importance/raw_mean": bounded_weights,
            "importance/raw_square": bounded_weights**2,
            "importance/rounding": jnp.full(log_ratio.shape, jnp.finfo(dtype).eps, jnp.float32),
            "importance/acted_on": (measured_weights != raw_weights).astype(jnp.float32),
        }
        return loss_weights, metrics

    return correct


def on_policy_mask(
    logprobs: Float[Array, "B G C"],
    sampler: Float[Array, "B G C"],
    advantages: Float[Array, "B G C"],
    mask: Bool[Array, "B G C"],
    *,
    threshold: float,
) -> Bool[Array, "B G 1"]:
    """Computes the off-policy sequence mask [B, G, 1] of DeepSeek-V3.2 (arXiv 2512.02556): True for kept completions.

    A completion is excluded if its advantage is negative and the mean of sampler - logprobs over its trained tokens is
    above `threshold`.
    """
    is_off_policy = sequence_mean(sampler - jax.lax.stop_gradient(logprobs), mask) > threshold
    return ~(is_off_policy & (sequence_mean(advantages, mask) < 0))


def high_entropy_mask(
    entropy: Float[Array, "B G C"], mask: Bool[Array, "B G C"], *, share: float
) -> Bool[Array, "B G C"]:
    """Returns a mask [B, G, C] of the trained tokens with the highest entropy (arXiv 2506.01939).

    share: share of the batch's trained tokens in the mask.
    """
    # NaN excludes untrained tokens from the quantile.
    threshold = jnp.nanquantile(jnp.where(mask, entropy, jnp.nan), 1 - share)
    return mask & (entropy >= threshold)
