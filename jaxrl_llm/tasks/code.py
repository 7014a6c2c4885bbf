"""Rewards for programs: the last block of Python in a completion is run against the tests of its row.

Programs run in a sandbox without network, children and files of others (`jaxrl_llm.sandbox`). A program that ends
early, or changes what its tests use, earns nothing: tests are judged in another process.
"""

from __future__ import annotations

import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrl_llm.config.schema import NotNegative, checked_by
from jaxrl_llm.errors import printable
from jaxrl_llm.machine.process import cpus
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.sandbox.link import UNJUDGED
from jaxrl_llm.sandbox.program import REASONS
from jaxrl_llm.sandbox.program_tests import ProgramLimits, ProgramVerdict, run_output_test, run_python_tests
from jaxrl_llm.tasks import deadline, text_of, unlogged
from jaxrl_llm.tasks.code_tests import shown, tests_of

# Problems that name a function show its head, such as `def two(x: List[int])`, without imports: veRL adds them too.
IMPORTS = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, nlargest, nsmallest
from itertools import accumulate, chain, combinations, groupby, permutations, product
from math import ceil, comb, floor, gcd, inf, sqrt
from typing import *
"""
# A block may name more after its language, such as a title. Windows ends a line with \r\n.
BLOCK = re.compile(r"```[ \t]*(?:python|py)3?(?:[ \t][^\n`]*)?\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
FENCE = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
_told: set[str] = set()  # metrics of tests without a verdict of which this process has told


@checked_by(lambda **_: sandbox.require_sandbox())
def accuracy(
    completions: list[Any],
    log_metric: Callable[[str, float], None] = unlogged,
    tests: list[Any] | None = None,
    answer: list[Any] | None = None,
    inputs: list[Any] | None = None,
    outputs: list[Any] | None = None,
    fn_name: list[Any] | None = None,
    *,
    partial: bool = False,
    seconds: sandbox.Seconds = 5.0,
    memory: sandbox.Mebibytes = 512,
    tolerance: NotNegative = 1e-6,
    **columns: Any,
) -> list[float | None]:
    """1 where the program passes all tests, else 0; with `partial` the share of the tests that it passes.

    A row has its tests in the column `tests`, or else in `answer`: a list of Python texts with assert statements
    (MBPP), one such text, or {"inputs": [...], "outputs": [...]} of standard input and output, with "fn_name" of
    arguments and results of that function (APPS, PRIME, veRL). Each may be JSON text. The keys may be columns too.
    None where the row has no tests, as in a mixture of tasks, or tests that can judge no program: text that is no
    Python, or without an assertion that runs. None too where a test does what no program could pass here, such as to
    compare two objects that it has built. The first test of each kind is told on stderr.
    seconds: CPU time for a test by input and output, or for all tests in Python; memory: MiB of a program.
    tolerance: relative tolerance of expected floats; a thousandth of it is the absolute one. Integers and assert
    statements have no tolerance.
    Logs the share of the completions without a program (no_code), of those that failed for each reason, of those
    whose tests can judge none (broken_tests), of those with a test that no program could pass here (unjudged), and of
    those whose tests had not all run when config.reward.timeout came near (late): such a test has failed, with "time".
    Raises: ValueError, if the tests of a row are in no such form.
    """
    pairs = {"inputs": inputs, "outputs": outputs, "fn_name": fn_name}
    columned = [{k: v[i] for k, v in pairs.items() if v} for i in range(len(completions))]
    programs = [_program(c) for c in completions]
    nothing = [None] * len(completions)
    rows = [tests_of(*row) for row in zip(tests or nothing, answer or nothing, columned, strict=True)]
    cases, faults = [row.tests for row in rows], [row.fault for row in rows if row.fault]
    if faults:
        _warn(f"{faults[0]}: mend such tests, or make them with data.convert", "broken_tests")
    limits = ProgramLimits(seconds, memory, deadline())

    def judged(program: str | None, case: list[Any]) -> tuple[list[ProgramVerdict], bool]:
        verdicts = [] if program is None or not case else _verdicts(program, case, limits, partial, tolerance)
        return verdicts, time.monotonic() >= limits.deadline

    # Threads are enough: each waits for a process of the sandbox.
    with ThreadPoolExecutor(cpus()) as threads:
        judgements = list(threads.map(judged, programs, cases))
    verdicts_of_rows = [row_verdicts for row_verdicts, _ in judgements]
    reasons = Counter(next((v.reason for v in row_verdicts if v.reason), "") for row_verdicts in verdicts_of_rows)
    for reason in ("time", *REASONS):
        log_metric(reason, reasons[reason] / len(verdicts_of_rows))
    log_metric("late", sum(late and bool(row_verdicts) for row_verdicts, late in judgements) / len(judgements))
    log_metric("broken_tests", len(faults) / len(verdicts_of_rows))
    log_metric("no_code", programs.count(None) / len(verdicts_of_rows))
    pairs_of_rows = (zip(case, row, strict=False) for case, row in zip(cases, verdicts_of_rows, strict=True))
    unjudged = [next((test for test, verdict in row if verdict.reason == UNJUDGED), None) for row in pairs_of_rows]
    log_metric(UNJUDGED, 1 - unjudged.count(None) / len(unjudged))
    if any(unjudged):
        _warn(
            f"the test {shown(str(next(filter(None, unjudged))))} extends, compares or calculates with objects of the "
            "program, or gives it one of a class of its own, which no program can pass here: compare their fields",
            UNJUDGED,
        )
    return [
        _reward(row_verdicts, len(case), partial) for row_verdicts, case in zip(verdicts_of_rows, cases, strict=True)
    ]


def is_given(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion has a ```python block that ends."""
    return [float(bool(BLOCK.search(_after_thoughts(c)))) for c in completions]


def _reward(verdicts: list[ProgramVerdict], count: int, partial: bool) -> float | None:
    if not count:
        return None
    passed, unjudged = sum(v.passed for v in verdicts), sum(v.reason == UNJUDGED for v in verdicts)
    # A test that failed decides, whatever the test without a verdict would have said.
    if unjudged and (partial or passed + unjudged == count):
        return None
    return passed / count if partial else float(passed == count)


def _after_thoughts(completion: Any) -> str:
    return text_of(completion).rpartition("</think>")[2]


def _program(completion: Any) -> str | None:
    """Returns the last block of Python after the thoughts, or else the last one that names no language, or None."""
    text = _after_thoughts(completion)
    blocks = BLOCK.findall(text) or [block for language, block in FENCE.findall(text) if not language.strip()]
    if not blocks:
        return None
    # A block in a list of Markdown is indented as the list is.
    return textwrap.dedent(blocks[-1]) if blocks[-1].lstrip("\r\n")[:1] in " \t" else blocks[-1]


def _warn(fault: str, metric: str) -> None:
    """Tells of tests that have no verdict, once in this process for each metric."""
    if metric not in _told:
        why = f"completions with such tests have no verdict, and code.accuracy/{metric} is their share"
        print(f"warning: code.accuracy: {printable(fault)}; {why}", file=sys.stderr, flush=True)
    _told.add(metric)


def _verdicts(
    program: str, cases: list[Any], limits: ProgramLimits, partial: bool, tolerance: float
) -> list[ProgramVerdict]:
    """Returns the verdicts until one decides: after a test that took too long, the others do not run."""
    if len(cases[0]) == 2 and not isinstance(cases[0], str):
        verdicts: list[ProgramVerdict] = []
        for stdin, expected in cases:
            verdicts.append(run_output_test(program, stdin, expected, limits, tolerance))
            if verdicts[-1].reason == "time" or not (partial or verdicts[-1].passed):
                break
        return verdicts
    method = bool(re.search(r"^class Solution\b", program, re.MULTILINE))
    tests = [x if isinstance(x, str) else [x[0], method, *x[1:]] for x in cases]
    imports = IMPORTS if not isinstance(cases[0], str) and "from __future__" not in program else ""
    return run_python_tests(imports + program, tests, limits, tolerance)
