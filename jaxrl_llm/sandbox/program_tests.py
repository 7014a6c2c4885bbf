"""Tests of a program that nobody has read. The program runs in a sandbox, and what it says of itself counts nothing.

There are two kinds. A test by input and output is a process of its own: this process, not the program, compares the
output, and the program never sees what is expected. Tests in Python, as assert statements, run in a second sandbox,
which calls the functions of the first one and compares plain data (`sandbox.link`, `judge`, `served_program`).
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.sandbox.link import GONE, LONGEST, UNJUDGED, Link

SHOWN = 10_000  # characters of an output, beyond what is expected
# Seconds in which a program that has left its tests ends.
ENDING = 1.0
# Numbers of an output, and those of them that may differ a little: with a point, or a negative power of ten.
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=e-))(?:e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
# A sandbox cannot import this package, so each side gets the text of link.py followed by its own text.
IMPORT = re.compile(r"^from jaxrl_llm\..*\n", re.MULTILINE)
LINK, JUDGE, SERVED = (
    IMPORT.sub("", Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("link.py", "judge.py", "served_program.py")
)


class ProgramVerdict(NamedTuple):
    """The result of one test."""

    passed: bool
    # Why the program failed: "time", or one of `program.REASONS`; "": its answer is wrong; UNJUDGED: it may be right.
    reason: str = ""


class ProgramLimits(NamedTuple):
    """Limits of a program."""

    seconds: float  # of the CPU, for a test by input and output, or for all tests in Python
    memory: int  # MiB
    end: float = math.inf  # time.monotonic() by which the tests have ended; those that have not are "time"


LATE = ProgramVerdict(False, "time")


def by_output(program: str, stdin: str, expected: str, limits: ProgramLimits, tolerance: float = 0.0) -> ProgramVerdict:
    """Runs the program with this input. It passes if it ends well, and its standard output is the expected one.

    Spaces at the end of lines, and empty lines at the end, do not count. tolerance: relative tolerance of a number with
    a point; a thousandth of it is the absolute one. 0 = the digits must be equal.
    """
    if time.monotonic() >= limits.end:
        return LATE
    # Enough of a longer output to see that it differs.
    characters = 2 * len(expected) + SHOWN
    run = sandbox.run(program, **limits._asdict(), characters=characters, stdin=stdin)
    if run.error:
        return ProgramVerdict(False, run.reason)
    return ProgramVerdict(_agrees(run.output, expected, tolerance))


def in_python(
    program: str, tests: Sequence[str | list[Any]], limits: ProgramLimits, tolerance: float = 0.0
) -> list[ProgramVerdict]:
    """Runs tests on the functions and classes of the program.

    A test is the text of Python statements, in which what the program defines are global names; it passes if it ends
    without an exception. Or it is a call and its result: [function, whether it is a method of Solution, arguments,
    result], where floats of the result have this tolerance.
    """
    if time.monotonic() >= limits.end:
        return [LATE] * len(tests)
    each: dict[str, Any] = {"seconds": limits.seconds, "memory": limits.memory}
    with tempfile.TemporaryFile() as report, ExitStack() as opened:
        (calls, to_program), (answers, to_judge) = (sandbox.pipe(opened) for _ in "ca")
        theirs = f"{LINK}{SERVED}serve({calls.fileno()}, {to_judge.fileno()}, {program!r})"
        numbers = answers.fileno(), to_program.fileno(), report.fileno()
        ours = f"{LINK}{JUDGE}judge({', '.join(map(str, numbers))}, {encoded(tests)!r}, {tolerance!r})"
        # Each gets its own ends alone. The report is the judge's: a program that could write to it would pass all
        # tests.
        tested = opened.enter_context(sandbox.started(theirs, **each, descriptors=(calls.fileno(), to_judge.fileno())))
        judge = opened.enter_context(sandbox.started(ours, **each, descriptors=numbers))
        for end in (calls, to_program, answers, to_judge):
            # Only the children keep them: when one ends, the other reads an end of file.
            end.close()
        _, late = judge.wait(min(time.monotonic() + sandbox.CLOCK * limits.seconds, limits.end), beside=tested)
        report.seek(0)
        lines = report.read().decode("utf-8", "replace").splitlines()
        # Its pipes close before its process has ended.
        alone = f"0 {GONE}" in lines and tested.ends_within(ENDING)
        ended = tested.ended()[1] if alone else ""
    return verdicts(lines, len(tests), late or "error", ended or "error")


def encoded(tests: Sequence[str | Sequence[Any]]) -> str:
    """Returns tests as the JSON text that the judge reads. Raises: ValueError, TypeError, if it could not use one."""
    link = Link(-1, -1, None)
    texts = [json.dumps(link.encoded(test)) for test in tests]
    if link.objects:
        raise TypeError(f"{link.objects[0]!r:.100} is no plain data")
    if max(map(len, texts), default=0) > LONGEST:
        raise ValueError(f"a test has more than {LONGEST} bytes")
    return f"[{', '.join(texts)}]"


def verdicts(lines: Sequence[str], count: int, missing: str, ended: str) -> list[ProgramVerdict]:
    """Returns the verdicts of a report, which has a line for each test: "1", or "0" and a reason.

    missing: reason for a test without a line; ended: reason for the program's early end. A report of any other form has
    no passed test.
    """
    known = {"1": ProgramVerdict(True), "0 ": ProgramVerdict(False), f"0 {GONE}": ProgramVerdict(False, ended)}
    known |= {f"0 {x}": ProgramVerdict(False, x) for x in (*sandbox.REASONS, UNJUDGED)}
    # The judge's process may have been taken over: a report that it cannot have written proves nothing.
    if len(lines) > count or not known.keys() >= set(lines):
        return [ProgramVerdict(False, "error")] * count
    return [known[line] for line in lines] + [ProgramVerdict(False, missing)] * (count - len(lines))


def _agrees(output: str, expected: str, tolerance: float) -> bool:
    lines, expected_lines = _lines(output), _lines(expected)
    if lines == expected_lines or not tolerance or len(lines) != len(expected_lines):
        return lines == expected_lines
    pairs = (
        (line.split(" "), expected_line.split(" ")) for line, expected_line in zip(lines, expected_lines, strict=True)
    )
    return all(
        len(words) == len(expected_words) and all(map(partial(_is_close, tolerance), words, expected_words))
        for words, expected_words in pairs
    )


def _is_close(tolerance: float, word: str, expected: str) -> bool:
    if word == expected or not FLOAT.fullmatch(expected) or not NUMBER.fullmatch(word):
        return word == expected
    return math.isclose(float(word), float(expected), rel_tol=tolerance, abs_tol=tolerance / 1000)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
