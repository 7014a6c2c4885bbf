"""Programs against tests: what passes, what cannot pass, and that nothing gets out of the sandbox."""

from __future__ import annotations

import functools
import json
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import get_type_hints

import numpy as np
import pytest

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import load
from jaxrl_llm.config.schema import check_call, field_of
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine.process import cpus
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.sandbox import program_tests
from jaxrl_llm.sandbox.program_tests import ProgramLimits, ProgramVerdict, run_python_tests
from jaxrl_llm.session.banner import unconfined_warning
from jaxrl_llm.tasks import REWARDS, code
from jaxrl_llm.tasks.python import Python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
LIMITS = ProgramLimits(5.0, 512)


def earned(*programs: str, tests: object, **arguments: object) -> tuple[list[float], dict[str, float]]:
    """Rewards of programs, all with the same tests, and the metrics that are not 0."""
    seen: dict[str, float] = {}
    texts = [[{"role": "assistant", "content": f"So:\n```python\n{program}\n```\n"}] for program in programs]
    found = code.accuracy(texts, seen.__setitem__, tests=[tests] * len(texts), **arguments)
    return found, {name: share for name, share in seen.items() if share}


def passed(program: str, *tests: str) -> list[bool]:
    return [verdict.passed for verdict in run_python_tests(program, tests, LIMITS)]


ADD, SUM = "def add(a, b):\n    return a + b", "a, b = map(int, input().split())\nprint(a + b)"
ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}


FORMS = [
    (ADD, ASSERTS), (ADD, json.dumps(ASSERTS)), (ADD, "\n".join(ASSERTS)), (SUM, PAIRS), (SUM, json.dumps(PAIRS)),
    (ADD, {"fn_name": "add", "inputs": ["1\n2", [[1], [2]]], "outputs": ["3", [[1, 2]]]}),
    ("class Solution:\n  def add(self, a, b): return (a, b)",
     {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]}),
    ("class Solution:\n  def add(self, a: int, b: List[int]): return [a + b for b in deque(b)]",
     {"fn_name": "add", "inputs": [[1, [2]]], "outputs": [[3]]}),
    ("from __future__ import annotations\ndef add(a: Any, b): return a + b",
     {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}),
    (SUM, {"inputs": [["1 2"], "3 4"], "outputs": [["3"], "7"]}),
]  # fmt: skip


def test_a_right_program_earns_1_in_all_forms_of_tests_and_a_half_a_share():
    programs = [program for program, _ in FORMS]
    programs += [program.replace("a + b", "a - b").replace("(a, b)", "a") for program in programs]
    seen: dict[str, float] = {}
    texts = [f"So:\n```python\n{program}\n```\n" for program in programs]
    found = code.accuracy(texts, seen.__setitem__, tests=[tests for _, tests in FORMS] * 2)
    assert found == [1.0] * len(FORMS) + [0.0] * len(FORMS)
    assert {name for name, share in seen.items() if share} <= {"error"}  # 'a' - 'b'
    half = "def add(a, b):\n    return 3"
    assert earned(half, tests=ASSERTS) == ([0.0], {})
    assert earned(half, tests=ASSERTS, partial=True) == ([0.5], {})
    assert earned("print(7)", tests=PAIRS, partial=True) == ([0.5], {})


def test_the_last_block_after_the_thoughts_is_the_program():
    text = "```python\nno\n```\n<think>```python\nno\n```</think>\n```python\nbad\n```\nbetter:\n```py\n{}\n```"
    seen: dict[str, float] = {}
    texts = [
        text.format(ADD),
        "```python\ndef add(a, b): return a + b",
        "<think>```python\n" + ADD + "\n```</think>",
        "",
    ]
    assert code.accuracy(texts, seen.__setitem__, answer=[ASSERTS] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert seen["no_code"] == 0.75
    assert code.is_given(texts) == [1.0, 0.0, 0.0, 0.0]


FENCED = [  # texts, and their program; None: the text has none
    ("```Python\nX\n```", "X\n"), ("``` python\nX\n```", "X\n"), ("```PY3 title=a.py\nX\n```", "X\n"),
    ("```python\r\nX\r\nY\r\n```", "X\r\nY\r\n"), ("```\nX\n```", "X\n"), ("```\r\nX\n```", "X\n"),
    ("1. so:\n   ```python\n   if X:\n     Y\n   ```", "if X:\n  Y\n"), ("```cpp\nX\n```\n```\nY\n```", "Y\n"),
    ("```python\nX\n```\nIt prints:\n```\n7\n```", "X\n"), ("```\n7\n```\n```python\nX\n```", "X\n"),
    ("```python-repl\n>>> X\n```", None), ("```pycon\n>>> X\n```", None), ("```cpp\nX\n```", None),
    ("```python X```", None),
]  # fmt: skip


def test_a_program_is_found_in_the_usual_spellings_of_a_block():
    assert [(text, code._program(text)) for text, _ in FENCED] == FENCED
    assert code.is_given([text for text, _ in FENCED]) == [1.0] * 4 + [0.0, 0.0, 1.0, 0.0, 1.0, 1.0] + [0.0] * 4
    windows = f"```python\n{SUM}\n```".replace("\n", "\r\n")
    assert code.accuracy([windows], tests=[PAIRS | {"outputs": ["3\r\n", "7\r\n"]}]) == [1.0]


OUTPUTS = [  # expected, printed; equal with the usual tolerance
    ("0.50", "0.5", True), ("0.3", "0.30000000000000004", True), ("1e-05", "0.00001", True), ("2.0", "2", True),
    ("-1.5 x 2.50\n3.0", "-1.50 x 2.5 \n3\n\n", True), ("1000000.0", "1e6", True), ("0.0", "-1e-12", True),
    ("3", "3.0", False), ("1000000007", "1000000008", False), ("010", "10", False), ("0.33", "0.3333", False),
    ("0.0", "0.000001", False), ("1.5", "1.5001", False), ("1.5", "1.5x", False), ("1.5 2.5", "1.5", False),
    ("1.5\n2.5", "1.5 2.5", False), ("1.0", "nan", False), ("1e5", "100000", False), ("1.5", "1_.5", False),
    ("0.5", "", False),
]  # fmt: skip
RESULTS = [
    (0.3, 0.1 + 0.2, True), ([0.5, [1.0]], (0.5, (1.0000001,)), True), ({"1": 0.3}, {1: 0.30000000000000004}, True),
    (float("nan"), float("nan"), True), (float("inf"), float("inf"), True), ([0.3], 0.30000000000000004, True),
    (2.0, 2, True), ("321", "321", True), (["cba"], "cba", True), ("[1]", "[1]", True), ("x", "x", True),
    (3, 3.0000001, False), (0.3, 0.3001, False), (0.3, "0.3", False), ([0.3], [0.3, 0.3], False), ("321", 321, False),
    ({"1": 0.3}, {2: 0.3}, False), (float("inf"), 1e308, False), (0.3, None, False), (1.0, float("nan"), False),
]  # fmt: skip


def test_floats_of_outputs_and_results_have_a_tolerance():
    outputs = [(one, other, program_tests._outputs_agree(other, one, 1e-6)) for one, other, _ in OUTPUTS]
    assert outputs == OUTPUTS
    assert not any(program_tests._outputs_agree(other, one, 0.0) for one, other, _ in OUTPUTS if one not in ("0.5",))
    program = (
        f"from math import inf, nan\nleft = {[returned for _, returned, _ in RESULTS]!r}\ndef f(i): return left[i]"
    )
    tests = {"fn_name": "f", "inputs": [[i] for i in range(len(RESULTS))], "outputs": [x for x, *_ in RESULTS]}
    made = [[x[0], False, *x[1:]] for x in code.tests_of(tests, None, {}).tests]
    verdicts = run_python_tests(program, made, LIMITS, 1e-6)
    assert [x.passed for x in verdicts] == [right for *_, right in RESULTS]
    printed = {"inputs": [""], "outputs": ["0.3"]}
    called = {"fn_name": "f", "inputs": [[0]], "outputs": [0.3]}
    for one, body in ((printed, "print(0.1 + 0.2)"), (called, program)):
        assert earned(body, tests=one)[0] == [1.0]
        assert earned(body, tests=one, tolerance=0.0)[0] == [0.0]
    # Text beside a list of arguments is no JSON, and beside text it is.
    mixed = {"fn_name": "f", "inputs": ["0", [1]], "outputs": ['"321"', "321"]}
    assert earned("def f(i): return '321'", tests=mixed)[0] == [1.0]


def test_columns_may_hold_inputs_and_outputs_and_a_row_has_tests(refused):
    text = f"```python\n{SUM}\n```"
    columns = {name: [values] for name, values in PAIRS.items()}
    assert code.accuracy([text], lambda *_: None, **columns) == [1.0]
    assert code.accuracy([text] * 2, lambda *_: None, tests=[None, PAIRS]) == [None, 1.0]  # a mixture of tasks
    assert code.accuracy([text], lambda *_: None, tests=[[]]) == [None]
    for nothing in ({"inputs": ["1"], "outputs": []}, 3):
        with refused(error=ValueError):
            code.accuracy([text], lambda *_: None, tests=[nothing])


CALLED_WITH = [  # arguments and results that are no JSON, or no literals of Python
    ([[1]], [float("inf")]), ([[1]], [np.int64(3)]), (np.array([[1], [2]]), np.array([3.0, 4.0])),
    ([[np.array([1, 2])]], [[np.float64(0.5)]]), ([({1: (2,)},)], [{3}]), ([[1]], [10**5000]),
    ([[1]], [Decimal("0.1")]),
    (np.array([[1]], object), np.array([np.array([1, 2])], object)), ([[b"a"]], [[np.True_, None]]),
]  # fmt: skip


def test_calls_with_numbers_of_numpy_and_values_that_are_no_json_are_judged():
    wanted = [[np.asarray(x).tolist() if isinstance(x, np.ndarray | np.generic) else x for x in outputs]
              for _, outputs in CALLED_WITH]  # fmt: skip
    wanted[3:4] = [[[0.5]]]
    wanted[8:] = [[[True, None]]]
    head = "from decimal import Decimal\ninf = float('inf')\nleft = "
    programs = [f"{head}{outputs!r}\ndef add(x): return left.pop(0)" for outputs in wanted[:5] + wanted[6:]]
    programs.insert(5, "def add(x): return 10**5000")
    texts = [f"```python\n{program}\n```" for program in (*programs, *["def add(x): return 7"] * len(programs))]
    tests = [{"fn_name": "add", "inputs": inputs, "outputs": outputs} for inputs, outputs in CALLED_WITH] * 2
    found = code.accuracy(texts, tests=tests)
    assert found == [1.0] * len(programs) + [0.0] * len(programs)
    # The columns of a row of pandas: NaN where the row has nothing.
    column = {"inputs": [np.array(["1 2\n"])], "outputs": [np.array(["3"])], "fn_name": [math.nan]}
    assert code.accuracy([f"```python\n{SUM}\n```"], **column) == [1.0]
    assert code.accuracy([f"```python\n{ADD}\n```"], tests=[np.array(ASSERTS)]) == [1.0]


def test_calls_that_cannot_reach_the_judge_are_broken():
    deep = functools.reduce(lambda x, _: [x], range(200), [])
    for value in (object(), deep, math, "x" * 2**24):
        tests = {"fn_name": "add", "inputs": [[value, 1]], "outputs": [3]}
        assert earned(ADD, tests=tests) == ([None], {"broken_tests": 1.0})
    assert earned(ADD, tests={"fn_name": "add", "inputs": ["[" * 10**5], "outputs": ["3"]})[0] == [None]
    assert earned(ADD, tests="[" * 10**5)[0] == [None]


# What a program or its function does, and the metric that counts it.
ENDS = [
    ("while True: pass", "time"), ("import time; time.sleep(600)", "time"), ("return list(iter(int, 1))", "memory"),
    ("import threading\n    def burn():\n        while True: pass\n    t = threading.Thread(target=burn)\n"
     "    t.start()\n    t.join()", "time"),
    ("import os\n    if os.fork() == 0:\n        while True: pass\n    os.wait()", "processes"),
    ("x = bytearray(10 * 2**30)", "memory"), ("x = []\n    while True: x.append(bytearray(2**20))", "memory"),
    ("import os; os._exit(3)", "error"), ("open('/no/file', 'w')", "error"), ("open('/a', 'w')", "files"),
    ("import socket; socket.create_connection(('127.0.0.1', 9))", "network"),
    ("for i in range(10**6): open(str(i), 'wb').write(b'0' * 2**20)", "disk"),
]  # fmt: skip


def test_what_ends_a_program_earns_nothing_and_is_counted_as_what_it_is(monkeypatch):
    monkeypatch.setattr(sandbox, "CLOCK_FACTOR", 3.0)
    asserts, printed = ["assert add(1, 2) == 3"], {"inputs": [""], "outputs": ["3"]}
    cases = [(f"def add(a, b):\n    {body}", reason, asserts) for body, reason in ENDS]
    for body, reason in ENDS:
        program = f"def run():\n    {body}\nrun()\nprint(3)"
        cases += [(program, reason, asserts), (program, reason, printed)]
    cases += [(*cases[0][:2], {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})]
    cases += [("def add(a, b):\n    import os; os._exit(0)", "error", asserts)]

    def counted(program: str, reason: str, tests: object) -> tuple[list[float], dict[str, float]]:
        return earned(program, tests=tests, seconds=0.4 if reason == "time" else 5.0, memory=128)

    with ThreadPoolExecutor(cpus()) as threads:
        found = list(threads.map(counted, *zip(*cases, strict=True)))
    assert [(case, one) for case, one in zip(cases, found, strict=True) if one != ([0.0], {case[1]: 1.0})] == []


CALLED = "def check(f):\n    assert f(1, 2) == 3\n"
BROKEN = [  # tests that can judge no program; the first eight are Python
    "add(1, 2)", "3", "assert (add(1, 2) == 3, 'no')", CALLED, "def test_add():\n    assert add(1, 2) == 3",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)",
    "add(1, 2)\nassert True", "'assert add(1, 2) == 3'",
    "assert add(1, 2) = 3", "The law asserts that 3 assert", "return add(1, 2) == 3", "assert add(1, 2) == 3\0",
    "assert " + "(" * 1000 + "add(1, 2)" + ")" * 1000,
]  # fmt: skip
SOUND = [
    f"{CALLED}check(add)", f"{CALLED}if __name__ == '__main__':\n    check(add)", "if add(1, 2) != 3: raise ValueError",
    "import unittest; unittest.TestCase().assertEqual(add(1, 2), 3)", "import sys\nif add(1, 2) != 3: sys.exit(1)",
    "class T:\n    def test(self): assert add(1, 2) == 3\nT().test()", "assert add(1, 2) is 3, 'no'",
    "import asyncio\nasync def main():\n    assert add(1, 2) == 3\nasyncio.run(main())",
    "for i in range(3):\n    assert add(i, 1) == i + 1", "assert add('\\d', '') == '\\d' and add(1, 2) == 3",
]  # fmt: skip


def test_a_row_whose_tests_can_judge_no_program_is_told_once(capsys, monkeypatch, wording):
    for number, test in enumerate(BROKEN):
        monkeypatch.setattr(code, "_warned_metrics", set())
        tests = [test, "add(1, 2)" if number < 8 else ASSERTS[0]]
        assert earned(ADD, tests=tests) == ([None], {"broken_tests": 1.0}), test
        line = capsys.readouterr().err
        assert line.startswith("warning: code.accuracy: ") and line.count("\n") == 1, line
        wording(line)
    assert earned(ADD, tests=BROKEN[8]) == ([None], {"broken_tests": 1.0})
    calls = {"fn_name": "add", "inputs": ["1\nx", "1\n2"], "outputs": ["3", "3"]}
    assert earned(ADD, tests=calls) == ([None], {"broken_tests": 1.0})
    assert capsys.readouterr().err == ""  # the first line is enough


POINTS = """
class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
    def __add__(self, other): return Point(self.x + other.x)
    def __lt__(self, other): return self.x < other.x
    def __hash__(self): return self.x
    def twice(self): return 2 * self.x
def size(tree): return 1 + size(tree.left) if tree else 0
def near(x): return Point(x)
def Area(x): return Point(x)
class Shapes:
    Area = staticmethod(near)
    def __call__(self, x): return Point(x)
SHAPES = Shapes()
"""
BEYOND_THE_LINK = [  # no program can pass them in the sandbox, and a right one would elsewhere
    "assert Point(1) == Point(1)", "assert (Point(1) + Point(2)).x == 3", "assert Point(1) < Point(2)",
    "assert len({Point(1), Point(1)}) == 1", "class Own(Point): pass\nassert Own(2).twice() == 4",
    "class Tree:\n    left = None\nassert size(Tree()) == 1",
]  # fmt: skip
# No object that a function returns stands for a plain value, whatever the function's name.
OF_FUNCTIONS = [f"assert {test}" for call in ("near", "Area", "Shapes.Area", "Shapes().Area", "SHAPES")
                for test in (f"abs({call}(2) - 4.0) < 1e-6", f"{call}(2) == {call}(2)", f"{{{call}(2)}}")]  # fmt: skip


def test_a_test_that_no_program_can_pass_in_the_sandbox_has_no_verdict(capsys, monkeypatch, wording):
    monkeypatch.setattr(code, "_warned_metrics", set())
    passes, fails = "assert Point(2).twice() == 4", "assert Point(2).twice() == 5"
    verdicts = run_python_tests(POINTS, [*BEYOND_THE_LINK, passes], LIMITS)
    assert [verdict.reason for verdict in verdicts] == ["unjudged"] * len(BEYOND_THE_LINK) + [""]
    assert earned(POINTS, tests=[passes, BEYOND_THE_LINK[0]]) == ([None], {"unjudged": 1.0})
    wording(capsys.readouterr().err)
    # A test that has failed decides.
    assert earned(POINTS, tests=[BEYOND_THE_LINK[0], fails]) == ([0.0], {"unjudged": 1.0})
    assert earned(POINTS, tests=[passes, BEYOND_THE_LINK[0]], partial=True)[0] == [None]
    # A wrong answer that is an object has its verdict.
    wrong = run_python_tests(POINTS, ["assert near(1) == 1", "assert Point(1) == 1", *OF_FUNCTIONS], LIMITS)
    assert [verdict.reason for verdict in wrong] == ["error"] * (2 + len(OF_FUNCTIONS))
    assert capsys.readouterr().err == ""  # the first line is enough


def test_tests_that_can_fail_judge_in_all_forms():
    texts = [f"```python\n{program}\n```" for program in (ADD, ADD.replace("+", "-")) for _ in SOUND]
    found = code.accuracy(texts, tests=[[test] for test in SOUND] * 2)
    assert [one for one in zip(SOUND * 2, found, strict=True) if one[1] != 1.0] == [(test, 0.0) for test in SOUND]
    calls = ("assert each(lambda: 1 / 0)", "assert nothing()", "x = (", "assert each")
    assert passed("def each(f): return f()", *calls) == [False] * 4
    # A text without an assertion stands beside others.
    assert earned(ADD, tests=["import math", "add(1, 2)", ASSERTS[0]]) == ([1.0], {})


def test_programs_run_at_the_same_time(monkeypatch):
    both = threading.Barrier(2, timeout=60)  # BrokenBarrierError if one waits for the other
    monkeypatch.setattr(code, "cpus", lambda: 2)
    monkeypatch.setattr(code, "_verdicts", lambda *_: both.wait() * 0 or [ProgramVerdict(True)])
    assert earned("1", "2", tests=["assert add(1, 2) == 3"])[0] == [1.0] * 2


@pytest.mark.parametrize(
    "given", ["memory=1", "memory=1000000000000000", "memory=0", "seconds=0", "seconds=-1.0", "seconds=1e30"]
)
def test_a_limit_with_which_no_program_runs_is_refused(given):
    with pytest.raises(UserError, match="config.reward.functions.*" + given.partition("=")[0]):
        check_call(f"code.accuracy({given})", REWARDS, "config.reward.functions")


def test_a_program_runs_with_the_least_memory():
    low = field_of(get_type_hints(code.accuracy, include_extras=True)["memory"]).low
    assert earned("def add(a, b): return a + b", tests=["assert add(1, 2) == 3"], memory=int(low))[0] == [1.0]


def test_a_machine_without_a_sandbox_is_refused_before_a_run(monkeypatch, refused, wording):
    def none() -> None:
        raise sandbox.NoSandbox("bwrap: No permissions to create new namespace")

    check_call("code.accuracy(partial=True)", REWARDS, "config.reward.functions")
    monkeypatch.setattr(sandbox, "check_sandbox", none)
    monkeypatch.setenv(sandbox.UNCONFINED, "")
    sandbox._sandbox_problem.cache_clear()
    with refused("config.reward.unconfined = True"):
        check_call("code.accuracy", REWARDS, "config.reward.functions")
    with refused("config.reward.unconfined = True"):
        Python(seconds=1.0, memory=512, most_characters=100)
    config = load("grpo")
    assert unconfined_warning(recipes.read(config).reward) == []
    config.reward.functions = ("code.accuracy", "arithmetic.thought")
    with refused("config.reward.unconfined = True"):
        recipes.read(config)
    config.reward.unconfined = True
    (line,) = unconfined_warning(recipes.read(config).reward)  # the banner
    wording(line)
    Python(seconds=1.0, memory=512, most_characters=100)
    sandbox._sandbox_problem.cache_clear()
