"""Reward functions of a notebook, a script and other trainers, as they are."""

from __future__ import annotations

import functools
import linecache
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.config import load as configs
from jaxrl_llm.config import names, own_code
from jaxrl_llm.config.load import with_names
from jaxrl_llm.config.schema import check_call
from jaxrl_llm.data import columns
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.rollout.reward_calls import call_reward
from jaxrl_llm.tasks import REWARDS
from jaxrl_llm.tasks import math as maths
from jaxrl_llm.tasks.signatures import adapted

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": "?", "answer": str(i), "data_source": "lab", "extra_info": {"i": i}} for i in range(3)]
TEXTS = ["0", "x", "2"]
RIGHT = [1.0, 0.0, 1.0]


def equal(text: str, truth: str) -> float:
    return float(text == truth)


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info["i"]) == ("lab", int(ground_truth))
    return equal(solution_str, ground_truth)


def of_verl_with_parts(solution_str, ground_truth, **_):
    return {"score": equal(solution_str, ground_truth), "length": len(solution_str), "text": "no number"}


async def of_verl_that_waits(data_source, solution_str, ground_truth, extra_info):
    return equal(solution_str, ground_truth)


def of_verl_for_a_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [equal(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]


def of_easyr1(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1):
    assert reward_inputs[0].keys() == {"response", "response_length", "ground_truth"}
    return [{"overall": equal(x["response"], x["ground_truth"]), "length": x["response_length"]} for x in reward_inputs]


def of_easyr1_one_by_one(reward_input):
    return of_easyr1([reward_input])[0]


def of_older_easyr1(predicts, ground_truths):
    return [{"overall": equal(*pair), "length": 1} for pair in zip(predicts, ground_truths, strict=True)]


def of_trl_with_a_column_of_that_name(completions, predicts, **_):
    return predicts


@pytest.mark.parametrize("function", [
    of_verl, of_verl_with_parts, of_verl_that_waits, of_verl_for_a_batch, of_easyr1, of_easyr1_one_by_one,
    of_older_easyr1, functools.partial(of_easyr1, format_weight=0.5),
])  # fmt: skip
def test_a_function_of_verl_or_easyr1_is_called_as_it_is(function):
    answer = call_reward("f", adapted(function), ROWS, TEXTS, [[1]] * 3)
    assert answer.values == RIGHT
    assert answer.metrics in ({}, {"length": 1.0})


def test_a_function_with_our_signature_stays_as_it_is():
    for function in (of_trl_with_a_column_of_that_name, maths.accuracy, len):
        assert adapted(function) is function


@pytest.mark.parametrize(("name", "needs"), [
    ("of_verl", {"answer", "reward_model", "data_source"}), ("of_easyr1", {"answer", "reward_model"}),
    ("of_verl_for_a_batch", {"answer", "reward_model", "data_source", "extra_info"}),
])  # fmt: skip
def test_the_columns_of_such_a_function_are_known_before_a_model_is_loaded(name, needs):
    asked = columns.column_requirements([f"test_own_functions.{name}"], episodes=False)
    assert {column for one in asked for column in one.columns} == needs


class Judge:
    def __call__(self, completions, **_):
        return [1.0] * len(completions)


def by_position(completions, /, answer):
    return completions


def test_a_class_and_arguments_by_position_are_refused_before_a_run(refused):
    for name in ("Judge", "by_position"):
        with refused("config.reward.functions", name):
            check_call(f"test_own_functions.{name}", REWARDS, "config.reward.functions")


SCRIPT = """
import json
from forms import form
from jaxrl_llm.config.load import with_names
from jaxrl_llm.configs import grpo
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.grading import RewardFn

print("script runs")
BONUS = 0.5

def helper(text):
    return len(text) + BONUS if text != "bad" else json.loads(text)

def score(completions, **columns):
    return [helper(text) for text in completions]

c = grpo.get_config()
c.reward.functions, c.reward.weights = (score, form), (1.0, 1.0)
names = with_names(c).reward.functions
reward = RewardFn(names, c.reward.weights, 20.0, field="x")
earned = reward([{"prompt": "?"}], [["a", "bcd"]], [[[1], [1]]]).rewards
print(names, {name: x.tolist() for name, x in (earned.channels | {"total": earned.total}).items()})
try:
    reward([{"prompt": "?"}], [["bad"]], [[[1]]])
except UserError as error:
    print(error)
reward.close()
"""


def test_a_function_of_a_script_judges_without_running_the_script_again(tmp_path, wording):
    (tmp_path / "forms.py").write_text("def form(completions, **columns):\n    return [9.0] * len(completions)\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    *printed, error = done.stdout.splitlines()
    assert printed == [
        "script runs",
        "('__main__.score', 'forms.form') "
        "{'__main__.score': [[1.5, 3.5]], 'forms.form': [[9.0, 9.0]], 'total': [[10.5, 12.5]]}",
    ], done.stderr
    assert f"{tmp_path}/script.py:{SCRIPT.splitlines().index('def helper(text):') + 2}" in error
    wording(error)


def test_an_error_in_a_function_of_a_notebook_has_the_line_of_its_cell(refused):
    cell, defined = "import json\ndef score(completions, **_):\n    return json.loads('?')\n", {}
    exec(compile(cell, "/tmp/ipykernel_7/12.py", "exec"), defined)
    with refused("JSONDecodeError", "(cell:3)"):
        call_reward("score", defined["score"], ROWS, TEXTS, [[1]] * 3)


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_the_own_reward_of_the_documentation_calls_those_of_the_package(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "rewards.md").read_text().split("## A reward of the package in your own")[1]
    (tmp_path / "mine.py").write_text(text.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": "?", "answer": "3", "tests": tests} for tests in (["assert f() == 1"], ["f()"], None)]
    texts = [["```python\ndef f(): return 1\n```\n\\boxed{3}", "```python\ndef f(): return 2\n```\n\\boxed{3}"]] * 3
    with closing(RewardFn(("mine.both",), (1.0,), 20.0, field="x")) as reward:
        judged = reward(rows, texts, [[[1] * 500, [1] * 1000]] * 3)
    np.testing.assert_allclose(judged.rewards.channels["mine.both"], [[2.0, 0.9], [np.nan] * 2, [np.nan] * 2])
    assert (judged.metrics["mine.both/no_code"], judged.metrics["mine.both/broken_tests"]) == (0.0, 1 / 3)


def test_a_function_of_a_config_file_judges_and_is_named_by_the_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.configs import grpo\nWORTH = 7.0\n\n"
        "def score(completions, **columns):\n    return [WORTH] * len(completions)\n\n"
        "def get_config():\n    c = grpo.get_config()\n    c.reward.functions, c.reward.weights = score, 1.0\n"
        "    c.eval.function = score\n"
        "    return c\n"
    )
    c = configs.load(tmp_path / "mine.py")
    assert c.reward.functions == ("mine.score",)
    assert c.eval.function == "mine.score"
    for timeout in (0.0, 20.0):  # here and in a process of its own
        with closing(RewardFn(c.reward.functions, (1.0,), timeout, field="x")) as reward:
            assert reward([{"prompt": "?"}], [["a"]], [[[1]]]).rewards.total.tolist() == [[7.0]]


@pytest.mark.parametrize("function", [lambda completions: completions, Judge(), functools.partial(of_verl)])
def test_a_function_without_a_name_is_refused_in_one_line(function, refused):
    c = configs.load("grpo")
    c.reward.functions = (function,)
    with refused("config.reward.functions"):
        with_names(c)
    c.reward.functions, c.eval.function = (of_verl,), function
    with refused("config.eval.function"):
        with_names(c)
    c.eval.function = of_verl
    c.eval.function = "math.accuracy"  # and a name again
    named = with_names(c)
    assert (*named.reward.functions, named.eval.function) == ("test_own_functions.of_verl", "math.accuracy")


def ends_the_program(completions, **_):
    sys.exit(3)


def test_a_reward_that_ends_the_program_is_named():
    name = "test_own_functions.ends_the_program"
    words = (name, "SystemExit: 3", Path(__file__).name)
    with closing(RewardFn((name,), (1.0,), 0.0, field="x")) as reward, pytest.raises(UserError) as caught:
        reward([{"prompt": "?"}], [["a"]], [[[1]]])
    assert [word for word in words if word not in str(caught.value)] == []


SOURCE = """
import math

SCALE = 1.0

def scaled(x):
    # Half of it.
    return SCALE * math.sqrt(x)

def unused(x):
    return x

@functools.cache
def reward(completions, **columns):
    return [scaled(len(completion)) for completion in completions]
"""


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("len(completion)", "2 * len(completion)", True),
        ("SCALE = 1.0", "SCALE = 2.0", True),  # what a function that it calls uses
        ("import math", "import cmath as math", True),
        ("@functools.cache\n", "", True),
        ("    return x\n", "    return -x\n", False),  # of another function
        ("SCALE = 1.0", "SCALE = 1.0\nOTHER = 2.0", False),
        # The name is local in the function.
        ("SCALE = 1.0", "SCALE = 1.0\nfor completion in (1, 2):\n    print(completion)", False),
        ("SCALE = 1.0", "SCALE = 1.0\nrows = [completion for completion in (1, 2)]", False),
        ("SCALE = 1.0", "SCALE = 1.0\nrows = [scaled for scaled in (1, 2)]", False),  # local in the comprehension
    ],
)
def test_the_hash_of_a_function_is_of_its_source_and_of_what_it_uses(tmp_path, before, after, changes):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    first = own_code.source_in(file, "reward")
    assert before in SOURCE and "unused" not in first
    file.write_text(SOURCE.replace(before, after))
    assert (own_code.source_in(file, "reward") != first) == changes


def test_functions_of_a_module_a_script_and_a_notebook_have_a_hash(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE.replace("@functools.cache", ""))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(equal=equal))
    source = "def celled(completions):\n    return 1\n"
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(keepends=True), "<cell 1>")
    exec(compile(source, "<cell 1>", "exec"), cell := {"__name__": "__main__"})
    monkeypatch.setitem(names.USER_FUNCTIONS, "__main__.celled", cell["celled"])
    names.resolve("mine.reward", REWARDS)
    values = ("mine.reward(size=3)", "__main__.equal", "arithmetic.accuracy"), "__main__.celled", 3
    assert own_code.digests(values).keys() == {"mine.reward", "__main__.equal", "__main__.celled"}
    assert len({*own_code.digests(values).values()}) == 3
