"""A completion, as loggers show it."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """A completion that the run shows."""

    prompt: str
    completion: str
    reward: float | None  # None: no reward function has judged it
