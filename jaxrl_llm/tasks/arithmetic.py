"""Sums of two numbers below 100: 10,000 problems, 1,000 of them held out, and their rewards.

A sum such as 47+85 has two kinds of answers: a quick one, which is rounded to ten ("130"); and one after a thought with
the sums of the columns from the right ("<12,13>132"). Most of `demonstrations()` are quick, so that a model that has
learned them can think, but seldom does. `pairs()` prefers a thought to a wrong quick answer. The reward `accuracy` is 1
for a right answer, and `thought` for a completion that thinks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.tasks import each_judged, text_of

HELD_OUT, THOUGHT = 1_000, 0.3  # number of held-out problems; share of demonstrations with a thought


def train() -> list[dict[str, Any]]:
    """Returns the training problems in a fixed random order."""
    return _problems()[HELD_OUT:]


def held_out() -> list[dict[str, Any]]:
    """Returns the evaluation problems, none of which is in `train()`."""
    return _problems()[:HELD_OUT]


def demonstrations() -> list[dict[str, Any]]:
    """Returns every problem of `train()` with ten completions, of which 3 have a thought and 7 are quick."""
    tenths = round(THOUGHT * 10)
    return [row | {"completion": _thought(row) if i < tenths else _quick(row)} for row in train() for i in range(10)]


def pairs() -> list[dict[str, Any]]:
    """Returns preference pairs for problems whose quick answer is wrong: it is rejected, and a thought is chosen."""
    rows = [row | {"chosen": _thought(row), "rejected": _quick(row)} for row in train()]
    return [row for row in rows if row["rejected"] != row["answer"]]


def accuracy(completions: list[Any], answer: list[Any], **columns: Any) -> list[float | None]:
    """Returns 1 if the completion, after its <thoughts> if it has any, is the answer, else 0."""
    return each_judged(lambda text, right: text.rpartition(">")[2] == str(right), completions, answer)


def thought(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1 if the completion begins with a thought, else 0."""
    return [float(text_of(completion).startswith("<")) for completion in completions]


def _problems() -> list[dict[str, Any]]:
    # The seed is fixed, so that the two splits are disjoint and equal in all runs.
    return [_row(*divmod(int(i), 100)) for i in np.random.default_rng(0).permutation(10_000)]


def _row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "a": a, "b": b, "answer": str(a + b)}


def _quick(row: dict[str, Any]) -> str:
    return str((row["a"] + row["b"] + 5) // 10 * 10)


def _thought(row: dict[str, Any]) -> str:
    units = row["a"] % 10 + row["b"] % 10
    tens = row["a"] // 10 + row["b"] // 10 + units // 10
    return f"<{units},{tens}>{row['answer']}"
