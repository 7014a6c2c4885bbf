"""Sums and differences of two numbers below 100: 20,000 problems, 1,000 of them held out."""

from __future__ import annotations

from typing import Any

import numpy as np

HELD_OUT = 1000


def train() -> list[dict[str, Any]]:
    """The problems to learn from, in a fixed random order."""
    return _problems()[HELD_OUT:]


def held_out() -> list[dict[str, Any]]:
    """The problems to be judged by; none of them is in `train()`."""
    return _problems()[:HELD_OUT]


def _problems() -> list[dict[str, Any]]:
    order = np.random.default_rng(0).permutation(20_000)
    return [_row(int(i) // 100 % 100, int(i) % 100, "+-"[int(i) // 10_000]) for i in order]


def _row(a: int, b: int, sign: str) -> dict[str, Any]:
    answer = a + b if sign == "+" else a - b
    return {"prompt": [{"role": "user", "content": f"{a}{sign}{b}"}], "answer": str(answer)}
