"""The sections `rollout` and `reward` of a config. configs/grpo.py explains each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.names import split_call
from jaxrl_llm.config.schema import AtLeastOne, Count, Field, MayChange

TIMEOUT = Field(float, low=0, high=1e6)
Seconds = MayChange[Annotated[float, TIMEOUT]]


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """The part of section `rollout` that `sft` has: the length of completions."""

    max_completion_tokens: AtLeastOne


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(LengthSettings):
    """Section `rollout`: how completions are sampled."""

    max_lag: Count
    resample_rounds: Count
    partial: bool
    temperature: Annotated[float, Field(float, low=1e-4)]  # logits divided by a smaller temperature overflow
    top_k: Count
    top_p: Annotated[float, Field(float, low=0, high=1, above=True)]

    @property
    def sampling(self) -> Sampling:
        """The distribution from which the engine samples, and with which the trainer scores."""
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """How the functions that judge completions run."""

    timeout: Seconds
    unconfined: MayChange[bool]

    functions: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class RewardSettings(JudgeSettings):
    """Section `reward`: the reward functions of a run, and the penalty for overlong completions."""

    functions: tuple = field()  # pyright: ignore[reportIncompatibleVariableOverride]
    weights: tuple
    overlong_tokens: Count

    @property
    def channels(self) -> dict[str, float]:
        """{name: weight} of the reward functions. The names leave out arguments."""
        names = [split_call(text)[0] for text in self.functions]
        return dict(zip(names, self.weights, strict=True))
