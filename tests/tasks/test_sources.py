"""Sources that a config calls with arguments: rows of games, of reasoning-gym, and of the user's functions."""

from __future__ import annotations

from typing import Any

import pytest
from ml_collections import ConfigDict
from test_envs import Corridor
from test_self_test_configs import write_model
from test_steps import SHORT, tiny

from jaxrl_llm.data.rows import check_source, load_rows
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import gym, reasoning_gym
from jaxrl_llm.train import steps

TASKS = ("chain_sum", "gcd", "letter_counting")


def squares(size: int = 2, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{x} squared", "answer": x * x} for x in range(first, first + size)]


def rows_of(source: str) -> list[dict[str, Any]]:
    check_source("config.data.source", source)
    return load_rows(source).rows


def test_a_source_gets_the_arguments_of_its_call():
    name = f"{__name__}.squares"
    long = {"size": 1, "first": int("9" * 300)}
    for call, arguments in {
        "": {},
        f"(size=1, first={long['first']})": long,
        "(size=3)": {"size": 3},
        "(first=5, size=1)": {"first": 5, "size": 1},
    }.items():
        assert rows_of(name + call) == squares(**arguments)


@pytest.mark.parametrize(
    "call", ["squares(last=3)", "squares(3)", "squares(size=x)", "squares(size={[]: 1})", "no_function(size=3)"],
    ids=["another argument", "without a name", "no plain value", "no key", "another function"],
)  # fmt: skip
def test_a_wrong_call_of_a_source_is_refused(call):
    with pytest.raises(UserError, match=r"^config\.data\.source"):
        check_source("config.data.source", f"{__name__}.{call}")


def test_rows_of_a_game_ask_with_the_first_observation_of_their_seed():
    make = f"{Corridor.__module__}.Corridor"
    rows = rows_of(f"gym.rows(make={make!r}, size=3, seed=4)")
    assert rows == gym.rows(make=make, size=3, seed=4) and [row["seed"] for row in rows] == [4, 5, 6]
    for row in rows:
        assert row["prompt"] == [{"role": "user", "content": str(Corridor().reset(seed=row["seed"])[0])}]
    for make in ("no_module.make", "os.sep", "os.kill"):
        with pytest.raises(UserError, match=r"gym\.rows"):
            check_source("config.data.source", f"gym.rows(make={make!r}, size=3)")


@pytest.mark.needs("reasoning_gym")
def test_problems_of_reasoning_gym_repeat_by_seed_and_have_verifiers():
    for task in TASKS:
        rows = rows_of(f"reasoning_gym.rows(task={task!r}, size=5, seed=3)")
        assert rows == reasoning_gym.rows(task=task, size=5, seed=3)
        others = reasoning_gym.rows(task=task, size=4, seed=4)  # each problem has a seed of its own
        assert [row["prompt"] for row in rows[1:]] == [row["prompt"] for row in others]
        columns = {name: [row[name] for row in rows] for name in ("answer", "task", "metadata")}
        answers: list[Any] = columns["answer"]
        assert reasoning_gym.accuracy(answers, **columns) == [1.0] * 5
        assert reasoning_gym.accuracy(["no answer"] * 5, **columns) == [0.0] * 5
        columns["task"] = [None, *columns["task"][1:]]
        assert reasoning_gym.score(answers, **columns) == [None, 1.0, 1.0, 1.0, 1.0]
    for call in ("task='chainsum', size=2", "task='gcd', size=2, settings={'most': 3}", "task='gcd', size=0"):
        with pytest.raises(UserError):
            check_source("config.data.source", f"reasoning_gym.rows({call})")


@pytest.mark.slow
@pytest.mark.needs("reasoning_gym")
def test_a_run_trains_on_tasks_of_reasoning_gym(tmp_path):
    model = str(write_model(tmp_path / "model", "qwen2_5", "qwen2_tied"))
    limits = {"model.path": model, "data.max_prompt_tokens": 2000, "rollout.max_completion_tokens": 2}
    config = tiny(num_steps=5, **SHORT, **limits | {"data.overlong": "drop", "data.source": ""})
    with config.unlocked():
        config.reward.functions, config.reward.weights = ("reasoning_gym.score",), (1.0,)
        config.data.mixture = ConfigDict()
        for task in (*TASKS, "graph_color"):  # the last one has no answer: its verifier reads the metadata alone
            source = f"reasoning_gym.rows(task={task!r}, size=50)"
            config.data.mixture[task] = ConfigDict(dict(source=source, convert="", weight=1.0))
    records = list(steps(config, tmp_path / "run"))
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert {f"source/{task}/share" for task in TASKS} <= {name for record in records for name in record}
