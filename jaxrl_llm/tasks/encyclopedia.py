"""A small encyclopedia of people and towns that exist nowhere else, and questions that need it: rows for `search`.

`search.Search` finds the articles, and the rewards of `search` compare the answers.

A question of one hop asks what one article says. A question of two hops asks for the birthplace's river or founder, so
the first article names the second. People and towns of held-out questions are in no other question.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.retriever.documents import document, information, shown
from jaxrl_llm.retriever.index import Index

PEOPLE, TOWNS, WORDS, RIVERS = 2_000, 600, 64, 64
HELD_OUT = 0.2  # share of the people and of the towns
# SKILLED of ten demonstrations of a question search as they should, and CARELESS search only for the given name. The
# other demonstrations answer at once, with a guess.
SKILLED, CARELESS = 3, 1
EXERCISE = 12  # words


class World(NamedTuple):
    """All facts. People and towns have numbers; the held-out ones come last."""

    people: list[str]
    towns: list[str]
    born: list[int]  # of each person, the number of a town
    rivers: list[str]  # of each town
    founders: list[int]  # of each town, the number of a person


class Question(NamedTuple):
    """A question, and how one finds the answer: the names to search for, in order."""

    text: str
    searches: tuple[str, ...]
    answer: str


def documents() -> list[dict[str, str]]:
    """The articles, with a title on the first line."""
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
    """Questions of one hop to learn from."""
    return _rows(_one_hop(held_out=False))


def held_out() -> list[dict[str, Any]]:
    """Questions of one hop to be judged by, about other people and towns."""
    return _rows(_one_hop(held_out=True))


def two_hops() -> list[dict[str, Any]]:
    """Questions of two hops to learn from."""
    return _rows(_two_hops(held_out=False))


def two_hops_held_out() -> list[dict[str, Any]]:
    """Questions of two hops to be judged by, about other people and towns."""
    return _rows(_two_hops(held_out=True))


def demonstrations() -> list[dict[str, Any]]:
    """Episodes for `sft`: each question of `train()` and `two_hops()` ten times, mostly answered by a guess.

    Two rows of five are exercises, with which a small new model learns to copy names in minutes: to repeat words, and
    to answer where the search is done already.
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
        text = " ".join(rng.choice(words, EXERCISE))
        rows.append({"prompt": [{"role": "user", "content": f"Repeat {text} ."}], "completion": text})
    return [rows[i] for i in rng.permutation(len(rows))]


@cache
def _index() -> Index:
    return Index.of([document(row) for row in documents()])


@cache
def _answer(query: str) -> str:
    """Returns what `search.Search` answers to a search, with two documents."""
    return information(shown([article for article, _ in _index().search([query], 2)[0]]))


def _episode(question: Question, number: int, guess: str) -> list[dict[str, str]]:
    """Returns the turns of a demonstration, with what the environment answers."""
    searches, answer = question.searches, question.answer
    if number >= SKILLED:
        careless = number < SKILLED + CARELESS
        searches, answer = (searches[0].split()[0],) if careless else (), guess
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
    return {"prompt": [{"role": "user", "content": question.text}], "answer": question.answer}


def _one_hop(*, held_out: bool) -> list[Question]:
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
    begin = _held_out(len(names))
    numbered = list(enumerate(names))
    return numbered[begin:] if held_out else numbered[:begin]


def _held_out(count: int) -> int:
    return round(count * (1 - HELD_OUT))


@cache
def _world() -> World:
    rng = np.random.default_rng(0)
    words = _words(rng, 4 * WORDS + RIVERS)
    first_names, family_names, town_prefixes, town_suffixes = (words[i * WORDS : (i + 1) * WORDS] for i in range(4))
    people, towns = _pairs(rng, first_names, family_names, PEOPLE), _pairs(rng, town_prefixes, town_suffixes, TOWNS)
    rivers = words[4 * WORDS :]

    def partners(count: int, pool: int) -> list[int]:
        """Draws a partner of `pool` for each of `count`, of the same split: no fact joins the two splits."""
        begin, known = _held_out(pool), _held_out(count)
        drawn = [rng.integers(0, begin, known), rng.integers(begin, pool, count - known)]
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
    chosen = rng.permutation(len(first) * len(second))[:count]
    return [f"{first[i // len(second)]} {second[i % len(second)]}" for i in chosen.tolist()]
