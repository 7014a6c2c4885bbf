"""The sections `health`, `checkpoint` and `log` of a config. configs/grpo.py explains each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from jaxrl_llm.config.schema import AtLeastOne, Count, Field, MayChange


@dataclass(frozen=True, kw_only=True)
class RollbackSettings:
    """The health rules that roll a run back, and how training differs afterwards."""

    rules: tuple[str, ...]
    most: MayChange[AtLeastOne] = 3
    learning_rate: Annotated[float, Field(float, low=0, high=1, above=True)] = 0.5
    warmup_steps: Count = 5


@dataclass(frozen=True, kw_only=True)
class HealthSettings:
    """What a run does about findings of health rules. Arguments of rules are fields too."""

    max_skipped: MayChange[Count]  # argument of the rule `updates_skipped`
    hang_minutes: MayChange[Annotated[float, Field(float, low=0, high=1e5)]]
    stop: MayChange[tuple[str, ...]]

    rollback: ClassVar[RollbackSettings | None] = None


@dataclass(frozen=True, kw_only=True)
class ActingHealthSettings(HealthSettings):
    """Health settings of reinforcement learning, which may also skip updates and roll back."""

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
    """The loggers that receive the numbers of a run, besides its own files."""

    to: MayChange[tuple[str, ...]]
    project: MayChange[str]
    name: MayChange[str]
    tags: MayChange[tuple[str, ...]]
    profile: MayChange[str]

    completions_every: ClassVar[int] = 0


@dataclass(frozen=True, kw_only=True)
class SamplesLogSettings(LogSettings):
    """The log settings of a run that samples completions."""

    completions_every: MayChange[Count] = field()  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True)
class Plan:
    """The settings of a session: how long it trains, and when it evaluates, saves and rolls back."""

    steps: int  # steps of the whole run
    evaluate_every: int  # steps from one evaluation to the next; 0 = never
    patience: int  # evaluations without a better accuracy, after which the run ends; 0 = the run does not end early
    most_rollbacks: int  # maximum number of rollbacks
    checkpoint: CheckpointSettings
    health: HealthSettings
    log: LogSettings
