"""The vertical axis of a plot: its range holds the curves, near bounds, and the marks of findings above them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NEAR = 0.6  # spans of the curves within which a bound is drawn
# Span of a linear axis as a share of its largest value: less may be rounding.
LEAST = 0.05
MARK = 0.13  # of the height, for the mark of a finding
DECADES = 1.2  # of positive values, from which on an axis is logarithmic


class Axis(NamedTuple):
    """A range in the axis's own scale: the logarithm to base 10 on a logarithmic axis."""

    low: float
    high: float
    marks: int  # findings above the curves
    log: bool

    @property
    def range(self) -> list[float]:
        return [self.low, self.high]

    @property
    def span(self) -> float:
        return self.high - self.low

    @property
    def bottom(self) -> float:
        return self.at(0.0)

    @property
    def top(self) -> float:
        return self.at(1.0)

    def at(self, share: float) -> float:
        """Returns the value at a share of the height."""
        value = self.low + share * (self.high - self.low)
        return 10.0**value if self.log else value

    def level(self, number: int) -> tuple[float, float]:
        """Returns the values at the bottom and at the mark of a finding; the first one is the highest."""
        room = MARK / (1 + MARK * self.marks)
        return self.bottom, self.at(1 - room * (number + 1))


def fit(curves: Sequence[np.ndarray], bounds: Sequence[float | np.ndarray], marks: int, *, log: bool) -> Axis:
    """Returns the axis of curves. log: whether it may be logarithmic, which it is if their values differ much."""
    values = np.concatenate(curves)
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    # A logarithm leaves out zeros and negative values, so nearly all must be above 0.
    wide = len(positive) > 0.9 * len(values) and math.log10(positive.max() / positive.min()) > DECADES
    log = bool(log and wide)
    values = np.log10(positive) if log else values
    low, high = float(values.min()), float(values.max())
    span = high - low or abs(high) or 1.0
    # A bound far from the curves is left out: with it they would be a flat line.
    near = [low - NEAR * span, high + NEAR * span]
    for bound in bounds:
        edges = np.atleast_1d(np.asarray(bound, float))
        edges = edges[np.isfinite(edges) & ((edges > 0) | (not log))]
        edges = np.log10(edges) if log else edges
        edges = edges[(edges >= near[0]) & (edges <= near[1])]
        low, high = float(np.min(edges, initial=low)), float(np.max(edges, initial=high))
    # A constant curve still needs a range, and one that differs by rounding alone must not look like a change.
    span = max(high - low, 0.0 if log else LEAST * max(abs(low), abs(high))) or 1.0
    middle = (low + high) / 2
    low, high = min(low, middle - span / 2), max(high, middle + span / 2)
    # No share, count or norm is below 0, so neither is the axis of one that is always 0.
    low = max(low, 0.0) if not log and values.min() >= 0 else low
    low, high = low - 0.05 * span, high + 0.07 * span
    # Room above the curves, so that no mark of a finding covers one.
    return Axis(low, high + MARK * marks * (high - low), marks, log)
