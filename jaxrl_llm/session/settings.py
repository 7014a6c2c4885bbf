"""The sections `health`, `checkpoint` and `log` of a config. configs/grpo.py explains each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from jaxrl_llm.config.schema import AtLeastOne, Count, Field, MayChange


@dataclass(frozen=True, kw_only=True)
class RollbackSettings:
    """The rules that send a run back, and what is different then."""

    rules: tuple[str, ...]
    most: MayChange[AtLeastOne] = 3
    learning_rate: Annotated[float, Field(float, low=0, high=1, above=True)] = 0.5
    warmup_steps: Count = 5


@dataclass(frozen=True, kw_only=True)
class HealthSettings:
    """What a run does about findings. The arguments of rules are fields too."""

    max_skipped: MayChange[Count]  # of the rule `updates_skipped`
    hang_minutes: MayChange[Annotated[float, Field(float, low=0, high=1e5)]]
    stop: MayChange[tuple[str, ...]]

    rollback: ClassVar[RollbackSettings | None] = None


@dataclass(frozen=True, kw_only=True)
class ActingHealthSettings(HealthSettings):
    """What a run of reinforcement learning does about findings: it may also skip updates, and go back."""

    skip: tuple[str, ...]
    self_test: MayChange[bool]
    rollback: RollbackSettings | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How often a run is saved, and how many checkpoints it keeps."""

    every: MayChange[AtLeastOne]
    keep: MayChange[AtLeastOne]
    keep_best: MayChange[Count]
    accept: MayChange[str]


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Where the numbers of a run go besides its own files."""

    to: MayChange[tuple[str, ...]]
    project: MayChange[str]
    name: MayChange[str]
    tags: MayChange[tuple[str, ...]]
    profile: MayChange[str]

    completions_every: ClassVar[int] = 0


@dataclass(frozen=True, kw_only=True)
class SamplesLogSettings(LogSettings):
    """The log of a run that samples completions."""

    completions_every: MayChange[Count] = field()  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True)
class Plan:
    """When a session does what, and what it writes. Numbers are steps."""

    steps: int
    evaluate_every: int  # 0: never
    patience: int  # evaluations that are not better than the best one, after which the run ends; 0: it does not
    most_rollbacks: int
    checkpoint: CheckpointSettings
    health: HealthSettings
    log: LogSettings
