"""Tests of a program that nobody has read. The program runs in a sandbox, and what it says of itself counts nothing.

There are two kinds. A test by input and output is a process of its own: this process, not the program, compares the
output, and the program never sees what is expected. Tests in Python, as assert statements, run in a second sandbox,
which calls the functions of the first one (`host.remote_calls`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.host import remote_calls, sandbox

SHOWN = 10_000  # characters of an output, beyond what is expected


class Verdict(NamedTuple):
    """The result of one test."""

    passed: bool
    reason: str = ""  # why the program failed: "time", or one of `confined.REASONS`; "": its answer is wrong


class Limits(NamedTuple):
    """Limits of a program."""

    seconds: float  # of a test by input and output, or of all tests in Python
    memory: int  # MiB


def by_output(program: str, stdin: str, expected: str, limits: Limits) -> Verdict:
    """Runs the program with this input. It passes if it ends well, and its output is the expected one.

    Spaces at the end of lines, and empty lines at the end, do not count.
    """
    characters = 2 * len(expected) + SHOWN
    found = sandbox.run(program, **limits._asdict(), characters=characters, stdin=stdin)
    if found.error:
        return Verdict(False, found.reason)
    return Verdict(_lines(found.output) == _lines(expected))


def in_python(program: str, tests: Sequence[str], limits: Limits) -> list[Verdict]:
    """Runs tests, each the text of Python statements, on the functions and classes of the program.

    What the program defines are global names in a test. A test passes if it ends without an exception.
    """
    library, each = Path(remote_calls.__file__).read_text(encoding="utf-8"), limits._asdict()
    with tempfile.TemporaryFile() as report, ExitStack() as opened:
        # calls -> to_program and answers <- to_tests are the ends of two pipes.
        calls, to_program, answers, to_tests = ends = [opened.enter_context(end) for _ in "ab" for end in _pipe()]
        theirs = f"{library}serve({calls.fileno()}, {to_tests.fileno()}, {program!r})"
        numbers = answers.fileno(), to_program.fileno(), report.fileno()
        ours = f"{library}run({', '.join(map(str, numbers))}, {list(tests)!r})"
        tested = opened.enter_context(sandbox.started(theirs, **each, descriptors=(calls.fileno(), to_tests.fileno())))
        tester = opened.enter_context(sandbox.started(ours, **each, descriptors=numbers))
        for end in ends:  # only the children keep them: when one ends, the other reads an end of file
            end.close()
        _, late = tester.wait(time.monotonic() + limits.seconds, beside=tested)
        alone = tested.process.poll() is not None  # it ended by itself, and then too early
        _, ended = tested.wait(time.monotonic()) if alone else ("", "")
        report.seek(0)
        lines = [line.split(" ") for line in report.read().decode().splitlines()]
    verdicts = [Verdict(passed == "1", reason or ("" if passed == "1" else ended)) for passed, reason in lines]
    return verdicts + [Verdict(False, late or ended or "error")] * (len(tests) - len(verdicts))


def _pipe() -> tuple[FileIO, FileIO]:
    read, write = os.pipe()
    return FileIO(read, "r"), FileIO(write, "w")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
