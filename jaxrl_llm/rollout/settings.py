"""The sections `rollout` and `reward` of a config. configs/grpo.py explains each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.names import split_call
from jaxrl_llm.config.schema import AtLeastOne, Count, Field, MayChange

TIMEOUT = Field(float, low=0, high=1e6)
Seconds = MayChange[Annotated[float, TIMEOUT]]


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """The part of section `rollout` that `sft` has: the length of completions."""

    max_completion_tokens: AtLeastOne
    """C: limit of a completion in tokens."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(LengthSettings):
    """Section `rollout`: how completions are sampled."""

    max_lag: Count
    """Steps that sampling may run ahead of learning; 0: sampling and learning take turns."""
    resample_rounds: Count
    """Most rounds of fresh prompts that replace groups whose completions all have the same reward (DAPO). 0: none."""
    partial: Count
    """Partial rollouts: groups that are open beyond the prompts_per_step groups of a step. A step takes the groups that
    are complete first, and the next step continues the others with its weights. So no step waits for the longest
    completion. At most prompts_per_step; 0: none. In-JAX engine only.
    """
    max_age: Count
    """Partial rollouts: most steps from the one that begins a group to the one that learns from it; a step waits for a
    group that is so old. 0: no bound.
    """
    temperature: Annotated[float, Field(float, low=1e-4)]  # smaller ones overflow
    """Sampling temperature; log-probabilities in training use it too, as top_k and top_p."""
    top_k: Count
    """Number of most likely tokens to sample from; 0: all."""
    top_p: Annotated[float, Field(float, low=0, high=1, exclusive=True)]
    """Total probability of the most likely tokens to sample from; 1: all."""

    @property
    def sampling(self) -> Sampling:
        """The distribution from which the engine samples, and with which the trainer scores."""
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """How the functions that judge completions run."""

    timeout: Seconds
    """Seconds that a reward function, or eval.function, may take for one batch; a slower one stops the run. 0: no
    limit, and the functions run in the trainer's process, as debuggers and functions on JAX's devices need
    (docs/rewards.md).
    """
    unconfined: MayChange[bool]
    """Whether untrusted code of the policy (code.accuracy, python.Python, tools.run_python) runs without bubblewrap.
    True is for machines that grant no namespaces: such code can do all that the trainer's user can (docs/rewards.md).
    """

    functions: tuple[str, ...] = field(default=(), init=False)


@dataclass(frozen=True, kw_only=True)
class RewardSettings(JudgeSettings):
    """Section `reward`: the reward functions of a run, and the penalty for overlong completions."""

    functions: tuple = field()
    """Reward functions: names of this package, or my.module.function with TRL's signature. A name may have arguments,
    as in "gsm8k.accuracy(method='flexible')" (docs/rewards.md).
    """
    weights: tuple
    """Weight of each function in the reward; 0: the function is only logged."""
    overlong_tokens: Count
    """Tokens before the limit of a completion over which its overlong penalty grows from 0 to 1 (DAPO). 0: no penalty.
    """

    @property
    def channels(self) -> dict[str, float]:
        """{name: weight} of the reward functions. The names leave out arguments."""
        names = [split_call(text)[0] for text in self.functions]
        return dict(zip(names, self.weights, strict=True))
