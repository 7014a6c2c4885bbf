"""The actor: pushes weights to the engine and samples the batches of the next steps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data.curriculum import Curriculum, from_text, to_text
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.shapes import SAMPLING, Book
from jaxrl_llm.rollout.prefetch import Prefetcher
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.samples import Samples, SampleSource
from jaxrl_llm.rollout.weight_check import WeightCheck
from jaxrl_llm.structs import Array, Pending, PyTree, Rollouts


class Actor:
    """Samples a batch for each step. The batch of step s comes from the weights after step s - 1 - lag.

    Call `next`, `push` and `advance` once per step, in this order. With a lag, one thread pushes and samples while the
    caller's thread learns. The step count decides the order of its work, not the time.
    """

    def __init__(
        self,
        engine: Engine,
        source: SampleSource,
        key: Array,
        *,
        book: Book,
        lag: int,
        last: int,
        weight_check: WeightCheck | None = None,
        curriculum: Curriculum | None = None,
    ):
        """key: the run's key; last: the run's last step; book: of the run; curriculum: of the prompts of `source`."""
        self.engine, self._source, self._book = engine, source, book
        self._first_key = self._key = key
        self._lag, self._last, self._check = lag, last, weight_check
        self._curriculum = curriculum
        # After the last step; draws may know less.
        self._visits = curriculum.no_signal if curriculum else None
        self._beginning = self._position = self._now()
        self._prefetcher: Prefetcher[Samples] = Prefetcher(self._sample, lag=lag, last=last)
        self._current: Samples
        self._pushed: Future[Rollouts | None]

    def reset(self, step: int, params: PyTree, pending: Pending | None = None, attempt: int = 0) -> None:
        """Continues after `step` with these weights and the batches of `pending`; None: from the start of the data.

        attempt: how often the run has gone back. Each attempt has other samples of the same prompts.
        """
        # Waits: a batch in sampling still moves the iterator.
        self._prefetcher.close(wait=True)
        self._prefetcher = Prefetcher(self._sample, lag=self._lag, last=self._last)
        # Steps are below 2**31, so no step has this number.
        self._key = jax.random.fold_in(self._first_key, 2**32 - attempt) if attempt else self._first_key
        position, batches = pending or Pending(self._beginning, [])
        if "data" not in position:
            # Of a checkpoint of an earlier version.
            position = {"data": position, "shapes": {}}
        # Before the push is ordered: with a lag, the thread samples right after it.
        self._source.go_to(position["data"])
        self._book.load(SAMPLING, position["shapes"])
        self._position = position
        if self._visits is not None:
            size = len(self._visits)
            self._visits = from_text(position["visits"], size) if "visits" in position else np.zeros(size, bool)
        self._pushed = self._prefetcher.do(self._push, params, step, self._visits)
        ordered = [self._source.from_checkpoint(arrays, metrics) for arrays, metrics in batches]
        self._prefetcher.begin(step, [replace(samples, position=position) for samples in ordered])

    def next(self) -> Samples:
        """Waits for the batch of the next step and returns it. Returns the same batch until `push`."""
        # Here and not in the thread that samples ahead: the order of programs must be the same in all processes.
        self._current = self._source.settled(self._prefetcher.next())
        return self._current

    def finish_push(self, params: PyTree) -> dict[str, Any]:
        """Waits until the engine no longer reads the last pushed parameters; returns the weight check's metrics.

        params: the last pushed parameters. An update must not donate their memory before this returns.
        """
        answer = self._pushed.result()
        return self._check.check(answer, params) if self._check and answer else {}

    def wait(self) -> None:
        """Waits until the engine has the last pushed weights."""
        self._pushed.result()

    def push(self, params: PyTree, step: int) -> None:
        """Drops the batch that `step` has learned from, and pushes the weights after `step`."""
        self._position = self._current.position
        # The position behind this batch: a checkpoint from now on begins there.
        self._prefetcher.used()
        if self._curriculum and self._visits is not None:
            samples = self._current  # `no_signal` waits for the reward functions
            visits = samples.prompts.numbers, samples.no_signal, samples.replaced
            self._visits = self._curriculum.visited(self._visits, *visits)
        self._pushed = self._prefetcher.do(self._push, params, step, self._visits)
        if distributed.count() > 1:
            # It gathers the weights: no other program may come between, in any process.
            self._pushed.result()

    def advance(self, step: int) -> None:
        """Allows one more batch: `step` no longer needs the engine or the device."""
        self._prefetcher.learned(step)

    def pending(self, seconds: float | None = None) -> Pending:
        """Waits for the ordered batches that no step has used, at most `seconds`, and returns the finished ones.

        With several processes it waits for all: each must save the same batches.
        """
        batches = self._prefetcher.waiting(seconds if distributed.count() == 1 else None)
        position = batches[-1].position if batches else self._position
        if self._visits is not None:
            position = position | {"visits": to_text(self._visits)}
        settled = map(self._source.settled, batches)
        return Pending(position, [(self._source.to_checkpoint(samples), samples.metrics) for samples in settled])

    def close(self) -> None:
        """Starts nothing more."""
        self._prefetcher.close()

    def _push(self, params: PyTree, step: int, visits: np.ndarray | None) -> Rollouts | None:
        if self._curriculum and visits is not None:
            # Here, so that the step decides what a draw knows, not the time.
            self._curriculum.no_signal = visits
        self.engine.update_weights(params, step)
        return self._check.ask() if self._check else None

    def _sample(self, step: int) -> Samples:
        samples = self._source.sample(jax.random.fold_in(self._key, step))
        if not self._lag:
            # With a lag, one push may serve several batches.
            self.engine.release()
        more = self._curriculum.metrics() if self._curriculum else {}
        return replace(samples, position=self._now(), metrics=samples.metrics | more)

    def _now(self) -> dict[str, Any]:
        """Returns the position of the data, and the shapes in use: both decide the next batch."""
        return {"data": self._source.position(), "shapes": self._book.state(SAMPLING)}
