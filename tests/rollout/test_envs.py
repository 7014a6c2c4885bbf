"""Environments: what they answer, and when an episode ends."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
from test_tools import LIMITS, TEMPLATE
from tiny import byte_tokenizer

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout import time_limit
from jaxrl_llm.rollout.environments import EnvironmentBatch, EnvironmentPool
from jaxrl_llm.rollout.time_limit import TimeLimit
from jaxrl_llm.tasks.calculator import Calculator
from jaxrl_llm.tasks.gym import Gym
from jaxrl_llm.tasks.number_game import NumberGame
from jaxrl_llm.tasks.protocol import Reply


def said(expression: str) -> str:
    return Calculator(most_characters=200).step(f"so <calculator>{expression}</calculator>").observation


@pytest.mark.parametrize(
    ("expression", "result"),
    [("2*(3+4)", "14"), ("7/4", "1.75"), ("-3**2", "-9"), ("10 % 4 // 2", "1"), ("1e3+1", "1001")],
)
def test_a_calculator_computes(expression, result):
    assert said(expression) == f"<result>{result}</result>"


@pytest.mark.parametrize(
    "expression",
    [
        "1/0", "9**9**9", "(-1)**0.5", "__import__('os')", "x+1", "2+", "True+1", "1" + "+1" * 200, "(" * 150, "'a'*9",
        "",
    ],
)  # fmt: skip
def test_what_a_calculator_cannot_compute_is_an_observation_and_takes_no_time(expression):
    began = time.thread_time()
    assert said(expression).startswith("<result>error: ")
    assert time.thread_time() - began < 1


def test_a_turn_without_an_expression_ends_the_episode():
    assert Calculator(most_characters=9).step("the answer is 14").done
    assert not Calculator(most_characters=9).step("<calculator>1+1</calculator>").done


def test_a_number_game_says_higher_and_lower_until_it_is_found_or_lost():
    game = NumberGame(most_guesses=4)
    game.reset({"answer": "37"})
    guesses = ("50", "20", "37")
    replies = [game.step(f"<guess>{guess}</guess>") for guess in guesses]
    assert [reply.observation.strip() for reply in replies] == ["lower", "higher", ""]
    assert [reply.done for reply in replies] == [False, False, True]
    assert [reply.reward for reply in replies] == [None, None, 1.0]
    few = NumberGame(most_guesses=2)
    few.reset({"answer": 3})
    ends = [few.step(text).done for text in ("hm", "<guess>1</guess>", "hm", "<guess>2</guess>")]
    assert ends == [False, False, False, True]


class Corridor:
    """A game of gymnasium's interface: go east to the end."""

    def reset(self, *, seed: int):
        self.left = seed
        return f"{seed} steps", {}

    def step(self, action: str):
        self.left -= action == "east"
        return f"{self.left} steps", float(self.left == 0), self.left == 0, False, {}


def test_a_game_with_the_interface_of_gymnasium_is_an_environment():
    game = Gym(make="tests.rollout.test_envs.Corridor", stop="\n", seed_column="seed")
    game.reset({"seed": 2})
    replies = [game.step(action + "\n") for action in ("east", "west", "east")]
    assert [reply.observation for reply in replies] == ["1 steps", "1 steps", ""]
    assert [reply.reward for reply in replies] == [0.0, 0.0, 1.0]
    assert replies[-1].done


def test_a_game_that_is_not_there_is_refused(refused):
    with refused("config.env.make = 'tests.rollout.test_envs.Maze'"):
        Gym(make="tests.rollout.test_envs.Maze", stop="\n", seed_column="seed")


class Answers:
    """Answers with what the row says: a reply, or what a function of the row returns."""

    stops = ()

    def reset(self, row: dict[str, Any]) -> None:
        self.answer = row["answer"]

    def step(self, text: str) -> Any:
        return self.answer() if callable(self.answer) else self.answer


def answers(*given: Any, **limits: Any) -> EnvironmentBatch:
    pool = EnvironmentPool(byte_tokenizer(TEMPLATE), Answers, **LIMITS | limits)
    return pool.start_batch([{"answer": answer} for answer in given], 1)


WRONG = {
    "nothing": None,
    "text": "5",
    "a number as observation": Reply(5),
    "a number among results": Reply(("a", 5)),
    "a metric that is none": Reply("5", metrics={"steps": None}),
    "sys.exit": lambda: sys.exit(3),
}


@pytest.mark.filterwarnings("ignore:an environment failed")
@pytest.mark.parametrize("timeout", [0.0, 5.0])
@pytest.mark.parametrize("wrong", WRONG)
def test_whatever_a_step_does_no_run_ends_by_it(wrong, timeout, wording):
    batch = answers(WRONG[wrong], timeout=timeout)
    said = batch.answer(0, [40, 41]).result()
    assert batch.metrics()["errors"].tolist() == [[1.0]]
    wording(batch._pools[0].tokenizer.decode(said))


def test_half_of_a_character_in_an_observation_ends_no_run():
    batch = answers(Reply("a \ud83d b"))
    assert batch._pools[0].tokenizer.decode(batch.answer(0, [40]).result()) == "a \ufffd b"


def test_an_empty_observation_ends_no_episode():
    batch = answers(Reply(""), Reply(done=True))
    assert (batch.answer(0, [40]).result(), batch.answer(1, [40]).result()) == ([], None)


def test_rows_and_environments_that_cannot_be_used_are_refused_before_a_run():
    pool = EnvironmentPool(byte_tokenizer(TEMPLATE), Answers, **LIMITS)
    unused = {"Answers.reset": lambda: pool.check([{"x": 1}]), "KeyError": lambda: pool.start_batch([{"x": 1}], 2)}
    unused["ZeroDivisionError"] = lambda: EnvironmentPool(byte_tokenizer(TEMPLATE), lambda: 1 / 0, **LIMITS)
    for reason, use in unused.items():
        with pytest.raises(UserError, match=rf"^config\.env\b[^\n]*{reason}[^\n]*$"):
            use()


def settled(limit: TimeLimit) -> bool:
    """Waits until all late calls have returned."""
    end = time.monotonic() + 10
    while limit.count_late_calls() and time.monotonic() < end:
        time.sleep(0.01)
    return limit.count_late_calls() == 0


def test_a_step_that_computes_without_end_ends_after_its_time():
    def forever() -> None:
        while True:
            pass

    limit = TimeLimit(0.05)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            limit.call(forever)
    assert settled(limit)


def test_steps_that_wait_without_end_keep_few_threads(monkeypatch):
    monkeypatch.setattr(time_limit, "MAX_LATE_CALLS", 3)
    wait, limit = threading.Event(), TimeLimit(0.02)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            limit.call(wait.wait)
    with pytest.warns(UserWarning, match="3 "), pytest.raises(TimeoutError):
        limit.call(lambda: 1)
    wait.set()
    assert settled(limit) and limit.call(lambda: 1) == 1
