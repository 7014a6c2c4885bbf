"""Ends a run that hangs, so that it can be started again: another host, a disk or a collective may never answer."""

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
LAST, TIMES = 20, 10  # steps that the median is of, and how many medians a run may stand still
TICK = 1.0  # seconds
LEAVING = 30.0  # seconds in which the output and the other processes may take the last words


class Watchdog:
    """Watches whether a run moves: a step, or work of it that calls `moved` again and again.

    Every piece of work of a run that may take minutes calls it: each phase of a step, each compiled program, each part
    of a rollout, an evaluation, a self-test, a save. Any thread may call it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._moved = clock, Event()
        self._steps: deque[float] = deque(maxlen=LAST)  # seconds from each step to the next
        self._stepped: float | None = None  # time of the last step
        self._still = 0.0  # seconds
        self._over = Event()

    def moved(self) -> None:
        """Marks that work goes on."""
        self._moved.set()

    def stepped(self) -> None:
        """Marks the end of a step."""
        now = self._clock()
        if self._stepped is not None:
            # A time is measured between two ends of steps, so that the first step, which compiles, is not counted.
            self._steps.append(now - self._stepped)
        self._stepped = now
        self.moved()

    def tick(self, minutes: float, seconds: float = TICK) -> str:
        """Counts more seconds, and returns what to say of a run that stands still too long; "" for one that moves.

        minutes: the shortest time; ten medians of the last steps may be longer. It counts its own ticks and not the
        clock: a process that was stopped for hours, or sat in a virtual machine that was, has not hung.
        """
        self._still += seconds
        if self._moved.is_set():
            self._moved.clear()
            self._still = 0.0
        median = statistics.median(self._steps) if self._steps else 0.0
        if self._still < max(60 * minutes, TIMES * median):
            return ""
        return (
            f"nothing has moved for {self._still / 60:.3g} minutes, and a step takes {median / 60:.2g}: the stacks "
            f"above show where this process waits; exit code {CODE}: the same command goes on from the last checkpoint "
            "(config.health.hang_minutes sets the time)"
        )

    def start(self, minutes: float, end: Callable[[int, str], NoReturn]) -> None:
        """Starts a thread that watches. end(code, line) ends the process.

        minutes: least time without progress after which a run counts as hanging, 0 = no watch.
        """
        # A new event: the thread of an earlier run in this process may still sleep, and has its own.
        self._still, self._over = 0.0, Event()
        self._steps.clear()
        self._stepped = None
        if minutes:
            Thread(target=self._watch, args=(minutes, end, self._over), name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stops to watch."""
        self._over.set()

    def _watch(self, minutes: float, end: Callable[[int, str], NoReturn], over: Event) -> None:
        while not over.wait(TICK):
            if line := self.tick(minutes):
                tell_stacks()
                end(CODE, line)


def tell_stacks() -> None:
    """Prints the stacks of all threads to stderr, and makes sure that the process ends soon, whatever hangs."""
    # First of all: the output, or the store of the processes, may be what hangs.
    late = Timer(LEAVING, os._exit, [CODE])
    late.daemon = True
    late.start()
    sys.stdout.flush()
    faulthandler.dump_traceback(sys.stderr)


WATCHDOG = Watchdog()
