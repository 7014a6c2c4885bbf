"""Waits for a step's numbers, and writes them, while the next step runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.collect import Sampled
from jaxrl_llm.metrics import Log, Timer, summary


class Clerk:
    """One thread with a log, so that lines are written in order and the loop waits for none of them."""

    def __init__(self, log: Log, check: Callable[[int, dict[str, Any]], None]):
        """check(step, record) raises for a record after which the run must stop."""
        self._log, self._check, self._thread = log, check, ThreadPoolExecutor(max_workers=1)
        self._written: Future[None] | None = None

    def watch(self, arrays: Any) -> Future[float]:
        """When the arrays will have been there."""
        return self._thread.submit(_ready, arrays)

    def write(self, *of_step: Any) -> None:
        """The line of a step, as `_write` takes it. Raises: what the line before could not be written for.

        So does `check` of the step before: it never waits for this one.
        """
        self.finish()
        self._written = self._thread.submit(_write, self._log, self._check, *of_step)

    def finish(self) -> None:
        """Returns when every line is written. Raises: what one could not be written for."""
        if self._written:
            self._written.result()

    def close(self) -> None:
        self._thread.shutdown()


def _ready(arrays: Any) -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()


def _write(
    log: Log,
    check: Callable[[int, dict[str, Any]], None],
    step: int,
    timer: Timer,
    done: tuple[Future[float], Future[float]],
    on_device: tuple[list[dict[str, Any]], dict[str, Any]],
    sampled: Sampled,
    earned: tuple[dict[str, np.ndarray], np.ndarray],
    judged: dict[str, Any],
    sample: tuple | None,
) -> None:
    """done: when the step was scored, and updated; on_device: metrics of its updates, and others."""
    scored, updated = (future.result() for future in done)
    timer.lap("score", since=timer.at["rollout"], at=scored)
    timer.lap("update", since=max(scored, timer.at["reward"]), at=updated)
    updates, measured = sharding.to_host(on_device)
    record = summary(step, sampled.rollouts, *earned, updates, timer) | measured | judged
    log.step(step, record)
    if sample:
        log.completions(step, *sample)
    check(step, record)
