"""Rewards of `tasks.arithmetic`."""

from __future__ import annotations

from typing import Any


def accuracy(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the completion, after its <thoughts> if it has any, is the answer."""
    said = [completion[0]["content"].split(">")[-1] for completion in completions]
    return [float(s == a) for s, a in zip(said, answer, strict=True)]


def thought(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion thinks before it answers."""
    return [float(completion[0]["content"].startswith("<")) for completion in completions]
