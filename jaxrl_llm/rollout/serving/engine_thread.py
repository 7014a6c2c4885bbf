"""The thread that owns the engine, and the bounded queue of sequences that wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from jaxrl_llm.rollout.jax.open_stream import MAX_NUMBER, NewTokens, OpenSequence, OpenStream

FAILED = "error"  # end of a sequence whose engine has failed


class QueueFull(Exception):
    """No room for the sequences of a request."""


class EngineThread:
    """Runs an open stream in a thread of its own or in the caller's. Only this thread starts programs of the engine."""

    def __init__(self, most_waiting: int):
        """most_waiting: most sequences that wait for a row."""
        self.most_waiting = most_waiting
        self.on_failure: Callable[[], None] = lambda: None  # is called once if the engine has failed
        self.error: BaseException | None = None
        self._waiting: deque[OpenSequence] = deque()
        self._taken: list[OpenSequence] = []  # what the stream has taken last, and may not have begun
        self._changed, self._closed = threading.Condition(), False
        self._stream: OpenStream | None = None

    def start(self, stream: OpenStream) -> None:
        """Starts to run a stream whose arrivals are this object."""
        self._stream = stream
        self._thread = threading.Thread(target=self._run, args=(stream,), name="engine", daemon=True)
        self._thread.start()

    def warm_up(self, token: int) -> None:
        """Waits until all programs are compiled. Raises: the error of the engine."""
        self.start_warm_up(token).wait()
        if self.error:
            raise self.error

    def start_warm_up(self, token: int) -> threading.Event:
        """Orders two tokens after `token`, which need all programs. The event is set when they have been sampled."""
        ended = threading.Event()

        def report(new: NewTokens) -> None:
            if new.end:
                ended.set()

        self.submit([OpenSequence(prompt=[token], number=MAX_NUMBER, max_tokens=2, report=report)])
        return ended

    def run(self, stream: OpenStream) -> None:
        """Runs a stream whose arrivals are this object in the caller's thread, until `end`.

        Raises: the error of the engine.
        """
        self._stream = stream
        self._run(stream)
        if self.error:
            raise self.error

    def end(self) -> None:
        """Ends the stream after its current round."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """Ends the stream and the thread that `start` has started."""
        self.end()
        self._thread.join()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._stream.running) if self._stream else 0

    @property
    def some_wait(self) -> bool:
        return bool(self._waiting)

    def submit(self, sequences: Sequence[OpenSequence]) -> None:
        """Adds sequences to the queue. Raises: QueueFull; RuntimeError, if the engine has failed."""
        with self._changed:
            if self.error:
                raise RuntimeError("the engine has failed") from self.error
            if len(self._waiting) + len(sequences) > self.most_waiting:
                raise QueueFull
            self._waiting.extend(sequences)
            self._changed.notify()

    def cancel(self, sequences: Sequence[OpenSequence]) -> None:
        """Ends sequences before the next round, if they have not ended."""
        with self._changed:
            for sequence in sequences:
                sequence.cancelled = True
            self._waiting = deque(sequence for sequence in self._waiting if not sequence.cancelled)

    def take(self, most: int, *, wait: bool) -> list[OpenSequence] | None:
        """Returns the sequences that have waited longest (`Arrivals.take`)."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed or not wait)
            if self._closed:
                return None
            self._taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            return self._taken

    def _run(self, stream: OpenStream) -> None:
        """Runs the stream until it ends. If it fails, reports the failure to all unfinished sequences."""
        try:
            stream.run()
        except BaseException as error:
            with self._changed:
                self.error = error
                unfinished = dict.fromkeys([*stream.running.values(), *self._taken, *self._waiting])
                self._waiting.clear()
            for sequence in unfinished:
                sequence.report(NewTokens([], [], -1, FAILED))
            self.on_failure()
