"""Rewards for programs: the last block of Python in a completion is run against the tests of its row.

Programs run in a sandbox without network, child processes and files of the user (`jaxrl_llm.sandbox`). Tests are judged
in another process, so that a program that ends early, or changes what its tests use, earns nothing.
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

# These imports are added, as in veRL, because problems show a head such as `def two(x: List[int])` without imports.
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
# A block may have more text after its language, such as a title. Lines of Windows end with \r\n.
BLOCK = re.compile(r"```[ \t]*(?:python|py)3?(?:[ \t][^\n`]*)?\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
FENCE = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
# This process has printed a warning for these metrics, which count tests without a verdict.
_warned_metrics: set[str] = set()


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
    """Returns 1 if the program passes all tests, else 0; with `partial` the share of the tests that it passes.

    A row has its tests in the column `tests`, or else in `answer`: a list of Python texts with assert statements
    (MBPP), one such text, or {"inputs": [...], "outputs": [...]} of standard input and output, with "fn_name" of
    arguments and results of that function (APPS, PRIME, veRL). Each may be JSON text. The keys may be columns too.
    The result is None if the row has no tests, as in a mixture of tasks; if its tests are no Python, or have no
    assertion that runs; or if no program could pass a test in this sandbox, for example a test that compares two
    objects that it has built. A warning on stderr shows the first such test of each kind.
    seconds: CPU time of a test by input and output, or of all tests in Python; memory: MiB of a program; tolerance:
    relative tolerance of expected floats, of which a thousandth is the absolute one. Integers and assert statements
    have no tolerance.
    Logs shares of the completions: without a program (no_code), failed for each reason, with broken tests
    (broken_tests), with a test that no program could pass (unjudged), and with tests that had not run shortly before
    config.reward.timeout (late), which count as failed with the reason "time".
    Raises: ValueError, if the tests of a row have another form.
    """
    test_columns = {"inputs": inputs, "outputs": outputs, "fn_name": fn_name}
    tests_in_columns = [{k: v[i] for k, v in test_columns.items() if v} for i in range(len(completions))]
    programs = [_program(c) for c in completions]
    empty_column = [None] * len(completions)
    columns_of_rows = zip(tests or empty_column, answer or empty_column, tests_in_columns, strict=True)
    rows = [tests_of(*row) for row in columns_of_rows]
    cases, faults = [row.tests for row in rows], [row.fault for row in rows if row.fault]
    if faults:
        _warn(f"{faults[0]}; correct such tests, or make them with data.convert", "broken_tests")
    limits = ProgramLimits(seconds, memory, deadline())

    def judge_program(program: str | None, case: list[Any]) -> tuple[list[ProgramVerdict], bool]:
        verdicts = [] if program is None or not case else _verdicts(program, case, limits, partial, tolerance)
        return verdicts, time.monotonic() >= limits.deadline

    # Threads suffice, because each waits for a process of the sandbox.
    with ThreadPoolExecutor(cpus()) as threads:
        judgements = list(threads.map(judge_program, programs, cases))
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
        first_unjudged = next(filter(None, unjudged))
        _warn(
            f"the test {shown(str(first_unjudged))} extends, compares or calculates with objects of the "
            "program, or passes it an object of a class of its own, which the sandbox does not support; compare fields "
            "of objects instead",
            UNJUDGED,
        )
    return [
        _reward(row_verdicts, len(case), partial) for row_verdicts, case in zip(verdicts_of_rows, cases, strict=True)
    ]


def is_given(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1 if the completion has a complete ```python block, else 0."""
    return [float(bool(BLOCK.search(_after_thoughts(c)))) for c in completions]


def _reward(verdicts: list[ProgramVerdict], count: int, partial: bool) -> float | None:
    """Returns the reward of a completion from the verdicts on its `count` tests; None if they decide nothing."""
    if not count:
        return None
    passed, unjudged = sum(v.passed for v in verdicts), sum(v.reason == UNJUDGED for v in verdicts)
    # A failed test decides, whatever the verdict of an unjudged test would have been.
    if unjudged and (partial or passed + unjudged == count):
        return None
    return passed / count if partial else float(passed == count)


def _after_thoughts(completion: Any) -> str:
    """Returns the text of a completion after its thoughts."""
    return text_of(completion).rpartition("</think>")[2]


def _program(completion: Any) -> str | None:
    """Returns the last block of Python after the thoughts, or the last one without a language; None without blocks."""
    text = _after_thoughts(completion)
    blocks = BLOCK.findall(text) or [block for language, block in FENCE.findall(text) if not language.strip()]
    if not blocks:
        return None
    # A block in a list of Markdown is indented as the list is.
    return textwrap.dedent(blocks[-1]) if blocks[-1].lstrip("\r\n")[:1] in " \t" else blocks[-1]


def _warn(fault: str, metric: str) -> None:
    """Prints a warning about tests without a verdict, once in this process for each metric."""
    if metric not in _warned_metrics:
        effect = f"completions with such tests have no verdict; the metric code.accuracy/{metric} is their share"
        print(f"warning: code.accuracy: {printable(fault)}; {effect}", file=sys.stderr, flush=True)
    _warned_metrics.add(metric)


def _verdicts(
    program: str, cases: list[Any], limits: ProgramLimits, partial: bool, tolerance: float
) -> list[ProgramVerdict]:
    """Returns the verdicts on a program's tests, up to the first one that decides. After a time-out no test runs."""
    if len(cases[0]) == 2 and not isinstance(cases[0], str):
        verdicts: list[ProgramVerdict] = []
        for stdin, expected in cases:
            verdicts.append(run_output_test(program, stdin, expected, limits, tolerance))
            if verdicts[-1].reason == "time" or not (partial or verdicts[-1].passed):
                break
        return verdicts
    is_method = bool(re.search(r"^class Solution\b", program, re.MULTILINE))
    tests = [x if isinstance(x, str) else [x[0], is_method, *x[1:]] for x in cases]
    imports = IMPORTS if not isinstance(cases[0], str) and "from __future__" not in program else ""
    return run_python_tests(imports + program, tests, limits, tolerance)
