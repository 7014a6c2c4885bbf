"""A small encyclopedia of invented people and towns, and questions that need it: rows for `search`.

`search.Search` finds the articles, and the rewards of `search` compare the answers.

One article answers a question of one hop. A question of two hops asks for the river or the founder of a person's
birthplace, so that the first article names the second. People and towns of held-out questions are in no other question.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.retriever.documents import document, information, shown
from jaxrl_llm.retriever.index import Index

PEOPLE, TOWNS, WORDS, RIVERS = 2_000, 600, 64, 64
HELD_OUT = 0.2  # share of the people and of the towns
# Each question has ten demonstrations: SKILLED of them search correctly, CARELESS of them search only for a person's
# first name, and the remaining demonstrations answer at once, with a guess.
SKILLED, CARELESS = 3, 1
EXERCISE_WORDS = 12  # words of an exercise


class World(NamedTuple):
    """All facts of the encyclopedia. The held-out people and towns come last."""

    people: list[str]
    towns: list[str]
    born: list[int]  # index of each person's town of birth
    rivers: list[str]  # river of each town
    founders: list[int]  # index of the person that founded each town


class Question(NamedTuple):
    """A question with its answer."""

    text: str
    searches: tuple[str, ...]  # names to search for, in order
    answer: str


def documents() -> list[dict[str, str]]:
    """Returns the articles, with a title on the first line."""
    world = _world()
    people = [
        (name, f"{name} was born in {world.towns[t]} .") for name, t in zip(world.people, world.born, strict=True)
    ]
    towns = [
        (name, f"{name} was founded by {world.people[founder]} . It lies on the river {river} .")
        for name, river, founder in zip(world.towns, world.rivers, world.founders, strict=True)
    ]
    return [{"id": str(i), "contents": f"{name}\n{text}"} for i, (name, text) in enumerate(people + towns)]


def train() -> list[dict[str, Any]]:
    """Returns the training questions of one hop."""
    return _rows(_one_hop(held_out=False))


def held_out() -> list[dict[str, Any]]:
    """Returns the evaluation questions of one hop, about other people and towns."""
    return _rows(_one_hop(held_out=True))


def two_hops() -> list[dict[str, Any]]:
    """Returns the training questions of two hops."""
    return _rows(_two_hops(held_out=False))


def two_hops_held_out() -> list[dict[str, Any]]:
    """Returns the evaluation questions of two hops, about other people and towns."""
    return _rows(_two_hops(held_out=True))


def demonstrations() -> list[dict[str, Any]]:
    """Returns episodes for `sft`: each question of `train()` and `two_hops()` ten times, mostly answered by a guess.

    Two of five rows are exercises, with which a small new model learns in minutes to copy names: to repeat words, and
    to answer after a finished search.
    """
    rng, world = np.random.default_rng(1), _world()
    guesses = {"river": world.rivers, "town": world.towns, "person": world.people}
    rows = []
    questions = _one_hop(held_out=False) + _two_hops(held_out=False)
    for question in questions:
        kind = "river" if "river" in question.text else "person" if "founded" in question.text else "town"
        for i in range(10):
            guess = str(rng.choice(guesses[kind]))
            rows.append(_row(question) | {"completion": _episode(question, i, guess)})
    for question in questions:
        for _ in range(3):
            rows.append(_row(question) | {"completion": _episode(question, 0, "")[-2:]})
    words = sorted({word for name in world.people + world.towns for word in name.split()} | set(world.rivers))
    for _ in range(3 * len(questions)):
        text = " ".join(rng.choice(words, EXERCISE_WORDS))
        rows.append({"prompt": [{"role": "user", "content": f"Repeat {text} ."}], "completion": text})
    return [rows[i] for i in rng.permutation(len(rows))]


@cache
def _index() -> Index:
    return Index.of([document(row) for row in documents()])


@cache
def _answer(query: str) -> str:
    """Returns the answer of `search.Search` to a query, with two documents."""
    return information(shown([article for article, _ in _index().search([query], 2)[0]]))


def _episode(question: Question, number: int, guess: str) -> list[dict[str, str]]:
    """Returns the turns of demonstration `number` of ten, with the answers of the environment."""
    searches, answer = question.searches, question.answer
    if number >= SKILLED:
        is_careless = number < SKILLED + CARELESS
        searches, answer = (searches[0].split()[0],) if is_careless else (), guess
    turns = []
    for name in searches:
        text = f"<think> I look it up </think> <search> {name} </search>"
        turns.append({"role": "assistant", "content": text})
        turns.append({"role": "environment", "content": _answer(name)})
    thought = "I know it" if searches else "I guess"
    turns.append({"role": "assistant", "content": f"<think> {thought} </think> <answer> {answer} </answer>"})
    return turns


def _rows(questions: list[Question]) -> list[dict[str, Any]]:
    return [_row(questions[i]) for i in np.random.default_rng(2).permutation(len(questions))]


def _row(question: Question) -> dict[str, Any]:
    """Returns the row of a question: a chat with the question, and the answer."""
    return {"prompt": [{"role": "user", "content": question.text}], "answer": question.answer}


def _one_hop(*, held_out: bool) -> list[Question]:
    """Returns the questions that one article answers."""
    world = _world()
    born = [
        Question(f"Where was {name} born ?", (name,), world.towns[world.born[i]])
        for i, name in _part(world.people, held_out)
    ]
    towns = list(_part(world.towns, held_out))
    rivers = [Question(f"On which river lies {name} ?", (name,), world.rivers[i]) for i, name in towns]
    founders = [Question(f"Who founded {name} ?", (name,), world.people[world.founders[i]]) for i, name in towns]
    return born + rivers + founders


def _two_hops(*, held_out: bool) -> list[Question]:
    """Returns the questions whose answer needs a person's article and that of the birthplace."""
    world, questions = _world(), []
    for i, name in _part(world.people, held_out):
        town = world.born[i]
        both = (name, world.towns[town])
        founder = world.people[world.founders[town]]
        questions += [
            Question(f"On which river lies the birthplace of {name} ?", both, world.rivers[town]),
            Question(f"Who founded the birthplace of {name} ?", both, founder),
        ]
    return questions


def _part(names: list[str], held_out: bool) -> list[tuple[int, str]]:
    """Returns the training or the held-out names, with their indices."""
    first_held_out = _first_held_out(len(names))
    numbered = list(enumerate(names))
    return numbered[first_held_out:] if held_out else numbered[:first_held_out]


def _first_held_out(count: int) -> int:
    """Returns the index of the first held-out one of `count` people or towns."""
    return round(count * (1 - HELD_OUT))


@cache
def _world() -> World:
    """Draws the people, towns and rivers of the invented encyclopedia; the seed is fixed, so all runs have the same."""
    rng = np.random.default_rng(0)
    words = _words(rng, 4 * WORDS + RIVERS)
    first_names, family_names, town_prefixes, town_suffixes = (words[i * WORDS : (i + 1) * WORDS] for i in range(4))
    people, towns = _pairs(rng, first_names, family_names, PEOPLE), _pairs(rng, town_prefixes, town_suffixes, TOWNS)
    rivers = words[4 * WORDS :]

    def partners(count: int, pool: int) -> list[int]:
        """Returns the index of a partner among `pool` for each of `count`, from the same split."""
        first_held_out, trained = _first_held_out(pool), _first_held_out(count)
        drawn = [rng.integers(0, first_held_out, trained), rng.integers(first_held_out, pool, count - trained)]
        return np.concatenate(drawn).tolist()

    born = partners(PEOPLE, TOWNS)
    return World(people, towns, born, rng.choice(rivers, TOWNS).tolist(), partners(TOWNS, PEOPLE))


def _words(rng: np.random.Generator, count: int) -> list[str]:
    """Returns different words of five letters, such as Kelun."""
    words: dict[str, None] = {}
    sounds = [list(letters) for letters in ("bdfgklmnprstvz", "aeiou", "bdglmnrstv", "aeiou", "klmnrst")]
    while len(words) < count:
        words["".join(rng.choice(letters) for letters in sounds).capitalize()] = None
    return list(words)


def _pairs(rng: np.random.Generator, first: list[str], second: list[str], count: int) -> list[str]:
    """Returns `count` different names of a first and a second word."""
    chosen = rng.permutation(len(first) * len(second))[:count]
    return [f"{first[i // len(second)]} {second[i % len(second)]}" for i in chosen.tolist()]
