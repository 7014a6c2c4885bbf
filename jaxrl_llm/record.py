"""What a step leaves to be logged, and what the log says of it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.structs import Array, Rollouts


class Timer:
    """Seconds by phase of one step. Phases may overlap: the host rewards while the device scores."""

    def __init__(self, after: Future[float] | None = None):
        """after: when the device had done the step before, which its first phase may have waited for."""
        self.began = self._last = time.perf_counter()
        self._after = after
        self.at: dict[str, float] = {}  # when a phase ended
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str, *, since: float | None = None, at: float | None = None) -> None:
        """A phase ended, now or `at`, that had begun with the end of the one before, or at `since`."""
        at = time.perf_counter() if at is None else at
        since = self._last if since is None else since
        if not self.at:
            since = max(since, self._after.result()) if self._after else since
            self.began = since
        self._last = self.at[phase] = at
        self.seconds[phase] = at - since

    @property
    def whole(self) -> float:
        """From the beginning of the first phase to the end of the last."""
        return max(self.at.values()) - self.began


@dataclass
class Record:
    """A step to be logged. Arrays are still on the device."""

    step: int
    timer: Timer
    tokens: int  # real ones of the completions
    updates: list[dict[str, Array]]  # the metrics of each
    metrics: dict[str, Any]  # of the step as a whole
    updated: Future[float]  # when the updates were done
    scored: Future[float] | None = None  # when the scores were
    samples: Samples | None = None
    rewards: Array = None  # [B, G], of the task
    evaluation: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The record as metrics.jsonl has it, but for the step. Waits for the device.

        How sampler and trainer differ is the first update's, a coefficient the last one's; what else updates report is
        averaged. A channel whose function abstained from every completion is left out.
        """
        self._finish_timing()
        updates, metrics = sharding.to_host((self.updates, self.metrics))
        record = {k: v for k, v in metrics.items() if not (k.startswith("reward/") and np.isnan(v))}
        if self.samples:
            record |= of_rollouts(self.samples.rollouts, self.step)
        record |= of_updates(updates) | self.evaluation
        record |= {f"time/{phase}": seconds for phase, seconds in self.timer.seconds.items()}
        return record | {"time/step": self.timer.whole, "tokens_per_second": self.tokens / self.timer.whole}

    def _finish_timing(self) -> None:
        timer, updated = self.timer, self.updated.result()
        if self.scored:
            scored = self.scored.result()
            timer.lap("score", since=timer.at["rollout"], at=scored)
            timer.lap("update", since=max(scored, timer.at["reward"]), at=updated)
        else:
            timer.lap("update", at=updated)


def of_updates(updates: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of a step's updates as one."""
    first, last = updates[0], updates[-1]
    record = {name: np.mean([u[name] for u in updates]) for name in first}
    record |= {name: x for name, x in first.items() if name.startswith(("sampler/", "importance/"))}
    record |= {name: x for name, x in last.items() if name.endswith(("learning_rate", "/coef"))}
    if "importance/square" in record:
        record["importance/ess"] = record["importance/mean"] ** 2 / max(record.pop("importance/square"), 1e-30)
    return record


def of_rollouts(rollouts: Rollouts, step: int) -> dict[str, Any]:
    """How long completions are, and how old the weights were that sampled them."""
    lengths = rollouts.completion_mask.sum(axis=-1)
    record = {"completion/length": lengths.mean(), "completion/length_max": lengths.max()}
    record |= {"completion/truncated": rollouts.truncated.mean()}
    if rollouts.loss_mask.any():
        lags = step - 1 - rollouts.versions[rollouts.loss_mask]
        record |= {"rollout/lag": lags.mean(), "rollout/lag_p95": np.percentile(lags, 95)}
    return record
