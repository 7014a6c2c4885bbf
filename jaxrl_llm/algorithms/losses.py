"""Losses: pure functions from the log-probabilities of the tokens to the loss of each token.

`loss(logprobs, batch, *, fields)` maps logprobs [B, G, C] to a per-token loss [B, G, C] and a dict of metrics. Those
[B, G, C] are averaged over trained tokens, those [B, G, 1] over completions. `aggregation_weights` reduces the loss.
The keyword arguments are the fields of `config.loss`. Further positional arguments select score columns [B, G, C] by
their names, such as entropy and ref_logprobs (the top of `advantages.py` has all):
`loss(logprobs, batch, entropy, *, fields)`. They are constants, computed before the first update of a step.

The batch of a loss is a microbatch: some of a step's prompts, and some completions of each prompt. Both masks exclude
the tokens of all other completions. So the loss of a completion must depend on its own tokens alone: with a mean or a
quantile over the batch, the gradient would depend on `microbatch`. Statistics of the whole batch belong into an
advantage estimator.

In the equations, A is the advantage, r = exp(logprobs - old_logprobs) the ratio of a token, and sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrl_llm.algorithms.traits import Trait, declares
from jaxrl_llm.config.schema import Count, NotNegative, Positive, checked_by
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Array, Batch

Metrics: TypeAlias = dict[str, Array]
LossFn: TypeAlias = Callable[..., tuple[Array, Metrics]]  # (logprobs, batch, score columns by their names)

# Names that a config may use.
__all__ = ["cispo", "gmpo", "gspo", "ppo_clip", "reinforce", "sapo", "topr", "vespo"]

# Bound of log-ratios, which keeps exp and its gradient finite.
MAX_LOG_RATIO = 20.0


def _check_delta(*, clip_low: float, clip_high: float, delta: float) -> None:
    if 0 < delta <= 1 + clip_high:
        raise UserError(
            f"config.loss.delta = {delta}: must be above 1 + clip_high, {1 + clip_high:g}: raise it, or set it to 0 "
            "for no bound"
        )


@checked_by(_check_delta)
def ppo_clip(
    logprobs: Float[Array, "B G C"],
    batch: Batch,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    delta: NotNegative = 0.0,
) -> tuple[Array, Metrics]:
    """Returns the clipped surrogate loss (arXiv 1707.06347; clip_high > clip_low as in DAPO, arXiv 2503.14476).

    -min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).
    delta > 1 + clip_high also bounds the loss of tokens with A < 0 (0: no bound). It is the two-sided bound of
    arXiv 2505.07291, and equals the c of dual clip (arXiv 1912.09729).
    A delta of 1 + clip_high or less would replace clip_high, and the check of a config refuses it.
    """
    ratio = importance_ratio(logprobs - old_logprobs(logprobs, batch))
    return _clipped_loss(ratio, batch.advantages, clip_low, clip_high, delta)


@declares(Trait.SEQUENCE_RATIO)
def gspo(
    logprobs: Float[Array, "B G C"],
    batch: Batch,
    *,
    clip_low: NotNegative = 3e-4,
    clip_high: NotNegative = 4e-4,
    level: Literal["sequence", "token"] = "sequence",
) -> tuple[Array, Metrics]:
    """Returns group sequence policy optimization (arXiv 2507.18071): `ppo_clip` with one ratio per sequence.

    s = exp(mean over trained tokens of logprobs - old_logprobs). level "token" (GSPO-token) has the same value and the
    gradient s d(logprobs_t) at token t, for advantages that differ between tokens. With aggregation "sequence_sum" it
    is LUSPO (arXiv 2602.05261): each sequence counts in proportion to its length.
    """
    log_ratio = sequence_mean(logprobs - old_logprobs(logprobs, batch), batch.loss_mask)
    if level == "token":
        # The two log-probabilities cancel in the value, but not in the gradient.
        log_ratio = jax.lax.stop_gradient(log_ratio) + logprobs - jax.lax.stop_gradient(logprobs)
    ratio = jnp.broadcast_to(importance_ratio(log_ratio), logprobs.shape)
    return _clipped_loss(ratio, batch.advantages, clip_low, clip_high)


@declares(Trait.SEQUENCE_ADVANTAGE, Trait.SEQUENCE_RATIO)
def gmpo(
    logprobs: Float[Array, "B G C"], batch: Batch, *, clip_low: NotNegative = 0.4, clip_high: NotNegative = 0.4
) -> tuple[Array, Metrics]:
    """Returns geometric-mean policy optimization (arXiv 2507.20673): the geometric mean of clipped ratios.

    -A exp(mean_t l_t), where l is the log-ratio and l_t = min(l, clip(l, -clip_low, clip_high)) for A > 0. For A < 0,
    max replaces min. It needs one advantage per sequence.
    """
    log_ratio = logprobs - old_logprobs(logprobs, batch)
    clipped = jnp.clip(log_ratio, -clip_low, clip_high)
    is_positive = batch.advantages > 0
    bounded = jnp.where(is_positive, jnp.minimum(log_ratio, clipped), jnp.maximum(log_ratio, clipped))
    ratio = importance_ratio(sequence_mean(bounded, batch.loss_mask))
    metrics = {"clip/fraction": jnp.float32(bounded != log_ratio), "ratio/mean": importance_ratio(log_ratio)}
    return -ratio * batch.advantages, metrics


@declares(Trait.WITHOUT_RATIO)
def reinforce(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
    """Returns -A logprobs (Williams, 1992). It is correct only for samples of the current policy."""
    return -batch.advantages * logprobs, {}


def cispo(
    logprobs: Float[Array, "B G C"], batch: Batch, *, clip_low: NotNegative = 1.0, clip_high: NotNegative = 4.0
) -> tuple[Array, Metrics]:
    """Returns REINFORCE with clipped importance weights (MiniMax-M1, arXiv 2506.13585): each token keeps its gradient.

    -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs. The upper bound is 1 + clip_high, as in the paper; TRL's
    `epsilon_high` is the bound itself. clip_low = 1 means no lower bound.
    """
    # The weight is a constant: also tokens beyond a bound keep the gradient of their log-probability.
    ratio = jax.lax.stop_gradient(importance_ratio(logprobs - old_logprobs(logprobs, batch)))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    metrics = {"clip/fraction": jnp.float32(clipped != ratio), "ratio/mean": ratio}
    return -clipped * batch.advantages * logprobs, metrics


def sapo(
    logprobs: Float[Array, "B G C"], batch: Batch, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05
) -> tuple[Array, Metrics]:
    """Returns soft adaptive policy optimization (arXiv 2511.20347): a sigmoid gate replaces the clip.

    -(4 / tau) sigmoid(tau (r - 1)) A, with tau_positive where A > 0 and tau_negative elsewhere.
    """
    ratio = importance_ratio(logprobs - old_logprobs(logprobs, batch))
    tau = jnp.where(batch.advantages > 0, tau_positive, tau_negative)
    # A sigmoid has the slope 1/4 at 0: with 4 / tau the gradient at r = 1 is that of r A, whatever tau is.
    return -(4 / tau) * jax.nn.sigmoid(tau * (ratio - 1)) * batch.advantages, {"ratio/mean": ratio}


def vespo(
    logprobs: Float[Array, "B G C"],
    batch: Batch,
    *,
    k_positive: NotNegative = 2.0,
    lambda_positive: NotNegative = 3.0,
    k_negative: NotNegative = 3.0,
    lambda_negative: NotNegative = 2.0,
) -> tuple[Array, Metrics]:
    """Returns variational sequence-level soft policy optimization (arXiv 2602.10693).

    -sg(w^k exp(lambda (1 - w))) A logprobs, w = exp(sum over trained tokens of logprobs - old_logprobs). The weight is
    1 on-policy, and approaches 0 for small and for large w. k and lambda depend on the sign of A.
    """
    log_ratio = jax.lax.stop_gradient(logprobs - old_logprobs(logprobs, batch))
    log_w = jnp.sum(jnp.where(batch.loss_mask, log_ratio, 0.0), axis=-1, keepdims=True)
    k = jnp.where(batch.advantages > 0, k_positive, k_negative)
    slope = jnp.where(batch.advantages > 0, lambda_positive, lambda_negative)
    # The exponents are added before exp, because w^k alone may overflow.
    weight = jnp.exp(k * log_w + slope * (1 - importance_ratio(log_w)))
    weight = jnp.broadcast_to(weight, logprobs.shape)
    return -weight * batch.advantages * logprobs, {"vespo/weight": weight, "ratio/mean": importance_ratio(log_ratio)}


def topr(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
    """Returns tapered off-policy REINFORCE (arXiv 2503.14286): only samples with A <= 0 are weighted, by at most 1.

    -sg(w) A logprobs, w = 1 where A > 0, min(exp(sum over trained tokens of logprobs - old_logprobs), 1) elsewhere.
    """
    log_ratio = jax.lax.stop_gradient(logprobs - old_logprobs(logprobs, batch))
    log_w = jnp.sum(jnp.where(batch.loss_mask, log_ratio, 0.0), axis=-1, keepdims=True)
    # The minimum with 0 comes before exp, because exp of a sum of many log-ratios may overflow.
    weight = jnp.where(batch.advantages > 0, 1.0, jnp.exp(jnp.minimum(log_w, 0.0)))
    return -weight * batch.advantages * logprobs, {"ratio/mean": importance_ratio(log_ratio)}


def old_logprobs(logprobs: Float[Array, "B G C"], batch: Batch) -> Float[Array, "B G C"]:
    """Returns batch.old_logprobs. If it is None, the old policy is the current one, and the ratio is 1."""
    # A stopped gradient makes the ratio 1, and its gradient that of the log-probability.
    return jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs


def importance_ratio(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns exp(log_ratio), with log_ratio clipped to +- MAX_LOG_RATIO."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped_loss(
    ratio: Float[Array, "B G C"], advantages: Float[Array, "B G C"], low: float, high: float, delta: float = 0.0
) -> tuple[Array, Metrics]:
    bounded = jnp.minimum(ratio, delta) if delta else ratio
    loss = -jnp.minimum(bounded * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    # The clip is active only on the side to which the advantage pushes the ratio.
    is_clipped = jnp.where(advantages > 0, ratio > 1 + high, ratio < 1 - low) & (advantages != 0)
    return loss, {"clip/fraction": jnp.float32(is_clipped), "ratio/mean": ratio}


def sequence_mean(x: Float[Array, "B G C"], mask: Bool[Array, "B G C"]) -> Float[Array, "B G 1"]:
    """Computes the mean [B, G, 1] of x [B, G, C] over the mask."""
    total = jnp.sum(jnp.where(mask, x, 0.0), axis=-1, keepdims=True)
    return total / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)


def aggregation_weights(
    mask: Bool[Array, "B G C"],
    *,
    mode: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"],
    constant_length: Count = 0,
) -> Float[Array, "B G C"]:
    """Returns weights [B, G, C]: the loss of an update is sum(weights * per-token loss).

    The denominators cover the whole mask [B, G, C], so the parts of a micro-batched or sharded update add up to the
    same loss. mode:
    "token_mean"     1 / trained tokens (DAPO, arXiv 2503.14476),
    "sequence_mean"  1 / (sequences x trained tokens of the sequence) (GRPO, arXiv 2402.03300),
    "sequence_sum"   1 / sequences (LUSPO, arXiv 2602.05261),
    "constant"       1 / (sequences x constant_length) (Dr. GRPO, arXiv 2503.20783).
    A sequence without a trained token has weight 0 and is not in `sequences`.
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
