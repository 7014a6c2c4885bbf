"""Sampling ahead of learning: one thread pushes weights and samples batches, in a fixed order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


@dataclass
class PendingBatch(Generic[T]):
    """A batch that no step has used yet."""

    step: int  # step that will use the batch
    future: Future[T] | None = None  # its job in the thread; None: the caller's thread samples it


class Prefetcher(Generic[T]):
    """Samples the batches of the next steps in order, at most `lag` batches ahead of the current step.

    The batch of step s is sampled with the weights after step s - 1 - lag, and with the first weights if that step is
    before the start. So the step count decides the weights, not the time that sampling or learning takes. With lag 0
    the caller's thread samples. After a failure, later jobs do not start.
    """

    def __init__(self, sample: Callable[[int], T], *, lag: int, last: int):
        """sample(step): returns the batch of a step. last: last step to sample for."""
        self._sample, self._lag, self._last = sample, lag, last
        # A single worker thread runs pushes and batches in the order in which they were submitted.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._batches: deque[PendingBatch[T]] = deque()
        self._failure: BaseException | None = None  # first error of a job in the thread

    def start(self, step: int, restored_batches: Iterable[T]) -> None:
        """Starts after `step`. restored_batches: the first batches, which a checkpoint holds."""
        for number, batch in enumerate(restored_batches, step + 1):
            finished: Future[T] = Future()
            finished.set_result(batch)
            self._batches.append(PendingBatch(number, finished))
        # Restored batches count towards the lag, so fewer batches are sampled now.
        for number in range(step + 1 + len(self._batches), step + 2 + self._lag):
            self._order(number)

    def next(self) -> T:
        """Waits for the batch of the next step and returns it. With lag 0 it samples, so call it once per step."""
        batch = self._batches[0]
        return batch.future.result() if batch.future else self._sample_in_caller(batch.step)

    def drop_current(self) -> None:
        """Drops the batch of `next`, because the step has used it."""
        self._batches.popleft()

    def order_after(self, step: int) -> None:
        """Orders one more batch, because `step` has been learned. It is sampled after all earlier jobs of `submit`."""
        self._order(step + 1 + self._lag)

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Runs a function in the thread, after all earlier jobs. The future raises the thread's first error."""
        return self._thread.submit(self._run, partial(function, *args, **kwargs))

    def finished_batches(self, seconds: float | None = None) -> list[T]:
        """Waits at most `seconds` for all ordered batches. Returns the unused ones before the first unfinished one.

        A failed batch and all later ones are left out, because `next` raises the error. With None it waits for all.
        """
        futures = [batch.future for batch in self._batches if batch.future]
        finished, unfinished = wait(futures, seconds)
        if unfinished:
            print(
                f"note: {len(unfinished)} of the batches that are sampled ahead need more than {seconds:.0f} s: the "
                "resumed run samples them with newer weights, so its numbers will differ from those without this stop",
                flush=True,
            )
        return [future.result() for future in takewhile(lambda x: x in finished and not x.exception(), futures)]

    def close(self, *, wait: bool = False) -> None:
        """Cancels the jobs that have not started. wait: whether to return only after the running job has ended."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _order(self, step: int) -> None:
        if step <= self._last:
            future = self.submit(self._sample, step) if self._lag else None
            self._batches.append(PendingBatch(step, future))

    def _sample_in_caller(self, step: int) -> T:
        # An empty job waits for all earlier jobs, such as a push.
        self.submit(lambda: None).result()
        return self._sample(step)

    def _run(self, function: Callable[[], R]) -> R:
        """Runs a job in the thread, unless an earlier job has failed."""
        # A job after a failed push would sample from old weights.
        if self._failure:
            raise self._failure
        try:
            return function()
        except BaseException as error:
            self._failure = error
            raise
