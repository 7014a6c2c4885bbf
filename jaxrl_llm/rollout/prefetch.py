"""Sampling ahead of learning: one thread that is given new weights, and samples, in a fixed order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import takewhile
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Prefetcher(Generic[T]):
    """Batches of the steps to come, in order, at most `lag` of them before the step in hand has been learned.

    The batch of step s is sampled with the weights after step s - 1 - lag (at the start of a run: the first ones),
    however long sampling or learning takes: which weights make which batch is a matter of counting, not of timing.
    With lag 0 the caller's own thread samples. What was ordered after something that failed is not begun.
    """

    def __init__(self, sample: Callable[[int], T], *, lag: int, last: int):
        """sample(step) -> its batch; last: the step after which none is sampled."""
        self._sample, self._lag, self._last = sample, lag, last
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._batches: deque[Future[T] | int] = deque()  # a number is a step that the caller's thread samples for
        self._failed: BaseException | None = None

    def begin(self, start: int, made: Iterable[T]) -> None:
        """After step `start`: the batches `made` before a restart are there already, the others follow."""
        for batch in made:
            there: Future[T] = Future()
            there.set_result(batch)
            self._batches.append(there)
        for step in range(start + 1 + len(self._batches), start + 2 + self._lag):
            self._order(step)

    def next(self) -> T:
        """The batch of the next step, when it is there. It is the next one's until it is `used`."""
        batch = self._batches[0]
        return self._here(batch) if isinstance(batch, int) else batch.result()

    def used(self) -> None:
        """The next batch is that of the step after."""
        self._batches.popleft()

    def learned(self, step: int) -> None:
        """One more may be sampled, with what the thread was given to do until now."""
        self._order(step + 1 + self._lag)

    def do(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Runs a function in that thread, after all that was ordered before. Its result raises what failed there."""
        return self._thread.submit(self._run, partial(function, *args, **kwargs))

    def waiting(self, seconds: float | None = None) -> list[T]:
        """The batches that are not yet used, when all ordered ones are there, or those there after so many seconds.

        One that failed, and those after it, are left out: `next` raises what it failed with.
        """
        ordered = [batch for batch in self._batches if not isinstance(batch, int)]
        done, _ = wait(ordered, seconds)
        return [batch.result() for batch in takewhile(lambda x: x in done and not x.exception(), ordered)]

    def close(self, *, wait: bool = False) -> None:
        """Nothing more is begun; wait: and what was begun has ended."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _order(self, step: int) -> None:
        if step <= self._last:
            self._batches.append(self.do(self._sample, step) if self._lag else step)

    def _here(self, step: int) -> T:
        self.do(_same, None).result()  # when all ordered before is done
        return self._sample(step)

    def _run(self, function: Callable[[], R]) -> R:
        if self._failed:
            raise self._failed
        try:
            return function()
        except BaseException as error:
            self._failed = error
            raise


def _same(x: R) -> R:
    return x
