"""The rewards that veRL chooses by the column data_source of a row (`verl/utils/reward_score/__init__.py`).

Answers are compared by the functions of this package: numbers by value, boxes by math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from jaxrl_llm.rewards import gsm8k, search, text_of
from jaxrl_llm.rewards import math as maths

__all__ = ["accuracy", "score"]

Judge: TypeAlias = Callable[[list[Any], list[Any]], list[float]]
ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
LAST = 300  # characters at the end of a completion in which "Answer:" is looked for, as in veRL


def score(completions: list[Any], answer: list[Any], data_source: list[Any], **columns: Any) -> list[float]:
    """The score of veRL: 1 or -1 for math_dapo and aime*, whose answer is after "Answer:", and 1 or 0 for the others.

    Raises: ValueError, for a data_source that has no rule here.
    """
    right = accuracy(completions, answer, data_source)
    signed = [_judge(source) is _after_answer for source in data_source]
    return [2 * r - 1 if s else r for r, s in zip(right, signed, strict=True)]


def accuracy(completions: list[Any], answer: list[Any], data_source: list[Any], **columns: Any) -> list[float]:
    """1 where the completion is right by the rule of its data_source, else 0.

    gsm8k: `gsm8k.accuracy`; math_dapo and aime*: what follows the last "Answer:"; other data sources of mathematics:
    `math.accuracy`; searchR1_*: `search.exact_match`. Raises: ValueError, as `score`.
    """
    judges, right = [_judge(source) for source in data_source], [0.0] * len(completions)
    for judge in dict.fromkeys(judges):  # once each, because math-verify judges many answers at the same time
        rows = [i for i, one in enumerate(judges) if one is judge]
        found = judge([text_of(completions[i]) for i in rows], [answer[i] for i in rows])
        for i, value in zip(rows, found, strict=True):
            right[i] = value
    return right


def _judge(source: Any) -> Judge:
    for pattern, judge in JUDGES:
        if re.fullmatch(pattern, str(source), re.IGNORECASE):
            return judge
    raise ValueError(f"data_source is {source!r}, for which verl.score has no rule: name a function for these rows")


def _after_answer(completions: list[Any], answer: list[Any]) -> list[float]:
    said = [ANSWER.findall(text[-LAST:])[-1:] for text in completions]
    return maths.accuracy([f"\\boxed{{{found[0].strip()}}}" if found else "" for found in said], answer)


JUDGES: tuple[tuple[str, Judge], ...] = (
    (r".*gsm8k.*", gsm8k.accuracy),
    (r"math|math_dapo.*|aime.*", _after_answer),
    (r"searchR1_.*", search.exact_match),
    (r".*math.*|numina.*", maths.accuracy),
)
