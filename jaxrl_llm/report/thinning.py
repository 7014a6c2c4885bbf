"""Thins a curve so that a long run fits on a page."""

from __future__ import annotations

import numpy as np

POINTS = 2000  # of a curve, at most


def thin(x: np.ndarray, y: np.ndarray, most: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `most` points of a curve: the lowest and the highest of every part. NaN stays a gap."""
    if len(x) <= most:
        return x, y
    size = part(len(x), most)
    rows = -(-len(x) // size)
    padded = np.full(rows * size, np.nan)
    padded[: len(y)] = y
    grid = padded.reshape(rows, size)
    lows = np.where(np.isnan(grid), np.inf, grid).argmin(axis=1)
    highs = np.where(np.isnan(grid), -np.inf, grid).argmax(axis=1)
    kept = np.unique(np.concatenate([np.arange(rows) * size + lows, np.arange(rows) * size + highs]))
    return x[kept], y[kept]


def part(count: int, most: int = POINTS) -> int:
    """Returns how many points of a curve of `count` points become two."""
    return -(-count // (most // 2)) if count > most else 1
