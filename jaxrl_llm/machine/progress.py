"""Signs of life of work that takes seconds: `with task("loading the model", total=290) as loading: loading.advance()`.

On a terminal a bar, which disappears when the work ends. Elsewhere lines on stdout, as all lines of a run: the first
after 5 seconds, and then more and more rarely. Work that is shorter shows nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxrl_llm.errors import printable
from jaxrl_llm.machine.hang import WATCHDOG

FIRST_BAR, FIRST_LINE = 1.0, 5.0  # seconds of a task until it is shown
BETWEEN = (5.0, 15.0, 60.0)  # seconds from each line of a task to its next one; the last is repeated
TICK = 0.25  # seconds


@dataclass(eq=False)
class Task:
    """Work in progress. `finished` of `total` parts are done; detail: text that says what the work does now."""

    name: str
    total: int | None
    began: float
    finished: int = 0
    detail: str = ""
    lines: int = 0  # that were written about it
    due: float = 0.0  # when the next line is
    row: TaskID | None = None  # of the bars

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Marks more parts as finished."""
        self.finished, self.detail = self.finished + count, detail
        WATCHDOG.moved()

    def text(self) -> str:
        """Returns its name, and how far it is."""
        parts = [f"{self.finished:,} of {self.total:,}"] if self.total else []
        parts += [self.detail] if self.detail else []
        return printable(f"{self.name}: {', '.join(parts)}" if parts else self.name)


class UnhiddenConsole(Console):
    """A console that leaves the cursor visible: a process that a signal kills could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def make_bars(console: Console) -> Progress:
    """Returns bars for a terminal, each with the name of a task, its progress, and its elapsed time."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}")
    last = TextColumn("{task.fields[detail]}", markup=False)
    return Progress(*columns, TimeElapsedColumn(), last, console=console, transient=True)


class Display:
    """Shows the tasks of this process. Any thread may begin one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.RLock()
        self._tasks: list[Task] = []  # the outermost first
        self._work = threading.Event()  # there is a task
        self._thread: threading.Thread | None = None
        self._bars: Progress | None = None
        self._lent = False  # the bars are those of the log, which closes them

    @contextmanager
    def task(self, name: str, total: int | None = None) -> Iterator[Task]:
        """Shows work while the context is open, in the first process of a run alone."""
        # An import would import JAX. If JAX is not imported yet, this is the only process.
        distributed = sys.modules.get("jaxrl_llm.machine.distributed")
        WATCHDOG.moved()
        task = Task(name, total, self._clock())
        task.due = task.began + FIRST_LINE
        # It still tells the watchdog: each process watches itself.
        if distributed and not distributed.first():
            yield task
            WATCHDOG.moved()
            return
        with self._lock:
            self._tasks.append(task)
            self._work.set()
            if not self._thread:
                self._thread = threading.Thread(target=self._tick_forever, name="progress", daemon=True)
                self._thread.start()
        try:
            yield task
        finally:
            WATCHDOG.moved()
            with self._lock:
                self._tasks.remove(task)
                self._remove_row(task)
                if not self._tasks:
                    self._work.clear()

    def lend(self, bars: Progress | None) -> None:
        """Lets tasks show their bars below those of the log, which are on the same console; None: not any more."""
        with self._lock:
            for task in self._tasks:
                self._remove_row(task)
            self._bars, self._lent = bars, bars is not None

    def tick(self) -> None:
        """Shows the tasks that go on long enough."""
        with self._lock:
            if self._lent or sys.stdout.isatty():
                self._draw()
            else:
                self._write_line()

    def _tick_forever(self) -> None:
        while self._work.wait():
            time.sleep(TICK)
            # Nobody reads the output, or it is closed: no reason to end the thread, or the run.
            with suppress(OSError, ValueError):
                self.tick()

    def _draw(self) -> None:
        shown = [task for task in self._tasks if self._clock() - task.began >= FIRST_BAR]
        if not shown:
            return
        if not self._bars:
            self._bars = make_bars(UnhiddenConsole(highlight=False, force_jupyter=False, force_terminal=True))
            self._bars.start()
        for task in shown:
            if task.row is None:
                task.row = self._bars.add_task(printable(task.name), total=task.total, count="", detail="")
            count = f"{task.finished:,}/{task.total:,}" if task.total else ""
            self._bars.update(task.row, completed=task.finished, count=count, detail=printable(task.detail))
        self._bars.refresh()

    def _remove_row(self, task: Task) -> None:
        if self._bars and task.row is not None:
            self._bars.remove_task(task.row)
        task.row = None
        if self._bars and not self._lent and all(other.row is None for other in self._tasks):
            # The bars stop here and not when the process ends, because rich would draw over the lines that are printed
            # next.
            self._bars.stop()
            self._bars = None

    def _write_line(self) -> None:
        """Writes a line about the innermost task if it is due: the outer ones wait for it."""
        now = self._clock()
        if not self._tasks or now < self._tasks[-1].due:
            return
        task = self._tasks[-1]
        task.due = now + BETWEEN[min(task.lines, len(BETWEEN) - 1)]
        task.lines += 1
        # One call writes the line with its end, because another thread prints lines too.
        sys.stdout.write(f"{task.text()} … {now - task.began:.0f} s\n")
        sys.stdout.flush()


DISPLAY = Display()
task = DISPLAY.task
