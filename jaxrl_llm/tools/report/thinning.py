"""Thins a curve so that a long run fits on a page."""

from __future__ import annotations

import numpy as np

POINTS = 2000  # most points of a curve


def thin(x: np.ndarray, y: np.ndarray, limit: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `limit` points of a curve: the lowest and the highest of every part. NaN stays a gap."""
    if len(x) <= limit:
        return x, y
    # The curve is divided into parts of `size` points, of which each becomes a row of a grid.
    size = part(len(x), limit)
    rows = -(-len(x) // size)  # number of parts, rounded up
    # Both extremes of each part are drawn, so a spike of a single step stays in sight. A mean would hide it.
    padded = np.full(rows * size, np.nan)
    padded[: len(y)] = y
    grid = padded.reshape(rows, size)
    # NaN is replaced by infinity, because argmin stops at a NaN. A part of NaNs keeps its first one, and stays a gap.
    lows = np.where(np.isnan(grid), np.inf, grid).argmin(axis=1)
    highs = np.where(np.isnan(grid), -np.inf, grid).argmax(axis=1)
    # `unique` sorts the points, and keeps one where the lowest value of a part is also its highest.
    points = np.unique(np.concatenate([np.arange(rows) * size + lows, np.arange(rows) * size + highs]))
    return x[points], y[points]


def part(count: int, limit: int = POINTS) -> int:
    """Returns the number of points, of a curve of `count` points, that become two points."""
    return -(-count // (limit // 2)) if count > limit else 1
