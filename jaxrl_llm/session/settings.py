"""The sections `health`, `checkpoint` and `log` of a config. configs/grpo.py explains each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from jaxrl_llm.config.schema import AtLeastOne, Count, Field, MayChange


@dataclass(frozen=True, kw_only=True)
class RollbackSettings:
    """The health rules that roll a run back, and how training differs afterwards."""

    rules: tuple[str, ...]
    most: MayChange[AtLeastOne] = 3
    learning_rate: Annotated[float, Field(float, low=0, high=1, exclusive=True)] = 0.5
    warmup_steps: Count = 5


@dataclass(frozen=True, kw_only=True)
class HealthSettings:
    """What a run does about findings of health rules. Fields such as `max_skipped` are arguments of a rule."""

    max_skipped: MayChange[Count]  # of the rule `updates_skipped`
    """Skipped updates in a row that stop the run; 0: never. An update is skipped if its gradient is not finite or no
    token is trained.
    """
    hang_minutes: MayChange[Annotated[float, Field(float, low=0, high=1e5)]]
    """Minutes without progress, or ten median steps if they are longer, after which the command ends with exit code 75,
    which means "start it again": a host, a disk or a collective hangs. 0: it waits for ever (docs/pods.md).
    """
    stop: MayChange[tuple[str, ...]]
    """Health rules (docs/health.md) whose finding ends the run. Findings of all other rules are only reported."""

    rollback: RollbackSettings | None = field(default=None, init=False)


@dataclass(frozen=True, kw_only=True)
class ActingHealthSettings(HealthSettings):
    """Health settings of reinforcement learning, which may also skip updates and roll back."""

    skip: tuple[str, ...]
    """Further reasons to skip an update: gradient_spike (its norm is ten times the usual one) | sampler_mismatch (other
    weights than those that learn have sampled).
    """
    self_test: MayChange[bool]
    """True: a new run tests itself at step 0 (docs/health.md). The test changes no number of the run."""
    rollback: RollbackSettings | None = None
    """Rollback to a checkpoint. dict(rules=("reward_collapse",), most=3, learning_rate=0.5, warmup_steps=5): at a
    finding of these rules the run restores a checkpoint before it and continues with other samples of the same prompts,
    at most `most` times. learning_rate: factor of the rate at each rollback. warmup_steps: updates of a new warm-up.
    None: no rollback.
    """


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How often a run is saved, and how many checkpoints it keeps."""

    every: MayChange[AtLeastOne]
    """Steps between checkpoints; more are saved at best evaluations, at a signal and at the end."""
    keep: MayChange[AtLeastOne]
    """Number of latest checkpoints to keep."""
    keep_best: MayChange[Count]
    """Number of best checkpoints by evaluation to keep as well; 0: none."""
    accept: MayChange[str]
    """Token that lets a run resume with changed rows or changed functions of yours; the error that refuses them prints
    it. "": such changes are refused.
    """


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """The loggers that receive the numbers of a run, besides its own files."""

    to: MayChange[tuple[str, ...]]
    """Loggers besides metrics.jsonl, any of: tensorboard | wandb | trackio | mlflow, or my.module.function."""
    project: MayChange[str]
    """Project of W&B and trackio, experiment of MLflow; "": no such logger is used."""
    name: MayChange[str]
    """Name of the run in the loggers; "": the name of its work directory."""
    tags: MayChange[tuple[str, ...]]
    """Texts that mark the run in the loggers."""
    profile: MayChange[str]
    """Steps to trace into WORKDIR/profile, as "3:5"; "": none."""

    completions_every: int = field(default=0, init=False)
    keep_samples: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True)
class SamplesLogSettings(LogSettings):
    """The log settings of a run that samples completions."""

    completions_every: MayChange[Count] = field()
    """Steps between samples on the console, in completions.jsonl and in the loggers; the first and the last step are
    always included. 0: no samples.
    """
    keep_samples: MayChange[Count] = 0
    """Steps from one file of samples to the next: 25 keeps those of steps 1, 26, 51 and so on in WORKDIR/samples, for
    `jaxrl replay` of steps with a judge, tools, a clock or vLLM (docs/replay.md). 0: no files.
    """


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
