"""Rows of Search-R1's data sets, for the environment and the rewards of `search`.

{prompt, reward_model: {ground_truth: {target: [...]}}, data_source, ability, ...}
"""

from __future__ import annotations

from typing import Any


def convert(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row with its accepted answers as the column "answer". Raises: KeyError, if it has none."""
    target = row["reward_model"]["ground_truth"]["target"]
    return row | {"answer": [target] if isinstance(target, str) else list(target)}
