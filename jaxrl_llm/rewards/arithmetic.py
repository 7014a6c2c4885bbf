"""Rewards of `tasks.arithmetic`."""

from __future__ import annotations

from typing import Any


def accuracy(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where what the completion comes to, after its last colon if it has one, is the answer."""
    said = [completion[0]["content"].split(":")[-1] for completion in completions]
    return [float(s == a) for s, a in zip(said, answer, strict=True)]


def is_worked(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion shows its work."""
    return [float(":" in completion[0]["content"]) for completion in completions]
