"""Rewards of `tasks.arithmetic`."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.rewards import abstaining, text_of


def accuracy(completions: list[Any], answer: list[Any], **columns: Any) -> list[float | None]:
    """1 where the completion, after its <thoughts> if it has any, is the answer."""

    def judge(completions: list[Any], answer: list[Any]) -> list[float]:
        return [float(text_of(c).rpartition(">")[2] == str(a)) for c, a in zip(completions, answer, strict=True)]

    return abstaining(judge, completions, answer)


def thought(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion thinks before it answers."""
    return [float(text_of(completion).startswith("<")) for completion in completions]
