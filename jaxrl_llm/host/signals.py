"""SIGTERM, Ctrl-C, a closed terminal: a checkpoint and a clean end within the 30 s that a preempted machine has."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from threading import Event, Lock, Thread, Timer, current_thread, main_thread
from types import TracebackType
from typing import NoReturn

from jaxrl_llm.errors import report

SECONDS = 30.0  # from the signal to the end of the machine, as clouds grant a preempted one
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the closed terminal"}


class StopSignals:
    """A context in which a first signal ends the run with exit code 0, and a second one at once, with 128 + its number.

    The first signal ends the run wherever it is, also in a compilation or in a rollout of many minutes: the step in
    hand is lost. It waits only for a block `with stop.deferred():`, in which the run's state changes. Python runs no
    signal handler while the main thread is in such a long call. So one thread of this class reads the signals and
    another one ends the run: it calls `finish`, closes what is `opened` and exits; the main thread never goes on.
    """

    def __init__(self, opened: ExitStack):
        """opened: closes all that the run has opened, in the right order."""
        self.finish: Callable[[], None] = self._nothing
        self.name = ""  # of the signal that came
        self._began = 0.0  # when it came
        self._opened, self._whole, self._kept = opened, Lock(), False

    def __enter__(self) -> StopSignals:
        signals = [number for number in NAMES if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup wants it
        self._before = {number: signal.signal(number, _pass) for number in signals}
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        Thread(target=self._watch, args=(read,), daemon=True).start()
        self._opened.callback(self._restore)  # after all that is opened from here on has been closed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """From here on the run ends by itself, unless a signal is ending it already: then this does not return."""
        if not self._kept:
            self._take()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A signal waits for the end of this block. After an exception in it the run ends with that error alone."""
        self._take()
        self._kept = True
        yield
        self._kept = False
        self._whole.release()

    @property
    def seconds(self) -> float:
        """Since the signal."""
        return time.monotonic() - self._began

    def used(self) -> str:
        """The signal, and how long the end has taken: for the last line, after which no hint comes any more."""
        self._hint.cancel()
        return f"{self.name} ({self.seconds:.1f} s of {SECONDS:.0f} s used)"

    def _take(self) -> None:
        if self.name:
            Event().wait()  # for ever: the other thread ends the process
        self._whole.acquire()

    def _restore(self) -> None:
        if current_thread() is main_thread():  # else the process is about to end
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            os.close(self._write)

    def _watch(self, read: int) -> None:
        """Runs in a thread. The bytes of the pipe are the numbers of the signals that came."""
        while came := os.read(read, 1):
            if came[0] not in self._before:
                continue
            if self.name:
                _exit(128 + came[0])
            self._began = time.monotonic()
            self.name = NAMES[signal.Signals(came[0])]
            hint = f"{self.name}: the run saves a checkpoint and ends; a second signal ends it now"
            self._hint = Timer(1.0, _say, [hint])
            self._hint.daemon = True
            self._hint.start()
            Thread(target=self._end, daemon=True).start()
        os.close(read)

    def _end(self) -> NoReturn:
        """Runs in a thread, whatever the main thread is doing outside of `deferred`."""
        self._whole.acquire()
        try:
            with self._opened:
                self.finish()
        except BaseException as error:  # of a thread, where nobody else would report it
            _exit(report(error))
        _exit(0)

    def _nothing(self) -> None:
        _say(f"stopped by {self.name} at the start, {self.seconds:.1f} s after the signal: there was nothing to save")


class NoSignals:
    """In the place of a `StopSignals` where signals are the caller's business, as in a notebook."""

    finish: Callable[[], None]
    seconds = 0.0

    def used(self) -> str:
        return ""

    def deferred(self) -> AbstractContextManager[None]:
        return nullcontext()


def _pass(number: int, frame: object) -> None:
    """The handler of a signal that a thread deals with."""


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal is closed
        print(line, flush=True)


def _exit(code: int) -> NoReturn:
    """Ends this process and those it started, whatever its threads are doing."""
    for child in multiprocessing.active_children():
        child.kill()
    with suppress(OSError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a progress bar has hidden the cursor
        sys.stdout.flush()
    os._exit(code)
