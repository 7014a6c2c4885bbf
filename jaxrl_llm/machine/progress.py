"""Shows the progress of work that takes seconds: `with task("loading the model", total=290) as loading:
loading.advance()`.

A terminal shows a bar, which disappears when the work ends. Other outputs get lines on stdout: the first after five
seconds, the next ones at growing intervals. Shorter work shows nothing.
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

BAR_DELAY, LINE_DELAY = 1.0, 5.0  # seconds of a task until it is shown
LINE_INTERVALS = (5.0, 15.0, 60.0)  # seconds between the lines of a task; the last interval is repeated
TICK = 0.25  # seconds between two updates of the display


@dataclass(eq=False)
class Task:
    """Work in progress: `finished` of `total` parts are done. detail: text on what the work does now."""

    name: str
    total: int | None
    start_time: float
    finished: int = 0
    detail: str = ""
    line_count: int = 0  # number of lines written about this task
    next_line_time: float = 0.0
    bar_id: TaskID | None = None  # id of its bar on a terminal, None while it has no bar

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Marks more parts as finished."""
        self.finished, self.detail = self.finished + count, detail
        WATCHDOG.report_progress()

    def text(self) -> str:
        """Returns the task's name and its progress."""
        parts = [f"{self.finished:,} of {self.total:,}"] if self.total else []
        parts += [self.detail] if self.detail else []
        return printable(f"{self.name}: {', '.join(parts)}" if parts else self.name)


class UnhiddenConsole(Console):
    """A console that never hides the cursor, because a process that a signal kills could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def make_bars(console: Console) -> Progress:
    """Returns bars for a terminal, each with the name of a task, its progress, and its elapsed time."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}")
    detail = TextColumn("{task.fields[detail]}", markup=False)
    return Progress(*columns, TimeElapsedColumn(), detail, console=console, transient=True)


class Display:
    """Shows the running tasks of this process. Any thread may start a task."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.RLock()
        self._tasks: list[Task] = []  # running tasks, the outermost first
        self._has_tasks = threading.Event()  # set while a task runs
        self._thread: threading.Thread | None = None
        self._bars: Progress | None = None
        self._uses_log_bars = False  # True if the bars belong to the log, which closes them

    @contextmanager
    def task(self, name: str, total: int | None = None) -> Iterator[Task]:
        """Shows a task while the context is open. Only the first process of a run shows its tasks."""
        # The module is looked up, because importing it would import JAX. Without JAX this is the only process.
        distributed = sys.modules.get("jaxrl_llm.machine.distributed")
        WATCHDOG.report_progress()
        task = Task(name, total, self._clock())
        task.next_line_time = task.start_time + LINE_DELAY
        # Other processes show nothing, but report progress to their own watchdog.
        if distributed and not distributed.first():
            yield task
            WATCHDOG.report_progress()
            return
        with self._lock:
            self._tasks.append(task)
            self._has_tasks.set()
            if not self._thread:
                self._thread = threading.Thread(target=self._tick_forever, name="progress", daemon=True)
                self._thread.start()
        try:
            yield task
        finally:
            WATCHDOG.report_progress()
            with self._lock:
                self._tasks.remove(task)
                self._remove_bar(task)
                if not self._tasks:
                    self._has_tasks.clear()

    def use_log_bars(self, bars: Progress | None) -> None:
        """Shows the tasks' bars below those of the log, on the same console.

        bars: bars of the log, None to stop this.
        """
        with self._lock:
            for task in self._tasks:
                self._remove_bar(task)
            self._bars, self._uses_log_bars = bars, bars is not None

    def tick(self) -> None:
        """Updates the display of the tasks that have run long enough to be shown."""
        with self._lock:
            if self._uses_log_bars or sys.stdout.isatty():
                self._draw()
            else:
                self._write_line()

    def _tick_forever(self) -> None:
        """Updates the display every TICK seconds while a task runs, in the display's own thread."""
        while self._has_tasks.wait():
            time.sleep(TICK)
            # The output may be closed, which is no reason to end the thread or the run.
            with suppress(OSError, ValueError):
                self.tick()

    def _draw(self) -> None:
        """Shows the bars of the tasks that have lasted for BAR_DELAY seconds."""
        shown_tasks = [task for task in self._tasks if self._clock() - task.start_time >= BAR_DELAY]
        if not shown_tasks:
            return
        if not self._bars:
            self._bars = make_bars(UnhiddenConsole(highlight=False, force_jupyter=False, force_terminal=True))
            self._bars.start()
        for task in shown_tasks:
            if task.bar_id is None:
                task.bar_id = self._bars.add_task(printable(task.name), total=task.total, count="", detail="")
            count = f"{task.finished:,}/{task.total:,}" if task.total else ""
            self._bars.update(task.bar_id, completed=task.finished, count=count, detail=printable(task.detail))
        self._bars.refresh()

    def _remove_bar(self, task: Task) -> None:
        """Removes the bar of a task from the terminal."""
        if self._bars and task.bar_id is not None:
            self._bars.remove_task(task.bar_id)
        task.bar_id = None
        if self._bars and not self._uses_log_bars and all(running_task.bar_id is None for running_task in self._tasks):
            # The bars stop with the last task, because rich would draw over the lines that are printed next.
            self._bars.stop()
            self._bars = None

    def _write_line(self) -> None:
        """Writes a line about the innermost task if the line is due. Outer tasks wait for the innermost task."""
        current_time = self._clock()
        if not self._tasks or current_time < self._tasks[-1].next_line_time:
            return
        task = self._tasks[-1]
        task.next_line_time = current_time + LINE_INTERVALS[min(task.line_count, len(LINE_INTERVALS) - 1)]
        task.line_count += 1
        # One call writes the line with its newline, because other threads print lines too.
        sys.stdout.write(f"{task.text()} … {current_time - task.start_time:.0f} s\n")
        sys.stdout.flush()


# The display is global, because a process has one standard output, which all tasks share.
DISPLAY = Display()
task = DISPLAY.task
