"""Handles SIGTERM, Ctrl-C and a closed terminal: the run saves a checkpoint and ends within a preemption's 30 s."""

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

PREEMPTION_SECONDS = 30.0  # time from the signal to the shutdown of a machine that a cloud preempts
# Signals that end a run early, with the names that its last line shows.
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the closed terminal"}
# Exceptions that leave a run in the caller's process early, with the names that its last line shows.
ERRORS = {"GeneratorExit": "the end of the caller's loop", "KeyboardInterrupt": "Ctrl-C"}


class SignalReader:
    """Reads the signals of NAMES in a thread, because Python runs no handler during a long call in the main thread."""

    def __init__(self, on_signal: Callable[[int], object]):
        """on_signal(number): callback for each signal, which the thread calls."""
        # Python writes a signal to the wakeup file descriptor only if it has a Python handler.
        self._previous_handlers = _set_handlers(NAMES, lambda *_: None)
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)  # `set_wakeup_fd` requires it
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        Thread(target=self._read, args=(read_end, on_signal), daemon=True).start()

    def close(self) -> None:
        """Restores the previous handlers.

        Does nothing in other threads, because only the main thread can set handlers.
        """
        if current_thread() is main_thread():
            signal.set_wakeup_fd(self._previous_wakeup)
            _restore(self._previous_handlers)
            os.close(self._write_end)

    def _read(self, read_end: int, on_signal: Callable[[int], object]) -> None:
        """Runs in a thread. Each byte of the pipe is the number of a received signal."""
        while number := os.read(read_end, 1):
            if number[0] in self._previous_handlers:
                on_signal(number[0])
        os.close(read_end)


class Stop:
    """Base of the contexts that end a run early, after a signal or an error."""

    def __init__(self) -> None:
        self.finish: Callable[[], None] = lambda: None  # saves and ends the run
        self.name = ""  # name of the signal or error that ended the run
        self._signal_time = math.inf  # time of the signal

    def check(self) -> None:
        """Ends the run if a signal is waiting for this call. With several processes, all processes must call it."""

    @property
    def seconds(self) -> float:
        """Seconds since this process learned of the signal; 0 without a signal."""
        return max(time.monotonic() - self._signal_time, 0.0)

    def ending_text(self) -> str:
        """Text for the last line: the signal or error that ended the run, and the seconds that the end took."""
        return f"{self.name} ({self.seconds:.1f} s of {PREEMPTION_SECONDS:.0f} s used)"

    def deferred(self) -> AbstractContextManager[None]:
        """Makes signals wait for the end of this block."""
        return nullcontext()


class StopSignals(Stop):
    """Context in which a first signal ends the run with exit code 0, and a second signal kills the process.

    The first signal interrupts the run at any point, also in a compilation or a rollout of many minutes, and discards
    the current step. It waits only for a block `with stop.deferred():`, in which the run's state changes. A thread
    then calls `finish`, closes `resources` and exits the process; the main thread never continues. A second signal
    exits immediately, with exit code 128 + its number.
    """

    def __init__(self, resources: ExitStack):
        """resources: exit stack that closes all resources of the run, in the right order."""
        super().__init__()
        self.finish = self._report_nothing_to_save
        self._resources, self._state_lock, self._is_deferring = resources, Lock(), False

    def __enter__(self) -> StopSignals:
        # The signal handlers are restored after all resources that are opened later have closed. If a signal ends the
        # run, they are not restored, because only the main thread could do so. The process then exits.
        self._resources.callback(SignalReader(self._on_signal).close)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops signals from ending the run. Does not return if a signal is already ending it."""
        if not self._is_deferring:
            self._acquire_state_lock()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Makes a signal wait for the end of this block.

        After an exception in the block, the run ends with that error.
        """
        # The lock is not released in a `finally`, because after an exception no signal may save a half-changed state.
        self._acquire_state_lock()
        self._is_deferring = True
        yield
        self._is_deferring = False
        self._state_lock.release()

    def ending_text(self) -> str:
        """Returns text for the last line with the signal's name, and cancels the hint that `_on_signal` has planned."""
        self._hint.cancel()
        return super().ending_text()

    def _acquire_state_lock(self) -> None:
        """Waits until no other thread may change or save the run's state. Never returns if a signal ends the run."""
        if self.name:
            Event().wait()  # waits forever, because the other thread ends the process
        self._state_lock.acquire()

    def _on_signal(self, number: int) -> None:
        """Starts to end the run at the first signal. A second signal exits at once. `SignalReader` calls it."""
        if self.name:
            _exit(128 + number)
        self._signal_time = time.monotonic()
        self.name = NAMES[signal.Signals(number)]
        hint = f"{self.name}: the run saves a checkpoint and ends; a second signal ends it now"
        # The hint appears only if the end of the run takes longer than a second.
        self._hint = Timer(1.0, _print_line, [hint])
        self._hint.daemon = True
        self._hint.start()
        Thread(target=self._end, daemon=True).start()

    def _end(self) -> NoReturn:
        """Ends the run in a thread, while the main thread may still run code outside of `deferred`."""
        self._state_lock.acquire()
        try:
            with self._resources:
                self.finish()
        except BaseException as error:  # reported here, because no other code of this thread would report it
            _exit(report(error))
        _exit(0)

    def _report_nothing_to_save(self) -> None:
        _print_line(
            f"stopped by {self.name} at the start, {self.seconds:.1f} s after the signal: there was nothing to save"
        )


class AgreedSignals(Stop):
    """Context for several processes, in which a signal in one process ends the run in all of them.

    One process alone cannot save a checkpoint, and a program that waits for another process cannot be interrupted. So
    all processes end at their next call of `check`, which each step makes twice. A second signal ends its process
    immediately.
    """

    def __init__(self, command: bool) -> None:
        """command: True if the signal ends the process with exit code 0; False if it raises KeyboardInterrupt."""
        super().__init__()
        self._error: BaseException = SystemExit(0) if command else KeyboardInterrupt()

    def __enter__(self) -> AgreedSignals:
        self._received = SignalReader(self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        self._received.close()

    def _on_signal(self, number: int) -> None:
        """Notes the first signal for the next `check`. A second signal exits at once."""
        if self.name:
            _exit(128 + number)
        self.name, self._signal_time = NAMES[signal.Signals(number)], time.monotonic()
        _print_line(f"{self.name}: the run saves a checkpoint and ends at the next check; a second signal ends it now")

    def check(self) -> None:
        """Ends the run if a process has received a signal. All processes must call it."""
        names = distributed.exchange(self.name, "signals")
        if any(names):
            self.name = next(f"{name} in process {i}" for i, name in enumerate(names) if name)
            self._signal_time = min(self._signal_time, time.monotonic())
            self.finish()
            raise self._error


class SaveOnInterrupt(Stop):
    """Context for a run in the caller's process, such as a notebook or a sweep: saves the run when it is left early.

    A run is left early by Ctrl-C, by an exception of the caller, or when the caller closes its generator; the context
    then saves a checkpoint and lets the exception pass. If `signals` is True, SIGTERM and a closed terminal raise
    KeyboardInterrupt too. An interrupt waits for the end of a block `with stop.deferred():`, in which the run's state
    changes, and for the end of a compilation.
    """

    def __init__(self, signals: bool):
        super().__init__()
        self._numbers = tuple(NAMES) if signals else ()
        self._is_state_complete = True
        self._pending = 0  # number of a signal that came in a block of `deferred`, 0 = none

    def __enter__(self) -> SaveOnInterrupt:
        self._previous_handlers = _set_handlers(self._numbers, self._raise)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Saves a run that is left early with a complete state. After a UserError nothing is saved."""
        try:
            if error and not isinstance(error, UserError) and self._is_state_complete and distributed.count() == 1:
                self.name = self.name or ERRORS.get(type(error).__name__, type(error).__name__)
                self.finish()
        finally:
            _restore(self._previous_handlers)

    def ending_text(self) -> str:
        """Returns text for the last line: the signal or error that ended the run."""
        return self.name

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Makes an interrupt wait for the end of this block. After an exception in the block, nothing is saved."""
        # Each block sets the handlers again, because a notebook resets the handler of Ctrl-C for each cell.
        previous_handlers = _set_handlers((signal.SIGINT, *self._numbers), self._remember)
        self._is_state_complete = False
        try:
            yield
            self._is_state_complete = True
        finally:
            _restore(previous_handlers)
        if self._pending:
            number, self._pending = self._pending, 0
            self._raise(number, None)

    def _remember(self, number: int, frame: object) -> None:
        """Handles a signal in a block of `deferred`, at whose end the signal interrupts the run."""
        self._pending = number

    def _raise(self, number: int, frame: object) -> NoReturn:
        """Handles a signal outside of the blocks of `deferred`: interrupts the run."""
        self.name = NAMES[signal.Signals(number)]
        raise KeyboardInterrupt(self.name)


Handler: TypeAlias = Callable[[int, Any], Any]  # called with the number of the signal and the current stack frame


def stop_signals(resources: ExitStack, signals: bool, command: bool) -> StopSignals | AgreedSignals | SaveOnInterrupt:
    """Returns the context that handles signals. resources: exit stack that closes the run's resources.

    signals, command: arguments of `build.build`.
    """
    if distributed.count() > 1 and (signals or command):
        return AgreedSignals(command)
    return StopSignals(resources) if command else SaveOnInterrupt(signals)


def _set_handlers(numbers: Iterable[int], handler: Handler) -> dict[int, Any]:
    """Sets the handler of these signals and returns the previous handlers. Ignored signals stay ignored."""
    if current_thread() is not main_thread():  # Python sets signal handlers only in the main thread
        return {}
    changeable = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in changeable}


def _restore(handlers: dict[int, Any]) -> None:
    """Sets the handlers that `_set_handlers` returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _print_line(line: str) -> None:
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
