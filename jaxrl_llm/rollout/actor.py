"""The actor: completions for the steps to come, from weights that are pushed to it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

import grain
import jax

from jaxrl_llm.checkpoint import Pending
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.prefetch import Prefetcher
from jaxrl_llm.rollout.samples import Samples, SampleSource
from jaxrl_llm.structs import Array, PyTree, Rollouts


class WeightCheck(Protocol):
    """Asks the engine something after a push, and compares the answer with what the trainer computes."""

    def ask(self) -> Rollouts: ...

    def check(self, answer: Rollouts, params: PyTree) -> dict[str, Any]:
        """Metrics. Raises: UserError, if the engine has other weights."""
        ...


class Actor:
    """Samples for step after step. The samples of step s come from the weights after step s - 1 - lag.

    `next`, `push` and `advance` are called once a step, in this order. With a lag, one thread pushes and samples while
    the caller's own learns; what it does when is decided by counting, never by time.
    """

    def __init__(
        self,
        engine: Engine,
        source: SampleSource,
        iterator: grain.DatasetIterator,
        key: Array,
        *,
        lag: int,
        last: int,
        weight_check: WeightCheck | None = None,
    ):
        """key: of the run; last: its last step; iterator: of the prompts, the one that `source` draws from."""
        self.engine, self._source, self._iterator, self._key = engine, source, iterator, key
        self._lag, self._last, self._check = lag, last, weight_check
        self._beginning = self._position = iterator.get_state()
        self._prefetcher: Prefetcher[Samples] = Prefetcher(self._sample, lag=lag, last=last)
        self._current: Samples
        self._pushed: Future[Rollouts | None]

    def reset(self, step: int, params: PyTree, pending: Pending | None = None) -> None:
        """Goes on after `step` with these weights, and as `pending` says; without it, at the start of the data."""
        self._prefetcher.close(wait=True)  # what it samples now moves the iterator
        self._prefetcher = Prefetcher(self._sample, lag=self._lag, last=self._last)
        position, batches = pending or Pending(self._beginning, [])
        self._iterator.set_state(position)
        self._position = position
        self._pushed = self._prefetcher.do(self._push, params, step)
        made = [self._source.from_checkpoint(arrays, metrics) for arrays, metrics in batches]
        self._prefetcher.begin(step, [replace(samples, position=position) for samples in made])

    def next(self) -> Samples:
        """The samples of the next step, when they are there. They stay the next ones until the `push` after them."""
        self._current = self._prefetcher.next()
        return self._current

    def finish_push(self, params: PyTree) -> dict[str, Any]:
        """Returns when the engine reads the parameters last pushed no more, with metrics of what it has now.

        params: those. Before that, an update must not donate their memory.
        """
        answer = self._pushed.result()
        return self._check.check(answer, params) if self._check and answer else {}

    def wait(self) -> None:
        """Returns when the engine has the weights last pushed."""
        self._pushed.result()

    def push(self, params: PyTree, step: int) -> None:
        """The next samples have been learned from in `step`: they are dropped, and its weights are pushed."""
        self._position = self._current.position
        self._prefetcher.used()
        self._pushed = self._prefetcher.do(self._push, params, step)

    def advance(self, step: int) -> None:
        """All is done that step `step` needs the engine and the device for: one more step may be sampled for."""
        self._prefetcher.learned(step)

    def pending(self, seconds: float | None = None) -> Pending:
        """The batches that are ordered and not yet learned from, or those of them that come in so many seconds."""
        batches = self._prefetcher.waiting(seconds)
        position = batches[-1].position if batches else self._position
        return Pending(position, [(self._source.to_checkpoint(samples), samples.metrics) for samples in batches])

    def close(self) -> None:
        """Nothing more is begun."""
        self._prefetcher.close()

    def _push(self, params: PyTree, step: int) -> Rollouts | None:
        self.engine.update_weights(params, step)
        return self._check.ask() if self._check else None

    def _sample(self, step: int) -> Samples:
        samples = self._source.sample(jax.random.fold_in(self._key, step))
        if not self._lag:
            self.engine.release()
        return replace(samples, position=self._iterator.get_state())
