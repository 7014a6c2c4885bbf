"""Runs the tests of an untrusted program, which runs in a sandbox and cannot influence its verdicts.

A test by input and output runs the program once; this process compares the output, and the program never sees the
expected output. Tests in Python, such as assert statements, run in a second sandbox, which calls the functions of the
first one and compares plain data (`sandbox.link`, `judge`, `served_program`).
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
from jaxrl_llm.sandbox.link import ENDED, MAX_MESSAGE_BYTES, UNJUDGED, Link

EXTRA_CHARACTERS = 10_000  # number of characters of an output that are read beyond the length of the expected one
# Seconds to wait for the end of a program that has closed its pipes.
ENDING_SECONDS = 1.0
# NUMBER matches a number in an output. FLOAT matches those that may differ by the tolerance: with a point, or a
# negative power of ten.
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=e-))(?:e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
# Each side gets the text of link.py followed by its own file, because a sandbox cannot import this package.
IMPORT = re.compile(r"^from jaxrl_llm\..*\n", re.MULTILINE)
LINK, JUDGE, SERVED = (
    IMPORT.sub("", Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("link.py", "judge.py", "served_program.py")
)


class ProgramVerdict(NamedTuple):
    """The verdict of one test."""

    passed: bool
    # Why the test failed: "time" or one of `program.REASONS`; "" if the answer is wrong; UNJUDGED if it may be right.
    reason: str = ""


class ProgramLimits(NamedTuple):
    """The limits of a program."""

    seconds: float  # CPU time for each test by input and output, or for all tests in Python
    memory: int  # MiB
    deadline: float = math.inf  # time of time.monotonic() at which unfinished tests fail with the reason "time"


TIMED_OUT = ProgramVerdict(False, "time")


def run_output_test(
    program: str, stdin: str, expected: str, limits: ProgramLimits, tolerance: float = 0.0
) -> ProgramVerdict:
    """Runs a program with an input. The test passes if the program succeeds and prints the expected output.

    Spaces at the end of lines, and empty lines at the end, do not count. tolerance: relative tolerance of a number with
    a point, 0 = the digits must be equal; the absolute tolerance is a thousandth of it.
    """
    if time.monotonic() >= limits.deadline:
        return TIMED_OUT
    # The program's result keeps enough characters of a longer output to differ from the expected output.
    characters = 2 * len(expected) + EXTRA_CHARACTERS
    result = sandbox.run_program(program, **limits._asdict(), characters=characters, stdin=stdin)
    if result.error:
        return ProgramVerdict(False, result.reason)
    return ProgramVerdict(_outputs_agree(result.output, expected, tolerance))


def run_python_tests(
    program: str, tests: Sequence[str | list[Any]], limits: ProgramLimits, tolerance: float = 0.0
) -> list[ProgramVerdict]:
    """Runs tests that use the functions and classes of a program.

    tests: each is either Python statements, which see the program's global names and pass if they raise no exception,
    or a call [function, whether it is a method of Solution, arguments, result]. tolerance: relative tolerance of floats
    in such a result.
    """
    if time.monotonic() >= limits.deadline:
        return [TIMED_OUT] * len(tests)
    limit_arguments: dict[str, Any] = {"seconds": limits.seconds, "memory": limits.memory}
    with tempfile.TemporaryFile() as report, ExitStack() as stack:
        # One pipe carries calls from the judge to the program, and the other carries answers to the judge.
        (calls, to_program), (answers, to_judge) = (sandbox.open_pipe(stack) for _ in "ca")
        program_text = f"{LINK}{SERVED}serve({calls.fileno()}, {to_judge.fileno()}, {program!r})"
        numbers = answers.fileno(), to_program.fileno(), report.fileno()
        judge_text = f"{LINK}{JUDGE}judge({', '.join(map(str, numbers))}, {encode_tests(tests)!r}, {tolerance!r})"
        # Each side gets only its own ends. Only the judge gets the report, because a program that could write to the
        # report would pass all tests.
        program_process = stack.enter_context(
            sandbox.start_program(program_text, **limit_arguments, descriptors=(calls.fileno(), to_judge.fileno()))
        )
        judge_process = stack.enter_context(sandbox.start_program(judge_text, **limit_arguments, descriptors=numbers))
        for end in (calls, to_program, answers, to_judge):
            # This process closes its copies, so that each side reads an end of file when the other side ends.
            end.close()
        _, timeout_reason = judge_process.wait(
            min(time.monotonic() + sandbox.CLOCK_FACTOR * limits.seconds, limits.deadline), companion=program_process
        )
        report.seek(0)
        lines = report.read().decode("utf-8", "replace").splitlines()
        # The wait is needed, because the program's pipes close before its process has ended.
        ended_itself = f"0 {ENDED}" in lines and program_process.ends_within(ENDING_SECONDS)
        end_reason = program_process.exit_reason()[1] if ended_itself else ""
    return read_verdicts(lines, len(tests), timeout_reason or "error", end_reason or "error")


def encode_tests(tests: Sequence[str | Sequence[Any]]) -> str:
    """Returns the JSON text of tests for the judge. Raises: ValueError, TypeError, if a test cannot be sent."""
    link = Link(-1, -1, None)
    texts = [json.dumps(link.encode(test)) for test in tests]
    if link.objects:
        raise TypeError(f"{link.objects[0]!r:.100} must be plain data")
    if max(map(len, texts), default=0) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a test has more than {MAX_MESSAGE_BYTES} bytes")
    return f"[{', '.join(texts)}]"


def read_verdicts(lines: Sequence[str], count: int, missing_reason: str, end_reason: str) -> list[ProgramVerdict]:
    """Returns the verdicts of a report, whose lines are "1" or "0 REASON", one for each test.

    count: number of tests. missing_reason: reason of a test without a line. end_reason: reason of the program's early
    end. In a report of any other form, no test has passed.
    """
    verdict_of_line = {
        "1": ProgramVerdict(True),
        "0 ": ProgramVerdict(False),
        f"0 {ENDED}": ProgramVerdict(False, end_reason),
    }
    verdict_of_line |= {f"0 {x}": ProgramVerdict(False, x) for x in (*sandbox.REASONS, UNJUDGED)}
    # If the judge cannot have written the report, its process may have been taken over, and the report proves nothing.
    if len(lines) > count or not verdict_of_line.keys() >= set(lines):
        return [ProgramVerdict(False, "error")] * count
    return [verdict_of_line[line] for line in lines] + [ProgramVerdict(False, missing_reason)] * (count - len(lines))


def _outputs_agree(output: str, expected: str, tolerance: float) -> bool:
    """Returns whether an output equals the expected one, except for spaces at ends and differences of numbers."""
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
    """Returns whether two words are equal, or are numbers that differ by at most the tolerance."""
    if word == expected or not FLOAT.fullmatch(expected) or not NUMBER.fullmatch(word):
        return word == expected
    return math.isclose(float(word), float(expected), rel_tol=tolerance, abs_tol=tolerance / 1000)


def _lines(text: str) -> list[str]:
    """Returns the lines of a text without spaces at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
