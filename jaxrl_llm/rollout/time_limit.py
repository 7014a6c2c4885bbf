"""A time limit for code of the user that runs in this process."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import TypeVar

T = TypeVar("T")
# Calls that have not ended after their time: each keeps a thread, with its stack and its locals.
MOST_LATE = 256


class CallTimeout(BaseException):
    """Ends a call that is late. `except Exception` in the user's code does not catch it."""


class TimeLimit:
    """Calls functions, each for a limited time. Threads may share it."""

    def __init__(self, seconds: float):
        """seconds: limit of a call, 0 = unlimited."""
        self._seconds, self._late, self._lock = seconds, list[Thread](), Lock()

    def call(self, function: Callable[[], T]) -> T:
        """Returns function(), which must raise nothing. Raises: TimeoutError, after the limit.

        A thread cannot be killed. A late call ends with the next Python instruction that it runs; one that waits for
        something outside of Python, without a time limit of its own, ends with it. If too many wait, none is started.
        """
        if not self._seconds:
            return function()
        if self.late() >= MOST_LATE:
            warnings.warn(
                f"{MOST_LATE} steps of environments have not returned: no other step begins until one does; give what "
                "they wait for a time limit of its own",
                stacklevel=2,
            )
            raise TimeoutError
        results, ended, ends = list[T](), list[bool](), Lock()

        def run() -> None:
            with suppress(BaseException):
                # All errors are suppressed here: `CallTimeout`, and an error that ends only this thread, such as
                # KeyboardInterrupt.
                try:
                    results.append(function())
                finally:
                    with ends:
                        # Nothing may be raised in this thread from here on: another thread
                        # may get its identity.
                        ended.append(True)

        # Each call has its own thread, because a call that never returns must not occupy a worker.
        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._seconds)
        if results:
            return results[0]
        with ends:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(CallTimeout)
                )
        with self._lock:
            self._late.append(thread)
        raise TimeoutError

    def late(self) -> int:
        """Returns the number of calls that are late and have not ended."""
        with self._lock:
            self._late = [thread for thread in self._late if thread.is_alive()]
            return len(self._late)
