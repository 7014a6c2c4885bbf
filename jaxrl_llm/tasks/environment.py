"""Rewards that an environment computes itself."""

from __future__ import annotations

from typing import Any


def reward(completions: list[Any], episode: list[dict[str, float]], **columns: Any) -> list[float | None]:
    """Returns the sum of an episode's rewards: the rewards of its turns, and the metric `reward` of the environment.

    An episode with the metric `unscored` has no verdict.
    """
    return [None if metrics.get("unscored") else metrics.get("reward", 0.0) for metrics in episode]
