"""Rubrics: the criteria by which a judge scores an answer, their weights, and its scores as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

__all__: tuple[str, ...] = ()  # a config may name no function of this file

KEYS = ("criterion", "description", "weight", "most", "name")  # keys of a criterion; "description" means "criterion"
MARKDOWN = " \t\r\n`*_."  # characters that may follow the scores at the end of a reply
# A score as text, and the best score that the text may name.
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
    """A criterion by which a judge scores an answer."""

    name: str  # name in the judge's reply and of the metric
    text: str
    weight: float  # a weight below 0 means that the answer should not do this
    most: float  # the best score; the worst is 0


Rubric: TypeAlias = tuple[Criterion, ...]


def read(value: Any, most: float) -> Rubric:
    """Returns the rubric in a list of {"criterion" or "description", "weight", "most", "name"}, or in its JSON text.

    A criterion needs only its text: weight is 1 by default, "most" the argument `most`, and name its number.
    Raises: ValueError, with the problem and the fix.
    """
    items = json.loads(value) if isinstance(value, str) else value
    items = items.tolist() if hasattr(items, "tolist") else items
    if not isinstance(items, (list, tuple)) or not items:
        raise ValueError(f"the rubric is {items!r:.200}, but must be a list of criteria")
    rubric = tuple(_criterion(item, number, most) for number, item in enumerate(items, 1))
    if len({criterion.name for criterion in rubric}) < len(rubric):
        raise ValueError("two criteria of the rubric have the same name: rename one of them")
    if not any(criterion.weight > 0 for criterion in rubric):
        raise ValueError("the rubric must have at least one criterion with a weight above 0")
    return rubric


def _criterion(value: Any, number: int, most: float) -> Criterion:
    """Returns a criterion of a rubric's list. number: its place in the list, from 1. Raises: ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"criterion {number} is {value!r:.200}, but must be a dict with {', '.join(KEYS)}")
    # Keys that hold None count as missing, because a Parquet file has every key in every row.
    stated = {key: x for key, x in value.items() if x is not None}
    text, weight = stated.get("criterion", stated.get("description")), stated.get("weight", 1.0)
    best, name = stated.get("most", most), stated.get("name", str(number))
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"criterion {number} is {value!r:.200}, but must have a text as 'criterion' or 'description'")
    if not _is_number(weight) or weight == 0:
        raise ValueError(f"criterion {number} has the weight {weight!r}, but must have a number other than 0")
    if not _is_number(best) or best <= 0:
        raise ValueError(f"criterion {number} has most = {best!r}, but must have a number above 0")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"criterion {number} has the name {name!r}, but must have text as its name")
    return Criterion(name, text.strip(), float(weight), float(best))


def described(rubric: Rubric) -> str:
    """Returns the criteria and the form of the reply as text for the question to the judge."""
    lines = [f"- {criterion.name}: {criterion.text} (0 to {criterion.most:g})" for criterion in rubric]
    example = json.dumps({criterion.name: criterion.most / 2 for criterion in rubric})
    return (
        "The criteria, each with its name and with the range of its score, from not at all to fully:\n"
        + "\n".join(lines)
        + "\n\nThink about each in a sentence. Then end with one JSON object that has the score of each criterion "
        f"under its name, like this: {example}"
    )


def scores(reply: str | None, rubric: Rubric) -> list[float] | None:
    """Returns the score of each criterion as a share of its best score, from the last JSON object of a judge's reply.

    Only objects with the name of a criterion count. Returns None if the reply has no such object, if the object lacks a
    criterion or has a value that is no number in its range, or if text follows it and another object differs from it.
    """
    text, names = reply or "", {criterion.name for criterion in rubric}
    scored_objects = [(scored, end) for value, end in _objects(text) if (scored := _with_names(value, names))]
    if not scored_objects:
        return None
    scored, end = scored_objects[-1]
    # If text follows the last object, that object may be a quotation from the answer, so all objects must agree.
    if text[end:].strip(MARKDOWN) and any(candidate != scored for candidate, _ in scored_objects):
        return None
    shares = [share(scored.get(criterion.name), criterion.most) for criterion in rubric]
    return None if None in shares else [x for x in shares if x is not None]


def share(score: Any, best: float) -> float | None:
    """Returns a score as a share of the best score; None if it is no score between 0 and the best one.

    score: a number, {"score": number}, or text such as 8, **8** or 8 out of 10, which may name another best score.
    """
    value: Any = score.get("score") if isinstance(score, dict) else score
    if isinstance(value, str):
        if not (match := SCORE.fullmatch(value)):
            return None
        value, best = float(match[1]), float(match[2] or best)
    return value / best if _is_number(value) and 0 <= value <= best and best > 0 else None


def total(shares: list[float], rubric: Rubric) -> float:
    """Returns sum(w s) / sum(positive w), limited to 0…1, for weights w and shares s.

    Criteria with negative weights subtract points, as in HealthBench (arXiv 2505.08775).
    """
    points = sum(criterion.weight * share for criterion, share in zip(rubric, shares, strict=True))
    return min(max(points / sum(max(criterion.weight, 0.0) for criterion in rubric), 0.0), 1.0)


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each outermost JSON object of a text, and the index of its end."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            yield value, end
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)


def _with_names(value: dict[str, Any], names: set[str]) -> dict[str, Any] | None:
    """Returns the object with one of the names as a key: `value`, or an object in it, such as {"scores": {...}}."""
    objects = [value, *(x for x in value.values() if isinstance(x, dict))]
    return next((x for x in objects if names & x.keys()), None)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
