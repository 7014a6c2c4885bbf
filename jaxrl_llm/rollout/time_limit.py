"""A time limit for the user's code that runs in this process."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import TypeVar

T = TypeVar("T")
# Late calls that may run at a time. Each of them keeps a thread with its stack and local variables.
MAX_LATE_CALLS = 256


class CallTimeout(BaseException):
    """Raised in the thread of a late call to end the call. `except Exception` in the user's code does not catch it."""


class TimeLimit:
    """Calls functions, each for a limited time. Threads may share it."""

    def __init__(self, seconds: float):
        """seconds: limit of a call, 0 = unlimited."""
        self._seconds, self._late_threads, self._lock = seconds, list[Thread](), Lock()

    def call(self, function: Callable[[], T]) -> T:
        """Returns function(), which must not raise.

        Raises: TimeoutError, after the limit, or if too many calls are late.
        A thread cannot be killed. A late call ends at the next Python instruction that it runs. A call that waits
        outside of Python ends only when that wait ends.
        """
        if not self._seconds:
            return function()
        if self.count_late_calls() >= MAX_LATE_CALLS:
            warnings.warn(
                f"{MAX_LATE_CALLS} steps of environments still run after their time limit: no other step starts until "
                "one of them returns; set time limits inside the environment, for what it waits for",
                stacklevel=2,
            )
            raise TimeoutError
        results, has_ended, ends = list[T](), list[bool](), Lock()

        def run() -> None:
            with suppress(BaseException):
                # All errors are suppressed, because they end only this thread: `CallTimeout`, or KeyboardInterrupt.
                try:
                    results.append(function())
                finally:
                    with ends:
                        # No error may be raised in this thread any more, because another thread
                        # may get its identity.
                        has_ended.append(True)

        # Each call has its own thread, because a call that never returns must not occupy a worker.
        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._seconds)
        if results:
            return results[0]
        with ends:
            if not has_ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(CallTimeout)
                )
        with self._lock:
            self._late_threads.append(thread)
        raise TimeoutError

    def count_late_calls(self) -> int:
        """Returns the number of late calls that still run."""
        with self._lock:
            self._late_threads = [thread for thread in self._late_threads if thread.is_alive()]
            return len(self._late_threads)
