"""Losses of `sft` for the completions of a data set: single completions, or preference pairs.

The losses have the form of those in `losses.py`: `loss(logprobs, batch, *, fields)`, some with the column
`ref_logprobs`, the log-probabilities by the initial model. A prompt has one completion (G = 1), or a preference pair
(G = 2): the chosen completion and the rejected one, in this order.

The loss of a pair is written to each token of the pair. The aggregation "sequence_mean" (the mean over completions of
their means over tokens) turns this into the mean over pairs.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxrl_llm.algorithms.losses import Metrics, sequence_mean
from jaxrl_llm.algorithms.traits import Trait, declares
from jaxrl_llm.config.schema import Field, NotNegative, Positive
from jaxrl_llm.structs import Array, Batch

# Names that a config may use.
__all__ = ["cross_entropy", "dpo", "simpo"]

ACCURACY_METRIC = "reward/accuracy"  # metric: share of pairs whose chosen completion has the larger reward
Smoothing = Annotated[float, Field(float, low=0, high=0.5)]  # With 0.5, both orders are equally likely: no gradient.


def cross_entropy(logprobs: Float[Array, "B G C"], batch: Batch) -> tuple[Array, Metrics]:
    """Returns -logprobs, the loss of supervised fine-tuning."""
    return -logprobs, {}


@declares(Trait.PAIRS)
def dpo(
    logprobs: Float[Array, "B G C"],
    batch: Batch,
    ref_logprobs: Float[Array, "B G C"],
    *,
    beta: Positive = 0.1,
    label_smoothing: Smoothing = 0.0,
    nll_coef: NotNegative = 0.0,
) -> tuple[Array, Metrics]:
    """Returns direct preference optimization (arXiv 2305.18290).

    -(1 - e) log sigmoid(r_w - r_l) - e log sigmoid(r_l - r_w) with the reward r = beta sum_t (logprobs - ref_logprobs)
    of the chosen (w) and of the rejected completion (l). e is label_smoothing, the share of pairs in the wrong order
    (conservative DPO, https://ericmitchell.ai/cdpo.pdf). nll_coef: weight of the mean of -logprobs over the chosen
    completion (iterative RPO, arXiv 2404.19733).
    """
    rewards = beta * _sequence_sums(logprobs - ref_logprobs, batch)
    return _pair_loss(rewards, logprobs, batch, margin=0.0, label_smoothing=label_smoothing, nll_coef=nll_coef)


@declares(Trait.PAIRS)
def simpo(
    logprobs: Float[Array, "B G C"],
    batch: Batch,
    *,
    beta: Positive = 2.0,
    gamma: NotNegative = 1.0,
    label_smoothing: Smoothing = 0.0,
    nll_coef: NotNegative = 0.0,
) -> tuple[Array, Metrics]:
    """Returns simple preference optimization (arXiv 2405.14734), which has no reference.

    -log sigmoid(r_w - r_l - gamma) with the reward r = beta mean_t logprobs. gamma is the margin of the paper, whose
    tables have gamma / beta. label_smoothing and nll_coef are those of `dpo`.
    """
    rewards = beta * sequence_mean(logprobs, batch.loss_mask)
    return _pair_loss(rewards, logprobs, batch, margin=gamma, label_smoothing=label_smoothing, nll_coef=nll_coef)


def _pair_loss(
    rewards: Float[Array, "B 2 1"],
    logprobs: Float[Array, "B 2 C"],
    batch: Batch,
    *,
    margin: float,
    label_smoothing: float,
    nll_coef: float,
) -> tuple[Array, Metrics]:
    """Returns the loss of each pair, written to each of its tokens [B, 2, C], and metrics of the pairs [B, 2, 1].

    rewards: implicit rewards of the chosen and the rejected completions. margin: difference by which the chosen reward
    should exceed the rejected one.
    """
    chosen, rejected = rewards[:, :1], rewards[:, 1:]
    difference = chosen - rejected - margin
    log_right, log_wrong = jax.nn.log_sigmoid(difference), jax.nn.log_sigmoid(-difference)
    nll = -sequence_mean(logprobs, batch.loss_mask)[:, :1]
    loss = -(1 - label_smoothing) * log_right - label_smoothing * log_wrong + nll_coef * nll
    sums = _sequence_sums(logprobs, batch)
    metrics = {
        "reward/chosen": chosen,
        "reward/rejected": rejected,
        "reward/margin": chosen - rejected,
        ACCURACY_METRIC: jnp.float32(chosen > rejected),
        "logprobs/chosen": sums[:, :1],
        "logprobs/rejected": sums[:, 1:],
    } | ({"loss/nll": nll} if nll_coef else {})
    return jnp.broadcast_to(loss, logprobs.shape), {
        name: jnp.broadcast_to(x, rewards.shape) for name, x in metrics.items()
    }


def _sequence_sums(x: Float[Array, "B G C"], batch: Batch) -> Float[Array, "B G 1"]:
    return jnp.sum(jnp.where(batch.loss_mask, x, 0.0), axis=-1, keepdims=True)
