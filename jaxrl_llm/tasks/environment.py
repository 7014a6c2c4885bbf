"""Rewards that an environment computes itself."""

from __future__ import annotations

from typing import Any


def reward(completions: list[Any], episode: list[dict[str, float]], **columns: Any) -> list[float]:
    """Returns the sum of the environment's metric `reward` over an episode's turns, for example the score of a game."""
    return [metrics.get("reward", 0.0) for metrics in episode]
