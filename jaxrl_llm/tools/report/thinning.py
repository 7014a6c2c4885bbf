"""Thins a curve so that a long run fits on a page."""

from __future__ import annotations

import numpy as np

POINTS = 2000  # of a curve, at most


def thin(x: np.ndarray, y: np.ndarray, limit: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `limit` points of a curve: the lowest and the highest of every part. NaN stays a gap."""
    if len(x) <= limit:
        return x, y
    size = part(len(x), limit)
    rows = -(-len(x) // size)
    # Both extremes of each part are drawn, so a spike of a single step stays in sight. A mean would hide it.
    padded = np.full(rows * size, np.nan)
    padded[: len(y)] = y
    grid = padded.reshape(rows, size)
    # argmin stops at a NaN, so a NaN counts as infinite. A part of NaN alone keeps its first one, and stays a gap.
    lows = np.where(np.isnan(grid), np.inf, grid).argmin(axis=1)
    highs = np.where(np.isnan(grid), -np.inf, grid).argmax(axis=1)
    # Sorted, and once each where the lowest value of a part is also its highest.
    points = np.unique(np.concatenate([np.arange(rows) * size + lows, np.arange(rows) * size + highs]))
    return x[points], y[points]


def part(count: int, limit: int = POINTS) -> int:
    """Returns how many points of a curve of `count` points become two."""
    return -(-count // (limit // 2)) if count > limit else 1
