"""Rows as veRL keeps them: {prompt, reward_model: {style, ground_truth}, data_source, ability, extra_info}."""

from __future__ import annotations

from typing import Any

import numpy as np


def convert(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its ground truth as the column "answer", or, where it has names, as columns by those names.

    {"ground_truth": 72} -> {"answer": "72"}; {"ground_truth": {"target": 24, "numbers": [2, 3, 4]}} -> the columns
    target and numbers. The other columns stay, for rewards of your own. Raises: KeyError.
    """
    if not isinstance(row["reward_model"], dict):
        raise KeyError("reward_model.ground_truth")
    truth = row["reward_model"]["ground_truth"]
    # Of rows that pandas read.
    truth = truth.tolist() if isinstance(truth, np.ndarray) else truth
    if isinstance(truth, (list, tuple)) and len(truth) == 1:
        truth = truth[0]
    return row | (truth if isinstance(truth, dict) else {"answer": str(truth)})
