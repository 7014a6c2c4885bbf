"""Sampling ahead of learning: one thread that samples, and is given new weights, in a fixed order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Ahead(Generic[T]):
    """Batches of the steps to come, in order, at most `lag` of them before the step in hand has been learned.

    The batch of step s is sampled with the weights after step s - 1 - lag (at the start of a run: the first ones),
    however long sampling or learning takes: which weights make which batch is a matter of counting, not of timing.
    """

    def __init__(self, sample: Callable[[int], T], *, lag: int, last: int):
        """sample(step) -> its batch; last: the step after which none is sampled."""
        self._sample, self._lag, self._last = sample, lag, last
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._batches: deque[Future[T]] = deque()

    def begin(self, start: int, made: Iterable[T]) -> None:
        """After step `start`: the batches `made` before a restart are there already, the others follow."""
        for batch in made:
            future: Future[T] = Future()
            future.set_result(batch)
            self._batches.append(future)
        for step in range(start + 1 + len(self._batches), start + 2 + self._lag):
            self._order(step)

    def next(self) -> T:
        """The batch of the next step, when it is there."""
        return self._batches.popleft().result()

    def learned(self, step: int) -> None:
        """One more may be sampled, with what the thread was given to do until now."""
        self._order(step + 1 + self._lag)

    def do(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Runs a function in that thread, after all that was ordered before."""
        return self._thread.submit(function, *args, **kwargs)

    def waiting(self) -> list[T]:
        """The batches that are sampled and not yet learned from, when all ordered ones are there."""
        return [future.result() for future in self._batches]

    def close(self) -> None:
        """Nothing more is begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _order(self, step: int) -> None:
        if step <= self._last:
            self._batches.append(self._thread.submit(self._sample, step))
