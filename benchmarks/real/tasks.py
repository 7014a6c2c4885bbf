"""Problems that SmolLM2-135M-Instruct can sometimes solve, as sources of rows."""

from __future__ import annotations

import random
from typing import Any

BELOW, HELD_OUT = 50, 256


def _sums() -> list[dict[str, Any]]:
    """Returns all sums of two numbers below BELOW, in an order that is always the same."""
    pairs = [(a, b) for a in range(BELOW) for b in range(BELOW)]
    random.Random(0).shuffle(pairs)
    question = "What is {} + {}? Answer with only the number."
    return [{"prompt": [{"role": "user", "content": question.format(a, b)}], "answer": str(a + b)} for a, b in pairs]


def addition() -> list[dict[str, Any]]:
    """Returns the sums to learn from."""
    return _sums()[HELD_OUT:]


def addition_held_out() -> list[dict[str, Any]]:
    """Returns 256 other sums."""
    return _sums()[:HELD_OUT]
