"""Rewards that an environment computes itself."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tasks.protocol import FINAL_SCORE


def reward(completions: list[Any], episode: list[dict[str, float]], **columns: Any) -> list[float | None]:
    """Returns the rewards of the episodes: the sum of `Reply.reward` and the metric `reward`, plus the last score.

    An episode with the metric `unscored` has no verdict.
    """
    return [
        None if metrics.get("unscored") else metrics.get("reward", 0.0) + metrics.get(FINAL_SCORE, 0.0)
        for metrics in episode
    ]
