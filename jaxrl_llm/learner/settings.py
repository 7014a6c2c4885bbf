"""The sections of a config about losses, penalties and further models. configs/grpo.py explains each field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_llm.config.records import KeywordArguments
from jaxrl_llm.config.schema import AtLeastOne, Count, Field, MayChange, NotNegative, Share
from jaxrl_llm.learner import optim
from jaxrl_llm.learner.optim import Decay, make_optimizer

AboveZero = Annotated[float, Field(float, low=0, high=1, above=True)]


@dataclass(frozen=True, kw_only=True)
class RefreshSettings:
    """How the reference moves towards the policy."""

    every: AtLeastOne
    mix: AboveZero = 1.0


@dataclass(frozen=True, kw_only=True)
class KlSettings:
    """The KL penalty: keeps the policy near the reference."""

    placement: Literal["reward", "loss"]
    estimator: Literal["k1", "k2", "k3", "k3_weighted"]
    coef: NotNegative
    decay: Decay
    end: NotNegative
    adaptive: Annotated[KeywordArguments, optim.adaptive_kl] | None = None
    refresh: RefreshSettings | None = None


@dataclass(frozen=True, kw_only=True)
class EntropySettings:
    """The bonus for the entropy of the policy."""

    coef: NotNegative
    adaptive: Annotated[KeywordArguments, optim.adaptive_entropy] | None = None


@dataclass(frozen=True, kw_only=True)
class MaskSettings:
    """Which completions and tokens the policy does not learn from."""

    truncated: bool = False
    top_entropy: AboveZero = 1.0
    off_policy: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Which arrays stay in the host's memory while no program uses them."""

    reference: MayChange[bool] = False
    optimizer: MayChange[bool] = False


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """PPO's critic, which learns the values of states."""

    path: str
    gamma: Share
    lam: Share
    clip: NotNegative
    warmup_steps: Count
    optim: Annotated[KeywordArguments, make_optimizer]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """The router of a model with experts."""

    balance_coef: NotNegative


@dataclass(frozen=True, kw_only=True)
class FrozenSettings:
    """A model that scores and never learns."""

    path: MayChange[str]


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings(FrozenSettings):
    """A model whose scores are a part of the reward."""

    weight: float
