"""Signs of life of long work: a bar on a terminal, lines elsewhere, nothing for short work."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

import jaxrl_llm
from jaxrl_llm.data import encoding
from jaxrl_llm.machine import distributed, progress
from jaxrl_llm.machine.compilation import COMPILER, Program
from jaxrl_llm.machine.meshes import make_mesh
from jaxrl_llm.models import hf, hf_export

MODEL = Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic"


class Clock:
    """A clock that a test moves."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def display(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> progress.Display:
    """A display that only shows what `tick` is told to."""
    monkeypatch.setattr(progress, "LINE_DELAY", 5.0)  # conftest.py has changed it
    monkeypatch.setattr(progress.Display, "_tick_forever", lambda self: None)
    return progress.Display(clock)


def lines(display: progress.Display, clock: Clock, seconds: range, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns the lines that appear while the clock goes through `seconds`."""
    for second in seconds:
        clock.seconds = second
        display.tick()
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_a_log_gets_a_line_after_five_seconds_and_then_more_and_more_rarely(display, clock, capsys):
    with display.task("loading the model", 290) as task:
        assert lines(display, clock, range(5), capsys) == []
        task.advance(120)
        assert lines(display, clock, range(5, 200), capsys) == [
            f"loading the model: 120 of 290 … {seconds} s" for seconds in (5, 10, 25, 85, 145)
        ]
    assert lines(display, clock, range(200, 300), capsys) == []


def test_only_the_innermost_work_writes_lines(display, clock, capsys):
    with display.task("self-test", 11) as outer:
        outer.advance(2, detail="S3")
        with display.task("compiling scoring"):
            assert lines(display, clock, range(12), capsys) == ["compiling scoring … 5 s", "compiling scoring … 10 s"]
        assert lines(display, clock, range(12, 14), capsys) == ["self-test: 2 of 11, S3 … 12 s"]


def test_a_terminal_gets_a_bar_that_is_gone_afterwards_and_other_lines_stay(display, clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with display.task("loading the \x1b[2Jmodel", 4) as task:
        display.tick()
        assert terminal.getvalue() == ""  # it may be short
        clock.seconds = 2
        task.advance(3, detail="[red]x")
        display.tick()
        print("a line of somebody else")
    text = terminal.getvalue()
    assert "3/4" in text
    assert "loading the \\x1b[2Jmodel" in text
    assert "[red]x" in text
    assert "\x1b[?25l" not in text  # the cursor stays: a process that is killed could not show it again
    erased = text.rindex("\x1b[2K")  # the last thing that happens to the bar
    assert "3/4" not in text[erased:]
    assert "a line of somebody else\n" in text
    assert (sys.stdout, sys.stderr) == (terminal, terminal)


def test_the_bars_of_tasks_stand_below_the_one_of_the_log(display, clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    of_log = progress.make_bars(progress.UnhiddenConsole(force_terminal=True))
    of_log.add_task("steps", total=9, completed=2, count="2/9", detail="")
    display.use_log_bars(of_log)
    with display.task("evaluating problems", 1000):
        clock.seconds = 2
        display.tick()
        assert [task.description for task in of_log.tasks] == ["steps", "evaluating problems"]
    assert [task.description for task in of_log.tasks] == ["steps"]
    display.use_log_bars(None)


def test_other_processes_of_a_run_are_silent(display, clock, capsys, monkeypatch):
    monkeypatch.setattr(distributed, "first", lambda: False)
    with display.task("loading the model"):
        assert lines(display, clock, range(100), capsys) == []


def test_an_error_ends_the_work_and_its_bar(display, clock, capsys):
    with pytest.raises(ValueError, match="bad"), display.task("loading the model"):
        raise ValueError("bad")
    assert lines(display, clock, range(100), capsys) == []


def test_a_thread_shows_work_while_this_one_is_busy(monkeypatch):
    class Waited(io.StringIO):
        shown = threading.Event()

        def flush(self) -> None:
            self.shown.set()

    log = Waited()
    monkeypatch.setattr(sys, "stdout", log)
    monkeypatch.setattr(progress, "LINE_DELAY", 0.0)
    with progress.Display().task("waiting"):
        assert log.shown.wait(30)
    assert log.getvalue() == "waiting … 0 s\n"


def test_loading_tokenizing_compiling_and_exporting_are_shown(tmp_path, monkeypatch):
    seen: list[progress.Task] = []
    begin = progress.task

    @contextmanager
    def task(name: str, total: int | None = None) -> Iterator[progress.Task]:
        with begin(name, total) as shown:
            seen.append(shown)
            yield shown

    monkeypatch.setattr(progress, "task", task)
    mesh = make_mesh(data=1, fsdp=1, tensor=1)
    model = hf.load_model(MODEL, mesh)
    hf_export.save(tmp_path / "hf", hf.load_params(MODEL, model, mesh), MODEL)
    encoding.encode(["1+1"] * 5, hf.load_tokenizer(MODEL), "mine.jsonl")
    program = Program("update", "an update", lambda: jax.jit(lambda x: x + 1).trace(1.0), "", ())
    program.compile()
    told = {task.name: (task.finished, task.total) for task in seen}
    assert told.pop("starting the devices") == (0, None)
    assert told.pop("token ids of mine.jsonl") == (5, 5)
    assert told.pop("compiling an update") == (0, None)
    loaded, exported = told.pop("loading the tensors of arithmetic"), told.pop("exporting tensors")
    assert loaded[0] == loaded[1] > 5
    assert exported[0] == exported[1] > loaded[1]
    assert not told
    behind = threading.Thread(target=program.compile, name=COMPILER)  # while steps go on
    behind.start()
    behind.join()
    assert [task.name for task in seen].count("compiling an update") == 1
