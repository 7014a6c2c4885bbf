"""Countdown: make a target from three numbers, each used once, with + - * (the game of arXiv 2503.01307, small)."""

from __future__ import annotations

import operator
import zlib
from functools import cache
from typing import Any

import numpy as np

PROBLEMS, DRAWS = 20_000, 120_000
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def train() -> list[dict[str, Any]]:
    """About nine tenths of the problems, in a fixed random order."""
    return [row for row in _problems() if not _is_held_out(row)]


def held_out() -> list[dict[str, Any]]:
    """About a tenth of the problems. The numbers of a problem, with its target, are in one split only."""
    return [row for row in _problems() if _is_held_out(row)]


def _is_held_out(row: dict[str, Any]) -> bool:
    # By a hash of the sorted numbers: the same problem in another order stays in its split.
    return zlib.crc32(repr((sorted(row["numbers"]), row["target"])).encode()) % 10 == 0


@cache
def _problems() -> list[dict[str, Any]]:
    """Draws solutions (x op y) op z, and keeps one of each set of numbers with each target from 1 to 199."""
    rng, seen, rows = np.random.default_rng(0), set(), []
    drawn, signs = rng.integers(1, 30, (DRAWS, 3)).tolist(), rng.choice(list(SIGNS), (DRAWS, 2)).tolist()
    for (x, y, z), (first, second) in zip(drawn, signs, strict=True):
        target, numbers = SIGNS[second](SIGNS[first](x, y), z), sorted((x, y, z))
        key = (*numbers, target)
        if not 0 < target < 200 or key in seen:
            continue
        seen.add(key)
        row = {"prompt": _chat(numbers, target), "numbers": numbers, "target": target}
        rows.append(row | {"answer": f"({x}{first}{y}){second}{z}"})
        if len(rows) == PROBLEMS:
            break
    return rows


def _chat(numbers: list[int], target: int) -> list[dict[str, str]]:
    listed = ", ".join(map(str, numbers))
    text = f"Make {target} from the numbers {listed}. Use each number once, and only + - * and brackets. "
    return [{"role": "user", "content": text + "Answer with the expression alone."}]
