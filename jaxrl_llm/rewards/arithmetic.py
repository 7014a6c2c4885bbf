"""Rewards of `tasks.arithmetic`."""

from __future__ import annotations

import re
from typing import Any


def accuracy(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the completion is exactly the answer."""
    return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]


def is_number(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion is a number at all."""
    return [float(bool(re.fullmatch(r"-?\d+", c[0]["content"].strip()))) for c in completions]
