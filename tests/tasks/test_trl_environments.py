"""Environment classes in TRL's form: the shapes of TRL's examples, rebuilt, and what is refused before a run."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import numpy as np
import pytest
from test_tools import LIMITS, TEMPLATE, call
from tiny import byte_tokenizer

from jaxrl_llm.data import prompts as data
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.environments import EnvironmentBatch, EnvironmentPool
from jaxrl_llm.tasks import environment
from jaxrl_llm.tasks.trl import Environments

HERE = "tests.tasks.test_trl_environments."


class WordGame:
    """The shape of TRL's Wordle: a text at the start, a guess as the only tool, and a reward from the state."""

    made = count()

    def __init__(self):
        self.number = next(self.made)
        self.rows: list[dict[str, Any]] = []

    def reset(self, **row: Any) -> str | None:
        self.rows.append(row)
        self.word, self.reward, self.over = row["word"], 0.0, False
        return f" The word has {len(self.word)} letters."

    def guess(self, word: str) -> str:
        """
        Guesses the word.

        Args:
            word: the guess

        Returns:
            A letter where it is right, and a dot where it is not.
        """
        if self.over:
            raise ValueError("the game is over")
        marks = "".join(a if a == b else "." for a, b in zip(word, self.word, strict=False))
        self.reward, self.over = max(self.reward, 1 - marks.count(".") / len(self.word)), word == self.word
        return marks

    def get_reward(self) -> float:
        return self.reward

    @property
    def secret(self) -> str:
        raise RuntimeError("a property is no tool")

    def _hidden(self) -> None: ...


class Table:
    """The shape of TRL's question answering with a database: no text, an async tool, and sometimes no verdict."""

    def reset(self, facts: dict[str, int], **row: Any) -> None:
        self.facts, self.found = facts, 0

    async def look_up(self, key: str, digits: int = 3) -> dict[str, int]:
        """
        Looks up a number.

        Args:
            key: what to look up
            digits: how many digits to return
        """
        self.found += 1
        return {key: self.facts[key] % 10**digits}

    async def get_reward(self) -> float | None:
        return float(self.found) if self.found else None


class Names:
    """The arguments of its tool have names that the trainer uses too."""

    def reset(self, **row: Any) -> None: ...

    def tool(self, name: str, method: str) -> str:
        """
        Joins two texts.

        Args:
            name: the first
            method: the second
        """
        return name + method

    def get_reward(self) -> float:
        return 1.0


class NoReset:
    def tool(self) -> str:
        """Returns nothing."""
        return ""


class NoMethods:
    def reset(self, **row: Any) -> None: ...

    def get_reward(self) -> float:
        return 0.0


class NoTypes(NoMethods):
    def tool(self, x):
        """
        Returns nothing.

        Args:
            x: nothing
        """


class NoDocstring(NoMethods):
    def tool(self, x: int) -> int:
        return x


class NoPackage(NoMethods):
    def __init__(self):
        import no_such_package  # type: ignore # noqa: F401


class Dice(NoMethods):
    """Its first text is another one each time."""

    thrown = count()

    def reset(self, **row: Any) -> str:
        return f" You see {next(self.thrown)}."

    def throw(self) -> int:
        """Throws the dice again."""
        return next(self.thrown)


def pool(factory: Any = HERE + "WordGame") -> EnvironmentPool:
    return EnvironmentPool(byte_tokenizer(TEMPLATE), lambda: Environments(factory=factory), **LIMITS)


def chat(**columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "Play."}], **columns}


def played(made: EnvironmentPool, batch: EnvironmentBatch, i: int, *turns: str) -> list[str | None]:
    """What follows each turn of episode i."""
    ids = [made.tokenizer(turn + "<|im_end|>", add_special_tokens=False)["input_ids"] for turn in turns]
    answers = [batch.answer(i, turn).result() for turn in ids]
    return [answer and made.tokenizer.decode(answer) for answer in answers]


def results(text: str | None) -> list[str]:
    assert text
    return [part.partition("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]


def test_a_game_of_trl_is_played_and_pays_what_its_state_says():
    made = pool()
    rows = made.prepare_rows([chat(word="stone"), chat(word="cloud")])
    assert [row["prompt"][-1]["content"] for row in rows] == [f"Play. The word has {n} letters." for n in (5, 5)]
    batch = made.start_batch(rows, 2)
    first = played(made, batch, 0, call("guess", word="store"), call("guess", word="stone"), call("guess", word="x"))
    assert [results(text) for text in first] == [["sto.e"], ["stone"], ["error: ValueError: the game is over"]]
    assert played(made, batch, 3, call("guess", word="xxxxx"), "I give up.")[-1] is None
    batch.finish()
    batch.finish()  # an episode is finished once
    metrics = batch.metrics()
    np.testing.assert_allclose(metrics["reward"], [[1.0, 0.0], [0.0, 0.0]])
    assert metrics["unscored"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert metrics["errors"].tolist() == [[1.0, 0.0], [0.0, 0.0]] and metrics["turns"].tolist() == [[3, 0], [0, 2]]


def test_reset_gets_the_row_of_the_source_and_objects_serve_again():
    made = pool()
    (row,) = made.prepare_rows([chat(word="stone", level=3)])
    seen = []
    for _ in range(3):
        batch = made.start_batch([row], 1)
        game = batch._episodes[0].environment._object  # type: ignore[attr-defined]
        assert game.rows[-1] == chat(word="stone", level=3)
        seen.append(game.number)
        batch.finish()
    assert len(set(seen)) == 1


def test_the_tools_of_trl_are_the_public_methods_in_transformers_form():
    (schema,) = pool().schemas
    assert schema["function"]["name"] == "guess"
    assert schema["function"]["parameters"]["properties"] == {"word": {"type": "string", "description": "the guess"}}


def test_a_column_chooses_the_environment_with_its_own_tools():
    made = pool({"game": HERE + "WordGame", "table": HERE + "Table"})
    sources = [chat(environment="game", word="stone"), chat(environment="table", facts={"a": 12345})]
    rows = list(made.prepare_rows(sources))
    made.check(rows)
    dataset = data.tokenize(rows, made.tokenizer, max_prompt_tokens=4000, overlong="error")
    texts = [made.tokenizer.decode(ids) for ids in dataset.ids]
    assert ['"guess"' in text for text in texts] == [True, False]
    assert ['"look_up"' in text for text in texts] == [False, True]
    batch = made.start_batch(dataset.rows, 1)
    (answer,) = played(made, batch, 1, call("look_up", key="a") + call("guess", word="x"))
    assert json.loads(results(answer)[0]) == {"a": 345}
    assert results(answer)[1].startswith("error: this is no call of look_up")
    batch.finish()
    assert [c["reward"] for c in (e.metric_sums for e in batch._episodes)] == [0.0, 1.0]
    with pytest.raises(UserError, match="'film'"):
        made.prepare_rows([chat(environment="film")])


def test_an_episode_without_a_verdict_is_unscored_and_not_zero():
    made = pool(HERE + "Table")
    rows = made.prepare_rows([chat(facts={"a": 1})])
    batch = made.start_batch(rows, 2)
    played(made, batch, 1, call("look_up", key="a"))
    batch.finish()
    assert batch.metrics()["unscored"].tolist() == [[1.0, 0.0]]
    episodes = [{name: float(x[0, g]) for name, x in batch.metrics().items()} for g in range(2)]
    assert environment.reward(["", ""], episodes) == [None, 1.0]


def test_a_resumed_episode_that_had_ended_keeps_its_reward_once():
    made = pool(HERE + "Names")  # pays for every episode
    rows = made.prepare_rows([chat()])
    batch, resumed = made.start_batch(rows, 2), made.start_batch(rows, 2)
    said = '<tool_call>{"name": "tool", "arguments": {"name": "a", "method": "b"}}</tool_call>'
    assert [results(played(made, batch, i, said)[0]) for i in range(2)] == [["ab"], ["ab"]]
    has_ended = np.array([[True, False]])
    batch.finish(has_ended)
    turn = made.tokenizer(said + "<|im_end|>", add_special_tokens=False)["input_ids"]
    resumed.replay([[], [turn]], batch.metrics(), batch.truncated, has_ended)
    for one in (batch, resumed):
        one.finish()
        assert one.metrics()["reward"].tolist() == [[1.0, 1.0]] and one.metrics()["turns"].tolist() == [[1.0, 1.0]]


def test_a_reset_that_fails_or_differs_costs_its_episode_only():
    made = pool()
    rows = made.prepare_rows([chat(word="stone"), chat(word="cloud"), chat(word="river")])
    changed = [rows[0] | {"environment_text": " Another text."}, {k: x for k, x in rows[1].items() if k != "word"}]
    with pytest.warns(UserWarning, match="reset_errors"):
        batch = made.start_batch([*changed, rows[2]], 1)
    assert [played(made, batch, i, call("guess", word="river"))[0] is None for i in range(3)] == [True, True, False]
    batch.finish()
    metrics = batch.metrics()
    assert metrics["reset_differs"].tolist() == [[1.0], [0.0], [0.0]]
    assert metrics["reset_errors"].tolist() == [[0.0], [1.0], [0.0]]
    assert metrics["unscored"].tolist() == [[1.0], [1.0], [0.0]]


@pytest.mark.parametrize(
    ("named", "factory"),
    [
        ("no_such_module.Game", "no_such_module.Game"),
        ("NoReset", HERE + "NoReset"),
        ("NoMethods", HERE + "NoMethods"),
        ("config.env.factory = {}", {}),
        ("config.env.factory = {'a': 3}", {"a": 3}),
    ],
    ids=["no module", "no reset", "no methods", "no names", "no text"],
)
def test_a_class_that_cannot_serve_is_refused_before_a_run(named, factory, refused):
    with refused("config.env.factory", named):
        pool(factory)


def test_a_class_that_does_not_exist_is_refused_before_a_run():
    with pytest.raises(UserError, match=r"config\.env\.factory .*WordGam' does not exist"):  # lists all of this file
        pool(HERE + "WordGam")


@pytest.mark.parametrize(
    ("name", "word"), [("NoTypes", "Args:"), ("NoDocstring", "Args:"), ("NoPackage", "no_such_package")]
)
def test_a_class_without_types_docstring_or_package_is_refused(name, word):
    # The rest of the message names a line of a file.
    with pytest.raises(UserError, match=rf"config\.env\.factory = '{HERE}{name}': .*{word}"):
        pool(HERE + name)


def test_rows_that_cannot_open_an_episode_are_refused_before_a_run(refused):
    with refused("text"):
        pool().prepare_rows([{"prompt": "Play.", "word": "stone"}])
    with refused("'tools'"):
        pool({"game": HERE + "WordGame"}).prepare_rows([chat(environment="game", word="stone", tools=[{}])])
    with refused("two texts"):
        pool(HERE + "Dice").prepare_rows([chat()])
    with pytest.raises(UserError, match="does not accept a row"):
        pool().prepare_rows([chat()])
