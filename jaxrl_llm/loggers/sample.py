"""The record of a completion that loggers show."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """A completion that a run sends to its loggers."""

    prompt: str
    completion: str
    reward: float | None  # None if no reward function has judged the completion
