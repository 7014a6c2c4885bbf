"""Tokens that the policy loss weighs or leaves out: drawn by another distribution, off-policy, or of low entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrl_llm.algorithms.kl import k3
from jaxrl_llm.algorithms.losses import Metrics, ratio_of, sequence_mean
from jaxrl_llm.config.schema import NotNegative, Positive
from jaxrl_llm.structs import Array

ImportanceFn: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Metrics]]


def make_importance_weights(
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    action: Literal["auto", "none", "truncate", "mask"] = "none",
    low: NotNegative = 0.0,
    high: Positive = 2.0,
    off_policy: bool = False,
) -> ImportanceFn:
    """`correct(trainer, sampler, mask)` -> weights [B, G, C] of the policy loss, and metrics of the mismatch.

    trainer and sampler [B, G, C]: log-probabilities of the same policy as each computes them. With d their
    difference, w = exp(d) at each token (level "token"), exp(sum d) of the sequence ("sequence"), or exp(mean d)
    ("geometric"). action "truncate": min(w, high) (arXiv 2505.24298); "mask": w within [low, high], 0 outside
    (IcePop, arXiv 2510.18855); "none": 1, and the metrics are of w; "auto": "truncate" if off_policy,
    which is said of samples by another engine or by older weights, else "none". Sums and means are over the mask.
    importance/kl is k3 of KL(sampler || trainer).
    """
    if action == "auto":
        action = "truncate" if off_policy else "none"

    def correct(
        trainer: Float[Array, "B G C"], sampler: Float[Array, "B G C"], mask: Bool[Array, "B G C"]
    ) -> tuple[Array, Metrics]:
        d = jnp.where(mask, jax.lax.stop_gradient(trainer) - sampler, 0.0)
        at = {"token": d, "sequence": jnp.sum(d, axis=-1, keepdims=True), "geometric": sequence_mean(d, mask)}[level]
        raw = ratio_of(jnp.broadcast_to(at, d.shape))
        if action == "none":
            used = jnp.ones_like(raw)
        elif action == "truncate":
            used = jnp.minimum(raw, high)
        else:
            used = jnp.where((raw >= low) & (raw <= high), raw, 0.0)
        counted = raw if action == "none" else used
        metrics = {
            "importance/mean": counted,
            "importance/weight_min": raw,
            "importance/weight_max": raw,
            "importance/square": counted**2,  # mean^2 / square: the effective sample size, as a share
            "importance/kl": k3(sampler, jnp.where(mask, trainer, sampler)),
            "importance/acted_on": (counted != raw).astype(jnp.float32),
        }
        return used, metrics

    return correct


def stay_on_policy(
    logprobs: Float[Array, "B G C"],
    sampler: Float[Array, "B G C"],
    advantages: Float[Array, "B G C"],
    mask: Bool[Array, "B G C"],
    *,
    threshold: float,
) -> Bool[Array, "B G 1"]:
    """Whether a completion is learned from [B, G, 1]: not if its advantage is negative and the policy has left it.

    It has where the mean over its trained tokens of sampler - logprobs is above the threshold (the off-policy
    sequence mask of DeepSeek-V3.2, arXiv 2512.02556).
    """
    gone = sequence_mean(sampler - jax.lax.stop_gradient(logprobs), mask) > threshold
    return ~(gone & (sequence_mean(advantages, mask) < 0))


def high_entropy(entropy: Float[Array, "B G C"], mask: Bool[Array, "B G C"], *, share: float) -> Bool[Array, "B G C"]:
    """The share of the batch's trained tokens with the highest entropy [B, G, C], all of it if 1 (arXiv 2506.01939)."""
    threshold = jnp.nanquantile(jnp.where(mask, entropy, jnp.nan), 1 - share)
    return mask & (entropy >= threshold)
