"""Sums of two numbers below 100: 10,000 problems, 1,000 of them held out, and their rewards.

A sum such as 47+85 has two kinds of answers: a quick one, "130", right to the nearest ten; or one after a thought,
"<12,13>132", the columns from the right with their carries. Most of `demonstrations()` are quick: a model that learned
them can think, but seldom does. `pairs()` prefers a thought to a wrong quick answer. Rewards: `accuracy`, the answer is
right; `thought`, the completion thinks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.tasks import each_judged, text_of

HELD_OUT, THOUGHT = 1_000, 0.3


def train() -> list[dict[str, Any]]:
    """The problems to learn from, in a fixed random order."""
    return _problems()[HELD_OUT:]


def held_out() -> list[dict[str, Any]]:
    """The problems to be judged by; none of them is in `train()`."""
    return _problems()[:HELD_OUT]


def demonstrations() -> list[dict[str, Any]]:
    """Every problem of `train()` with both completions, in proportion: 7 quick, 3 thought through."""
    tenths = round(THOUGHT * 10)
    return [row | {"completion": _thought(row) if i < tenths else _quick(row)} for row in train() for i in range(10)]


def pairs() -> list[dict[str, Any]]:
    """The problems of `train()` whose quick answer is wrong: it is the rejected completion, a thought the chosen."""
    rows = [row | {"chosen": _thought(row), "rejected": _quick(row)} for row in train()]
    return [row for row in rows if row["rejected"] != row["answer"]]


def accuracy(completions: list[Any], answer: list[Any], **columns: Any) -> list[float | None]:
    """1 where the completion, after its <thoughts> if it has any, is the answer."""
    return each_judged(lambda text, right: text.rpartition(">")[2] == str(right), completions, answer)


def thought(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion thinks before it answers."""
    return [float(text_of(completion).startswith("<")) for completion in completions]


def _problems() -> list[dict[str, Any]]:
    # A fixed seed: the two splits are disjoint and the same in every run.
    return [_row(*divmod(int(i), 100)) for i in np.random.default_rng(0).permutation(10_000)]


def _row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "a": a, "b": b, "answer": str(a + b)}


def _quick(row: dict[str, Any]) -> str:
    return str((row["a"] + row["b"] + 5) // 10 * 10)


def _thought(row: dict[str, Any]) -> str:
    units = row["a"] % 10 + row["b"] % 10
    tens = row["a"] // 10 + row["b"] // 10 + units // 10
    return f"<{units},{tens}>{row['answer']}"
