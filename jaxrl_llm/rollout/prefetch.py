"""Sampling ahead of learning: one thread pushes weights and samples batches, in a fixed order."""

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
    """Samples the batches of the next steps in order, at most `lag` batches ahead of the current step.

    The batch of step s is sampled with the weights after step s - 1 - lag (at the start of a run: the first weights).
    The step count decides this, not the time that sampling or learning takes. With lag 0 the caller's thread samples.
    After a failure, the jobs that were ordered later do not start.
    """

    def __init__(self, sample: Callable[[int], T], *, lag: int, last: int):
        """sample(step) -> the batch of the step; last: the last step to sample for."""
        self._sample, self._lag, self._last = sample, lag, last
        # One thread: pushes and batches keep the order in which they were ordered.
        self._thread = ThreadPoolExecutor(max_workers=1)
        # Int: a step that the caller's thread samples for.
        self._batches: deque[Future[T] | int] = deque()
        self._failed: BaseException | None = None

    def begin(self, start: int, batches: Iterable[T]) -> None:
        """Starts after step `start`. batches: the first ones, sampled before a resume; the others are ordered now."""
        for batch in batches:
            finished: Future[T] = Future()
            finished.set_result(batch)
            self._batches.append(finished)
        # The lag counts the batches of a checkpoint too, so fewer are ordered where a checkpoint had some.
        for step in range(start + 1 + len(self._batches), start + 2 + self._lag):
            self._order(step)

    def next(self) -> T:
        """Waits for the batch of the next step and returns it. Call it once before `used`: with lag 0 it samples."""
        batch = self._batches[0]
        return self._sample_in_caller(batch) if isinstance(batch, int) else batch.result()

    def used(self) -> None:
        """Drops the current batch."""
        self._batches.popleft()

    def learned(self, step: int) -> None:
        """Orders one more batch. It is sampled after all earlier jobs of `do`."""
        self._order(step + 1 + self._lag)

    def do(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Runs a function in the thread, after all earlier jobs. The future raises the thread's first error."""
        return self._thread.submit(self._run, partial(function, *args, **kwargs))

    def waiting(self, seconds: float | None = None) -> list[T]:
        """Waits for all ordered batches, at most `seconds`; returns the unused ones up to the first unfinished one.

        Leaves out a batch that failed and all batches after it: `next` raises the error.
        """
        ordered = [batch for batch in self._batches if not isinstance(batch, int)]
        finished, unfinished = wait(ordered, seconds)
        if unfinished:
            print(
                f"note: {len(unfinished)} of the batches that are sampled ahead need more than {seconds:.0f} s: the "
                "resumed run samples them with newer weights, so its numbers will differ from those without this stop",
                flush=True,
            )
        return [batch.result() for batch in takewhile(lambda x: x in finished and not x.exception(), ordered)]

    def close(self, *, wait: bool = False) -> None:
        """Starts nothing more; wait: returns when the running job has ended."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _order(self, step: int) -> None:
        if step <= self._last:
            self._batches.append(self.do(self._sample, step) if self._lag else step)

    def _sample_in_caller(self, step: int) -> T:
        # Waits for all earlier jobs, such as a push.
        self.do(_same, None).result()
        return self._sample(step)

    def _run(self, function: Callable[[], R]) -> R:
        # A job after a failed push would sample from old weights.
        if self._failed:
            raise self._failed
        try:
            return function()
        except BaseException as error:
            self._failed = error
            raise


def _same(x: R) -> R:
    return x
