"""Environments: what they answer, and when an episode ends."""

from __future__ import annotations

import time

import pytest

from jaxrl_llm.envs.calculator import Calculator
from jaxrl_llm.envs.gym import Gym
from jaxrl_llm.envs.number_game import NumberGame
from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards import environment


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
        "1/0",
        "9**9**9",
        "(-1)**0.5",
        "__import__('os')",
        "x+1",
        "2+",
        "True+1",
        "1" + "+1" * 200,
        "(" * 150,
        "'a'*9",
        "",
    ],
)
def test_what_a_calculator_cannot_compute_is_an_observation_and_takes_no_time(expression):
    began = time.perf_counter()
    assert said(expression).startswith("<result>error: ")
    assert time.perf_counter() - began < 1


def test_a_turn_without_an_expression_ends_the_episode():
    assert Calculator(most_characters=9).step("the answer is 14").done
    assert not Calculator(most_characters=9).step("<calculator>1+1</calculator>").done


def test_a_number_game_says_higher_and_lower_until_the_number_is_found():
    game = NumberGame(most_guesses=4)
    game.reset({"answer": "37"})
    guesses = ("50", "20", "37")
    replies = [game.step(f"<guess>{guess}</guess>") for guess in guesses]
    assert [reply.observation.strip() for reply in replies] == ["lower", "higher", ""]
    assert [reply.done for reply in replies] == [False, False, True]
    assert environment.reward([""], [replies[-1].metrics]) == [1.0]


def test_a_number_game_ends_after_its_guesses_and_not_after_a_turn_without_one():
    game = NumberGame(most_guesses=2)
    game.reset({"answer": 3})
    assert [game.step(text).done for text in ("hm", "<guess>1</guess>", "hm", "<guess>2</guess>")] == [False] * 3 + [
        True
    ]


class Corridor:
    """A game of gymnasium's interface: go east to the end."""

    def reset(self, *, seed: int):
        self.left = seed
        return f"{seed} steps", {}

    def step(self, action: str):
        self.left -= action == "east"
        return f"{self.left} steps", float(self.left == 0), self.left == 0, False, {}


def test_a_game_with_the_interface_of_gymnasium_is_an_environment():
    game = Gym(make="tests.test_envs.Corridor", stop="\n", seed_column="seed")
    game.reset({"seed": 2})
    replies = [game.step(action + "\n") for action in ("east", "west", "east")]
    assert [reply.observation for reply in replies] == ["1 steps", "1 steps", ""]
    assert [reply.metrics["reward"] for reply in replies] == [0.0, 0.0, 1.0]
    assert replies[-1].done


def test_a_game_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"config.env.make = 'tests.test_envs.Maze'"):
        Gym(make="tests.test_envs.Maze", stop="\n", seed_column="seed")
