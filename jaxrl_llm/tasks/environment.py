"""Rewards that an environment gives itself."""

from __future__ import annotations

from typing import Any


def reward(completions: list[Any], episode: list[dict[str, float]], **columns: Any) -> list[float]:
    """The sum of the environment's metric `reward` over the turns of an episode, such as the score of a game."""
    return [measured.get("reward", 0.0) for measured in episode]
