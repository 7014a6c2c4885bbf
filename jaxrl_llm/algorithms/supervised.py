"""Losses of `sft` for completions of a data set: single completions, and pairs in which the first one is better.

They are functions as in `losses.py`: `loss(logprobs, batch, *, fields)`, or with the column `ref_logprobs`, the
log-probabilities of the model that the run began with. A prompt has one completion (G = 1), or a pair (G = 2): the
chosen and the rejected one, in this order.

The loss of a pair stands at each of its tokens. `sequence_mean`, which is the mean over completions of their means over
tokens, makes of that the mean over pairs.
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

PREFERRED = "reward/accuracy"  # the metric of a pair that says whether the chosen completion has the larger reward
Smoothing = Annotated[float, Field(float, low=0, high=0.5)]  # with 0.5 both orders are as likely: nothing is learned


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
    rewards = beta * _sums(logprobs - ref_logprobs, batch)
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
    """Returns the loss of each pair with these rewards, at each of its tokens, and metrics of pairs [B, 2, 1].

    margin: how far the reward of the chosen completion should exceed the other one's.
    """
    chosen, rejected = rewards[:, :1], rewards[:, 1:]
    ahead = chosen - rejected - margin
    right, wrong = jax.nn.log_sigmoid(ahead), jax.nn.log_sigmoid(-ahead)
    nll = -sequence_mean(logprobs, batch.loss_mask)[:, :1]
    loss = -(1 - label_smoothing) * right - label_smoothing * wrong + nll_coef * nll
    sums = _sums(logprobs, batch)
    metrics = {
        "reward/chosen": chosen,
        "reward/rejected": rejected,
        "reward/margin": chosen - rejected,
        PREFERRED: jnp.float32(chosen > rejected),
        "logprobs/chosen": sums[:, :1],
        "logprobs/rejected": sums[:, 1:],
    } | ({"loss/nll": nll} if nll_coef else {})
    return jnp.broadcast_to(loss, logprobs.shape), {
        name: jnp.broadcast_to(x, rewards.shape) for name, x in metrics.items()
    }


def _sums(x: Float[Array, "B G C"], batch: Batch) -> Float[Array, "B G 1"]:
    return jnp.sum(jnp.where(batch.loss_mask, x, 0.0), axis=-1, keepdims=True)
