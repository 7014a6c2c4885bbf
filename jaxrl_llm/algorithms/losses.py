"""Losses: factories that hold hyperparameters and return `loss_fn(logprobs, batch)`.

A loss_fn maps logprobs [B, G, C] to a per-token loss [B, G, C] and a dict of per-token
metrics [B, G, C] (averaged over trained tokens). Reduction is `aggregation_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrl_llm.config.schema import Count, NotNegative, Positive
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Array, Batch

Metrics: TypeAlias = dict[str, Array]
LossFn: TypeAlias = Callable[[Array, Batch], tuple[Array, Metrics]]

__all__ = ["cispo", "gmpo", "gspo", "ppo_clip", "reinforce", "sapo", "topr", "vespo"]  # what a config may name

WITHOUT_RATIO = ("reinforce",)  # exact only while the policy that learns is the one that sampled
OF_A_SEQUENCE = ("gmpo",)  # one advantage for a whole completion
LARGEST = 20.0  # log-ratio: of what is beyond, exp and its gradient would soon not be finite


def ppo_clip(*, clip_low: NotNegative = 0.2, clip_high: NotNegative = 0.2, delta: NotNegative = 0.0) -> LossFn:
    """Clipped surrogate (arXiv 1707.06347; clip_high > clip_low as in DAPO, arXiv 2503.14476).

    -min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).
    delta > 1 + clip_high bounds the loss of a token with A < 0 too (0: it does not). It is the two-sided
    bound of arXiv 2505.07291 and, being the same function, the c of dual clip (arXiv 1912.09729).
    Raises: UserError, for a delta that would take the place of clip_high.
    """
    if 0 < delta <= 1 + clip_high:
        raise UserError(f"config.loss.delta = {delta} is not above 1 + clip_high: give more, or 0 for none")

    def loss_fn(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
        ratio = ratio_of(logprobs - old_logprobs(logprobs, batch))
        return _clipped(ratio, batch.advantages, clip_low, clip_high, delta)

    return loss_fn


def gspo(
    *, clip_low: NotNegative = 3e-4, clip_high: NotNegative = 4e-4, level: Literal["sequence", "token"] = "sequence"
) -> LossFn:
    """Group sequence policy optimization (arXiv 2507.18071): `ppo_clip` with a ratio of sequences.

    s = exp(mean over trained tokens of logprobs - old_logprobs). level "token" (GSPO-token) has the same
    value, and the gradient s d(logprobs_t) at token t, for advantages that differ by token. With aggregation
    "sequence_sum" it is LUSPO (arXiv 2602.05261): each sequence counts by its length.
    """

    def loss_fn(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
        log_ratio = sequence_mean(logprobs - old_logprobs(logprobs, batch), batch.loss_mask)
        if level == "token":
            log_ratio = jax.lax.stop_gradient(log_ratio) + logprobs - jax.lax.stop_gradient(logprobs)
        ratio = jnp.broadcast_to(ratio_of(log_ratio), logprobs.shape)
        return _clipped(ratio, batch.advantages, clip_low, clip_high)

    return loss_fn


def gmpo(*, clip_low: NotNegative = 0.4, clip_high: NotNegative = 0.4) -> LossFn:
    """Geometric-mean policy optimization (arXiv 2507.20673): each token's ratio is clipped, then their mean taken.

    -A exp(mean_t l_t), l_t = min(l, clip(l, -clip_low, clip_high)) for A > 0, the max for A < 0, l the log-ratio.
    One advantage for a sequence is assumed.
    """

    def loss_fn(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
        log_ratio = logprobs - old_logprobs(logprobs, batch)
        clipped = jnp.clip(log_ratio, -clip_low, clip_high)
        up = batch.advantages > 0
        bounded = jnp.where(up, jnp.minimum(log_ratio, clipped), jnp.maximum(log_ratio, clipped))
        ratio = ratio_of(sequence_mean(bounded, batch.loss_mask))
        metrics = {"clip/fraction": _float(bounded != log_ratio), "ratio/mean": ratio_of(log_ratio)}
        return -ratio * batch.advantages, metrics

    return loss_fn


def reinforce() -> LossFn:
    """-A logprobs (Williams, 1992): exact while the policy that learns is the one that sampled."""

    def loss_fn(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
        return -batch.advantages * logprobs, {}

    return loss_fn


def cispo(*, clip_low: NotNegative = 1.0, clip_high: NotNegative = 4.0) -> LossFn:
    """Clipped importance weights (MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs. As in the paper the bound is 1 + clip_high (TRL's
    `epsilon_high` is the bound itself), and clip_low = 1 means none.
    """

    def loss_fn(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
        ratio = jax.lax.stop_gradient(ratio_of(logprobs - old_logprobs(logprobs, batch)))
        clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
        metrics = {"clip/fraction": _float(clipped != ratio), "ratio/mean": ratio}
        return -clipped * batch.advantages * logprobs, metrics

    return loss_fn


def sapo(*, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> LossFn:
    """Soft adaptive policy optimization (arXiv 2511.20347): a sigmoid gate instead of a clip.

    -(4 / tau) sigmoid(tau (r - 1)) A, with tau_positive where A > 0 and tau_negative elsewhere.
    """

    def loss_fn(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
        ratio = ratio_of(logprobs - old_logprobs(logprobs, batch))
        tau = jnp.where(batch.advantages > 0, tau_positive, tau_negative)
        return -(4 / tau) * jax.nn.sigmoid(tau * (ratio - 1)) * batch.advantages, {"ratio/mean": ratio}

    return loss_fn


def vespo(
    *,
    k_positive: NotNegative = 2.0,
    lambda_positive: NotNegative = 3.0,
    k_negative: NotNegative = 3.0,
    lambda_negative: NotNegative = 2.0,
) -> LossFn:
    """Variational sequence-level soft policy optimization (arXiv 2602.10693).

    -sg(w^k exp(lambda (1 - w))) A logprobs, w = exp(sum over trained tokens of logprobs - old_logprobs): a weight
    of 1 on-policy, that fades far from it on both sides. k and lambda by the sign of A.
    """

    def loss_fn(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
        log_ratio = jax.lax.stop_gradient(logprobs - old_logprobs(logprobs, batch))
        log_w = jnp.sum(jnp.where(batch.loss_mask, log_ratio, 0.0), axis=-1, keepdims=True)
        k = jnp.where(batch.advantages > 0, k_positive, k_negative)
        slope = jnp.where(batch.advantages > 0, lambda_positive, lambda_negative)
        weight = jnp.exp(k * log_w + slope * (1 - ratio_of(log_w)))
        return -weight * batch.advantages * logprobs, {"vespo/weight": weight, "ratio/mean": ratio_of(log_ratio)}

    return loss_fn


def topr() -> LossFn:
    """Tapered off-policy REINFORCE (arXiv 2503.14286): only what was bad is weighed, and never by more than 1.

    -sg(w) A logprobs, w = 1 where A > 0, min(exp(sum over trained tokens of logprobs - old_logprobs), 1) elsewhere.
    """

    def loss_fn(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
        log_ratio = jax.lax.stop_gradient(logprobs - old_logprobs(logprobs, batch))
        log_w = jnp.sum(jnp.where(batch.loss_mask, log_ratio, 0.0), axis=-1, keepdims=True)
        weight = jnp.where(batch.advantages > 0, 1.0, jnp.exp(jnp.minimum(log_w, 0.0)))
        return -weight * batch.advantages * logprobs, {"ratio/mean": ratio_of(log_ratio)}

    return loss_fn


def old_logprobs(logprobs: Float[Array, "B G C"], batch: Batch) -> Float[Array, "B G C"]:
    """What the ratio is to: without old_logprobs this very policy sampled, and the ratio is 1."""
    return jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs


def ratio_of(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """exp of log_ratio within +- LARGEST; beyond, it is constant."""
    return jnp.exp(jnp.clip(log_ratio, -LARGEST, LARGEST))


def _clipped(
    ratio: Float[Array, "B G C"], advantages: Float[Array, "B G C"], low: float, high: float, delta: float = 0.0
) -> tuple[Array, Metrics]:
    bounded = jnp.minimum(ratio, delta) if delta else ratio
    loss = -jnp.minimum(bounded * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    bound = jnp.where(advantages > 0, ratio > 1 + high, ratio < 1 - low) & (advantages != 0)
    return loss, {"clip/fraction": _float(bound), "ratio/mean": ratio}


def sequence_mean(x: Float[Array, "B G C"], mask: Bool[Array, "B G C"]) -> Float[Array, "B G 1"]:
    """Mean [B, G, 1] of x [B, G, C] over the mask."""
    total = jnp.sum(jnp.where(mask, x, 0.0), axis=-1, keepdims=True)
    return total / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)


def _float(x: Array) -> jax.Array:
    return x.astype(jnp.float32)


def cross_entropy() -> LossFn:
    """-logprobs: supervised fine-tuning."""

    def loss_fn(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
        return -logprobs, {}

    return loss_fn


def aggregation_weights(
    mask: Bool[Array, "B G C"],
    *,
    mode: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"],
    constant_length: Count = 0,
) -> Float[Array, "B G C"]:
    """Weights [B, G, C] such that sum(weights * per-token loss) is the loss of this update.

    The denominators are those of the whole mask [B, G, C], so that the parts of a
    micro-batched or sharded update add up to the same number. mode:
    "token_mean"     1 / trained tokens (DAPO, arXiv 2503.14476),
    "sequence_mean"  1 / (sequences x the sequence's own tokens) (GRPO, arXiv 2402.03300),
    "sequence_sum"   1 / sequences (LUSPO, arXiv 2602.05261),
    "constant"       1 / (sequences x constant_length) (Dr. GRPO, arXiv 2503.20783).
    A sequence without a trained token counts for nothing.
    """
    mask = mask.astype(jnp.float32)
    lengths = jnp.sum(mask, axis=-1, keepdims=True)
    sequences = jnp.maximum(jnp.sum(lengths > 0), 1)
    if mode == "token_mean":
        return mask / jnp.maximum(jnp.sum(mask), 1)
    if mode == "sequence_mean":
        return mask / (sequences * jnp.maximum(lengths, 1))
    if mode == "sequence_sum":
        return mask / sequences
    return mask / (sequences * constant_length)
