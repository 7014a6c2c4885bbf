"""Ends a run that hangs, for example because a host, a disk or a collective never answers, so it can be restarted."""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from threading import Event, Thread, Timer
from typing import NoReturn

from jaxrl_llm.errors import PeerLost

CODE = PeerLost.exit_code
MEDIAN_STEPS = 20  # number of last steps whose median duration counts
MEDIAN_FACTOR = 10  # medians without progress after which a run counts as hanging
TICK = 1.0  # seconds between two checks
EXIT_SECONDS = 30.0  # time in which the last line must reach the output and the other processes


class Watchdog:
    """Detects that a run makes no progress.

    All work that may take minutes calls `report_progress`: each phase of a step, each compiled program, each part of a
    rollout, an evaluation, a self-test, a save. Any thread may call it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._has_progress = clock, Event()
        self._steps: deque[float] = deque(
            maxlen=MEDIAN_STEPS
        )  # seconds from the end of each step to the end of the next
        self._last_step_time: float | None = None
        self._idle_seconds = 0.0  # time since the last progress
        self._is_closed = Event()

    def report_progress(self) -> None:
        """Marks that the run makes progress."""
        if not self._has_progress.is_set():  # to set it again would take a lock, for each completion of a round
            self._has_progress.set()

    def report_step(self) -> None:
        """Marks the end of a step."""
        step_time = self._clock()
        if self._last_step_time is not None:
            # The time between two ends of steps is measured, so that the first step, which compiles, does not count.
            self._steps.append(step_time - self._last_step_time)
        self._last_step_time = step_time
        self.report_progress()

    def tick(self, minutes: float, seconds: float = TICK) -> str:
        """Adds `seconds` to the idle time. Returns an error message if the run hangs, else "".

        minutes: minimum idle time of a hanging run. MEDIAN_FACTOR medians of the last steps must have passed too. Ticks
        are counted instead of reading a clock, because a process that was suspended for hours has not hung.
        """
        self._idle_seconds += seconds
        if self._has_progress.is_set():
            self._has_progress.clear()
            self._idle_seconds = 0.0
        median = statistics.median(self._steps) if self._steps else 0.0
        if self._idle_seconds < max(60 * minutes, MEDIAN_FACTOR * median):
            return ""
        return (
            f"the run has made no progress for {self._idle_seconds / 60:.3g} minutes, while a step takes "
            f"{median / 60:.2g}: the stacks above show where this process waits; the run ends with exit code {CODE}, "
            "and the same command resumes from the last checkpoint (config.health.hang_minutes sets the limit)"
        )

    def start(self, minutes: float, end: Callable[[int, str], NoReturn]) -> None:
        """Starts the thread that watches. end(code, line) prints the line and ends the process.

        minutes: minimum time without progress after which a run counts as hanging; 0 = no watching.
        """
        # A new event is made, because the thread of an earlier run in this process may still wait for its own event.
        self._idle_seconds, self._is_closed = 0.0, Event()
        self._steps.clear()
        self._last_step_time = None
        if minutes:
            Thread(target=self._watch, args=(minutes, end, self._is_closed), name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stops watching."""
        self._is_closed.set()

    def _watch(self, minutes: float, end: Callable[[int, str], NoReturn], is_closed: Event) -> None:
        while not is_closed.wait(TICK):
            if line := self.tick(minutes):
                print_stacks()
                end(CODE, line)


def print_stacks() -> None:
    """Prints the stacks of all threads to stderr, and makes sure that the process exits after EXIT_SECONDS."""
    # The timer starts first, because the output itself may hang.
    exit_timer = Timer(EXIT_SECONDS, os._exit, [CODE])
    exit_timer.daemon = True
    exit_timer.start()
    sys.stdout.flush()
    faulthandler.dump_traceback(sys.stderr)


# The watchdog is global, because a process hangs as a whole: threads and callbacks that know no run report progress
# too, such as those of the compiler and of reward functions.
WATCHDOG = Watchdog()
