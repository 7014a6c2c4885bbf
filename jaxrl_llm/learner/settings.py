"""The sections of a config about losses, penalties and further models. configs/grpo.py explains each field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_llm.config.records import KeywordArguments
from jaxrl_llm.config.schema import AtLeastOne, Count, Field, MayChange, NotNegative, Share
from jaxrl_llm.learner import optim
from jaxrl_llm.learner.optim import Decay, make_optimizer

AboveZero = Annotated[float, Field(float, low=0, high=1, exclusive=True)]
# Columns [B, G, C] that policy and reference compute before the first update of a step. An advantage estimator or a
# loss gets a column as an argument of this name. The critic computes `values`; `column_of` names the columns of other
# models.
COLUMNS = ("old_logprobs", "entropy", "ref_logprobs")


def column_of(section: str) -> str:
    """Returns the column of a model that never learns. section: `reward_model` or `teachers.NAME`."""
    return "reward_model_scores" if section == "reward_model" else f"{section.removeprefix('teachers.')}_logprobs"


@dataclass(frozen=True, kw_only=True)
class RefreshSettings:
    """How the reference moves towards the policy."""

    every: AtLeastOne  # steps between two moves
    mix: AboveZero = 1.0  # a move makes the reference (1 - mix) reference + mix policy


@dataclass(frozen=True, kw_only=True)
class KlSettings:
    """The KL penalty: keeps the policy near the reference."""

    placement: Literal["reward", "loss"]
    """Where the penalty acts: reward (subtracted from it) | loss (added to it)."""
    estimator: Literal["k1", "k2", "k3", "k3_weighted"]
    """k1 (only in the reward) | k2 | k3 | k3_weighted (only in the loss: k3 times pi / pi_old)."""
    coef: NotNegative
    """Coefficient of the penalty, at the start."""
    decay: Decay
    """Schedule of the coefficient: constant | linear | cosine."""
    end: NotNegative
    """Coefficient at the last update, with a linear or cosine decay."""
    adaptive: Annotated[KeywordArguments, optim.adaptive_kl] | None = None
    """Adaptive coefficient, instead of kl.decay. dict(target=0.01, horizon=10_000): mean KL per token to hold, and
    about the number of sequences in which the coefficient adapts. None: not adaptive.
    """
    refresh: RefreshSettings | None = None
    """Reference model that moves towards the policy. dict(every=100, mix=1.0): steps between two moves, and the size of
    a move: (1 - mix) reference + mix policy. None: the reference never moves.
    """


@dataclass(frozen=True, kw_only=True)
class EntropySettings:
    """The bonus for the entropy of the policy."""

    coef: NotNegative  # coefficient of the bonus, at the start
    adaptive: Annotated[KeywordArguments, optim.adaptive_entropy] | None = None  # None: the coefficient is constant


@dataclass(frozen=True, kw_only=True)
class MaskSettings:
    """Which completions and tokens the policy does not learn from."""

    truncated: bool = False
    """True: leave out completions that the token limit cut."""
    top_entropy: AboveZero = 1.0
    """Share of tokens in the policy loss: those with the highest entropy; 1: all tokens."""
    off_policy: NotNegative = 0.0
    """Bound of mean log(pi_sampler / pi); a completion with A < 0 above it is left out. 0: none is left out."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Which arrays stay in the host's memory while no program uses them."""

    reference: MayChange[bool] = False  # parameters of the reference, and of all models that never learn
    optimizer: MayChange[bool] = False  # states of the optimizers


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """PPO's critic, which learns the values of states."""

    path: str  # model from which the critic starts; "": the policy's
    gamma: Share  # discount of the lambda-returns that the critic learns
    lam: Share  # lambda of these returns
    clip: NotNegative  # largest change of a value in the loss; 0: no clipping
    warmup_steps: Count  # first steps, in which only the critic learns
    optim: Annotated[KeywordArguments, make_optimizer]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """The router of a model with experts."""

    balance_coef: NotNegative  # coefficient of the load-balance loss


@dataclass(frozen=True, kw_only=True)
class FrozenSettings:
    """A model that scores and never learns."""

    path: MayChange[str]


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings(FrozenSettings):
    """A model whose scores are a part of the reward."""

    weight: float
