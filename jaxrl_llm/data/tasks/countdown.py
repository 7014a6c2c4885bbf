"""Countdown: reach a target from three numbers, each used once, with + - * (arXiv 2503.01307's game, small)."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import numpy as np

PROBLEMS = 20_000


def train() -> list[dict[str, Any]]:
    """About nine tenths of the problems, in a fixed random order."""
    return [row for row in _problems() if not _is_held_out(row)]


def held_out() -> list[dict[str, Any]]:
    """About a tenth of the problems; a set of numbers with its target is in one split only."""
    return [row for row in _problems() if _is_held_out(row)]


def _is_held_out(row: dict[str, Any]) -> bool:
    return zlib.crc32(repr((sorted(row["numbers"]), row["target"])).encode()) % 10 == 0


@cache
def _problems() -> list[dict[str, Any]]:
    rng, seen, rows = np.random.default_rng(0), set(), []
    while len(rows) < PROBLEMS:
        numbers = tuple(int(n) for n in rng.integers(1, 30, 3))
        x, y, z = rng.permutation(numbers)
        left, right = rng.choice(["+", "-", "*"], 2)
        answer = f"{x}{left}{y}{right}{z}"
        target = eval(answer)  # our own text of three integers and two signs
        if not 0 < target < 200 or (key := (tuple(sorted(numbers)), target)) in seen:
            continue
        seen.add(key)
        text = f"{' '.join(map(str, numbers))} = {target}"
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "numbers": list(numbers),
                "target": target,
                "answer": answer,
            }
        )
    return rows
