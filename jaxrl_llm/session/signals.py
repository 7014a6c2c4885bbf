"""Handles SIGTERM, Ctrl-C and a closed terminal: a checkpoint and a clean end within the 30 s of a preemption."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from threading import Event, Lock, Thread, Timer, current_thread, main_thread
from types import TracebackType
from typing import Any, NoReturn, TypeAlias

from jaxrl_llm.errors import UserError, report
from jaxrl_llm.machine import distributed

SECONDS = 30.0  # from the signal to the end of the machine when a cloud preempts it
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the closed terminal"}
ERRORS = {"GeneratorExit": "the end of the caller's loop", "KeyboardInterrupt": "Ctrl-C"}


class SignalReader:
    """Reads the signals of NAMES in a thread: Python runs no signal handler while the main thread is in a long call."""

    def __init__(self, came: Callable[[int], object]):
        """came(number): called in the thread, for each signal."""
        # Python writes a signal to the wakeup file descriptor only if it has a Python handler.
        self._before = _handled(NAMES, lambda *_: None)
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)  # `set_wakeup_fd` requires it
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        Thread(target=self._read, args=(read, came), daemon=True).start()

    def close(self) -> None:
        """Restores the handlers before it. Does nothing outside of the main thread, which alone can."""
        if current_thread() is main_thread():
            signal.set_wakeup_fd(self._wakeup)
            _restore(self._before)
            os.close(self._write)

    def _read(self, read: int, came: Callable[[int], object]) -> None:
        """Runs in a thread. Each byte of the pipe is the number of a received signal."""
        while number := os.read(read, 1):
            if number[0] in self._before:
                came(number[0])
        os.close(read)


class Stop:
    """Context in which something may end a run before its last step."""

    def __init__(self) -> None:
        self.finish: Callable[[], None] = lambda: None  # saves and ends the run
        self.name = ""  # name of the signal or error that ended the run
        self._began = math.inf  # time of the signal

    def check(self) -> None:
        """Ends the run if a signal has come that ends it here. With several processes, all must call it."""

    @property
    def seconds(self) -> float:
        """Seconds since the signal, or since this process knows of it; 0: there was none."""
        return max(time.monotonic() - self._began, 0.0)

    def used(self) -> str:
        """Text for the last line, with the name of what ended the run and the seconds that the end took."""
        return f"{self.name} ({self.seconds:.1f} s of {SECONDS:.0f} s used)"

    def deferred(self) -> AbstractContextManager[None]:
        """Makes what ends the run wait for the end of this block."""
        return nullcontext()


class StopSignals(Stop):
    """Context in which a first signal ends the run with exit code 0, and a second one at once with 128 + its number.

    The first signal interrupts the run at any point, also in a compilation or a rollout of many minutes. The current
    step is lost. The signal waits only for a block `with stop.deferred():`, in which the run's state changes.
    A thread ends the run: it calls `finish`, closes `opened` and exits. The main thread never continues.
    """

    def __init__(self, opened: ExitStack):
        """opened: closes all resources of the run, in the right order."""
        super().__init__()
        self.finish = self._nothing
        self._opened, self._whole, self._kept = opened, Lock(), False

    def __enter__(self) -> StopSignals:
        # The handlers are restored after all resources that are opened later have closed. The thread that ends the run
        # cannot restore them, and ends the process.
        self._opened.callback(SignalReader(self._came).close)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stops signals from ending the run. Does not return if a signal is already ending it."""
        if not self._kept:
            self._take()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Makes a signal wait for the end of this block. After an exception in it, the run ends with that error."""
        # No `finally`: after an exception the lock stays taken, so no signal saves a half-changed state.
        self._take()
        self._kept = True
        yield
        self._kept = False
        self._whole.release()

    def used(self) -> str:
        """Text for the last line, as `Stop.used`. No hint is printed after this call."""
        self._hint.cancel()
        return super().used()

    def _take(self) -> None:
        if self.name:
            Event().wait()  # forever: the other thread ends the process
        self._whole.acquire()

    def _came(self, number: int) -> None:
        if self.name:
            _exit(128 + number)
        self._began = time.monotonic()
        self.name = NAMES[signal.Signals(number)]
        hint = f"{self.name}: the run saves a checkpoint and ends; a second signal ends it now"
        self._hint = Timer(1.0, _say, [hint])
        self._hint.daemon = True
        self._hint.start()
        Thread(target=self._end, daemon=True).start()

    def _end(self) -> NoReturn:
        """Runs in a thread, at the same time as the main thread's code outside of `deferred`."""
        self._whole.acquire()
        try:
            with self._opened:
                self.finish()
        except BaseException as error:  # in this thread no other code reports it
            _exit(report(error))
        _exit(0)

    def _nothing(self) -> None:
        _say(f"stopped by {self.name} at the start, {self.seconds:.1f} s after the signal: there was nothing to save")


class AgreedSignals(Stop):
    """Context for several processes: a signal in one of them ends the run in all, at the same place of a step.

    One process alone cannot save, and programs that wait for another process cannot be interrupted. So the run ends at
    the next `check`, of which a step has two. A second signal ends this process at once, also while it waits for
    another one.
    """

    def __init__(self, command: bool) -> None:
        """command: the run ends the process, with exit code 0. Otherwise it raises KeyboardInterrupt."""
        super().__init__()
        self._error: BaseException = SystemExit(0) if command else KeyboardInterrupt()

    def __enter__(self) -> AgreedSignals:
        self._received = SignalReader(self._came)
        return self

    def __exit__(self, *error: object) -> None:
        self._received.close()

    def _came(self, number: int) -> None:
        if self.name:
            _exit(128 + number)
        self.name, self._began = NAMES[signal.Signals(number)], time.monotonic()
        _say(f"{self.name}: the run saves a checkpoint and ends at the next check; a second signal ends it now")

    def check(self) -> None:
        """Ends the run if a process has received a signal. All processes must call it."""
        names = distributed.exchange(self.name, "signals")
        if any(names):
            self.name = next(f"{name} in process {i}" for i, name in enumerate(names) if name)
            self._began = min(self._began, time.monotonic())
            self.finish()
            raise self._error


class SaveOnInterrupt(Stop):
    """Context for a run in the caller's process, as a notebook or a sweep: it saves when it is left early, and raises.

    The run is left early by Ctrl-C, by an exception of the caller, or when the caller closes its generator. With
    `signals`, SIGTERM and a closed terminal raise KeyboardInterrupt too. An interrupt waits for the end of a block
    `with stop.deferred():`, in which the run's state changes; it does not interrupt a long compilation.
    """

    def __init__(self, signals: bool):
        super().__init__()
        self._numbers = tuple(NAMES) if signals else ()
        self._whole, self._pending = True, 0

    def __enter__(self) -> SaveOnInterrupt:
        self._before = _handled(self._numbers, self._raise)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Saves, if the run is left early and its state is whole. A UserError says itself what the last state is."""
        try:
            if error and not isinstance(error, UserError) and self._whole and distributed.count() == 1:
                self.name = self.name or ERRORS.get(type(error).__name__, type(error).__name__)
                self.finish()
        finally:
            _restore(self._before)

    def used(self) -> str:
        """Text for the last line, which names what ended the run."""
        return self.name

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Makes an interrupt wait for the end of this block. After an exception in it, nothing is saved."""
        # Each block sets the handlers again, because a notebook resets the handler of Ctrl-C for each cell.
        before = _handled((signal.SIGINT, *self._numbers), self._remember)
        self._whole = False
        try:
            yield
            self._whole = True
        finally:
            _restore(before)
        if self._pending:
            number, self._pending = self._pending, 0
            self._raise(number, None)

    def _remember(self, number: int, frame: object) -> None:
        self._pending = number

    def _raise(self, number: int, frame: object) -> NoReturn:
        self.name = NAMES[signal.Signals(number)]
        raise KeyboardInterrupt(self.name)


Handler: TypeAlias = Callable[[int, Any], Any]


def stop_signals(opened: ExitStack, signals: bool, command: bool) -> StopSignals | AgreedSignals | SaveOnInterrupt:
    """Returns the handling of signals. opened: closes the run's resources.

    signals: signals that end a process save and end the run too. command: they end this process as well, with exit
    code 0, because it is for this run alone.
    """
    if distributed.count() > 1 and (signals or command):
        return AgreedSignals(command)
    return StopSignals(opened) if command else SaveOnInterrupt(signals)


def _handled(numbers: Iterable[int], handler: Handler) -> dict[int, Any]:
    """Sets the handler of signals and returns those before. Ignored signals stay ignored."""
    if current_thread() is not main_thread():  # Python handles signals only there
        return {}
    known = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in known}


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal is closed
        print(line, flush=True)


def _exit(code: int) -> NoReturn:
    """Ends this process and its multiprocessing children at once, without waiting for threads."""
    for child in multiprocessing.active_children():
        child.kill()
    with suppress(OSError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # shows the cursor, which a progress bar has hidden
        sys.stdout.flush()
    os._exit(code)
