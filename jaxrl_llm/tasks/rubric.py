"""Rubrics: the criteria by which a judge scores an answer, their weights, and its scores as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

__all__: tuple[str, ...] = ()  # nothing here is for a config to name

KEYS = ("criterion", "description", "weight", "most", "name")  # of a criterion; description stands for criterion
MARKDOWN = " \t\r\n`*_."  # what may stand behind the scores that end a reply
# A score as text, and the best score that it names.
SCORE = re.compile(
    r"[\s*_]*(-?(?:\d+(?:\.\d*)?|\.\d+))[\s*_]*(?:(?:/|(?:out )?of\b)[\s*_]*(\d+(?:\.\d+)?)[\s*_]*)?", re.ASCII
)
QUESTION = """You judge the answer of an assistant by criteria, each on its own.

The conversation:
{prompt}

The answer:
{completion}

{rubric}"""


class Criterion(NamedTuple):
    """What an answer is judged by."""

    name: str  # in the judge's reply, and of its metric
    text: str
    weight: float  # below 0: the answer should not do this
    most: float  # the best score; the worst is 0


Rubric: TypeAlias = tuple[Criterion, ...]


def read(value: Any, most: float) -> Rubric:
    """Returns the criteria of a list of {"criterion" or "description", "weight", "most", "name"}, or of its JSON.

    All but the text may be missing: weight is 1 then, most that of the judge, and the name the number in the list.
    Raises: ValueError, saying what is wrong and what helps.
    """
    listed = json.loads(value) if isinstance(value, str) else value
    listed = listed.tolist() if hasattr(listed, "tolist") else listed
    if not isinstance(listed, (list, tuple)) or not listed:
        raise ValueError(f"the rubric is {listed!r:.200}: give a list of criteria")
    rubric = tuple(_criterion(each, number, most) for number, each in enumerate(listed, 1))
    if len({criterion.name for criterion in rubric}) < len(rubric):
        raise ValueError("two criteria of the rubric have one name: rename one")
    if not any(criterion.weight > 0 for criterion in rubric):
        raise ValueError("no criterion of the rubric has a weight above 0: give one of them such a weight")
    return rubric


def _criterion(value: Any, number: int, most: float) -> Criterion:
    if not isinstance(value, Mapping):
        raise ValueError(f"criterion {number} is {value!r:.200}: give a dict with {', '.join(KEYS)}")
    # Parquet has every key in every row, and None where there is nothing.
    stated = {key: x for key, x in value.items() if x is not None}
    text, weight = stated.get("criterion", stated.get("description")), stated.get("weight", 1.0)
    best, name = stated.get("most", most), stated.get("name", str(number))
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"criterion {number} is {value!r:.200}: give its text as 'criterion' or 'description'")
    if not _is_number(weight) or weight == 0:
        raise ValueError(f"criterion {number} has the weight {weight!r}: give a number other than 0")
    if not _is_number(best) or best <= 0:
        raise ValueError(f"criterion {number} has most = {best!r}: give a number above 0")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"criterion {number} has the name {name!r}: give text")
    return Criterion(name, text.strip(), float(weight), float(best))


def described(rubric: Rubric) -> str:
    """Returns the criteria and the form of the reply, for the question to the judge."""
    lines = [f"- {each.name}: {each.text} (0 to {each.most:g})" for each in rubric]
    example = json.dumps({each.name: each.most / 2 for each in rubric})
    return (
        "The criteria, each with its name and with the range of its score, from not at all to fully:\n"
        + "\n".join(lines)
        + "\n\nThink about each in a sentence. Then end with one JSON object that has the score of each criterion "
        f"under its name, like this: {example}"
    )


def scores(reply: str | None, rubric: Rubric) -> list[float] | None:
    """Returns the score of each criterion as a share of its best one, from the last JSON object of a judge's reply.

    Only objects with the name of a criterion count. None: there is no such object; it lacks a criterion, or has
    anything but a number in its range; or it does not end the reply, and another one says something else.
    """
    text, names = reply or "", {each.name for each in rubric}
    scored_objects = [(scored, end) for value, end in _objects(text) if (scored := _with_names(value, names))]
    if not scored_objects:
        return None
    scored, end = scored_objects[-1]
    # A judge may quote an object of the answer after its scores.
    if text[end:].strip(MARKDOWN) and any(other != scored for other, _ in scored_objects):
        return None
    shares = [share(scored.get(each.name), each.most) for each in rubric]
    return None if None in shares else [x for x in shares if x is not None]


def share(score: Any, best: float) -> float | None:
    """Returns a score as a share of the best one: a number, {"score": number}, or text such as 8, **8** or 8 out of 10.

    The text may name another best score than `best`. None: it is no such score, or not within 0 and the best one.
    """
    value: Any = score.get("score") if isinstance(score, dict) else score
    if isinstance(value, str):
        if not (match := SCORE.fullmatch(value)):
            return None
        value, best = float(match[1]), float(match[2] or best)
    return value / best if _is_number(value) and 0 <= value <= best and best > 0 else None


def total(shares: list[float], rubric: Rubric) -> float:
    """Returns sum w s / sum of the positive w, within 0 and 1: the weighted mean where all weights are positive.

    The points that criteria of negative weight take away are as in HealthBench (arXiv 2505.08775).
    """
    points = sum(each.weight * share for each, share in zip(rubric, shares, strict=True))
    return min(max(points / sum(max(each.weight, 0.0) for each in rubric), 0.0), 1.0)


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each JSON object of a text that is in no other one, and where it ends."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            yield value, end
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)


def _with_names(value: dict[str, Any], names: set[str]) -> dict[str, Any] | None:
    """Returns the object that has one of the names: the value, or one in it, such as {"scores": {...}}."""
    objects = [value, *(x for x in value.values() if isinstance(x, dict))]
    return next((x for x in objects if names & x.keys()), None)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
