"""Sums of two numbers below 1000: 20,000 of the million problems, 1,000 of them held out.

An answer is "825", or worked out: "15,12,8:825" for 358+467, the columns from the right
with their carries, and what they come to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PROBLEMS, HELD_OUT, WORKED = 20_000, 1_000, 0.25


def train() -> list[dict[str, Any]]:
    """The problems to learn from."""
    return _problems()[HELD_OUT:]


def held_out() -> list[dict[str, Any]]:
    """The problems to be judged by; none of them is in `train()`."""
    return _problems()[:HELD_OUT]


def demonstrations() -> list[dict[str, Any]]:
    """`train()` with a column "completion": one in four is worked out, the others say the answer alone."""
    rows = train()
    worked = np.random.default_rng(1).random(len(rows)) < WORKED
    return [row | {"completion": _worked(row) if w else row["answer"]} for row, w in zip(rows, worked, strict=True)]


def _problems() -> list[dict[str, Any]]:
    chosen = np.random.default_rng(0).choice(1_000_000, PROBLEMS, replace=False)
    return [_row(*divmod(int(i), 1000)) for i in chosen]


def _row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "a": a, "b": b, "answer": str(a + b)}


def _worked(row: dict[str, Any]) -> str:
    columns, carry = [], 0
    for place in (1, 10, 100):
        columns.append(row["a"] // place % 10 + row["b"] // place % 10 + carry)
        carry = columns[-1] // 10
    return ",".join(map(str, columns)) + ":" + row["answer"]
