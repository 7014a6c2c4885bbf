"""The vertical axis of a plot, whose range holds the curves, nearby bounds, and the marks of findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NEAR_BOUND = 0.6  # largest distance of a drawn bound from the curves, as a share of their span
# Smallest span of a linear axis as a share of its largest value, because smaller differences may be rounding.
LEAST_SPAN = 0.05
MARK_HEIGHT = 0.13  # height of a finding's mark as a share of the plot
DECADES = 1.2  # decades of positive values above which an axis is logarithmic


class Axis(NamedTuple):
    """Range of an axis. On a logarithmic axis, low and high are logarithms to base 10."""

    low: float
    high: float
    marks: int  # number of findings with a mark above the curves
    log: bool  # whether the axis is logarithmic

    @property
    def range(self) -> list[float]:
        return [self.low, self.high]

    @property
    def span(self) -> float:
        return self.high - self.low

    @property
    def bottom(self) -> float:
        return self.value_at(0.0)

    @property
    def top(self) -> float:
        return self.value_at(1.0)

    def value_at(self, share: float) -> float:
        """Returns the value at a share of the axis, where 0 is its bottom and 1 its top."""
        value = self.low + share * (self.high - self.low)
        return 10.0**value if self.log else value

    def level(self, number: int) -> tuple[float, float]:
        """Returns the values at the bottom and at the mark of finding `number`; the mark of number 0 is the highest."""
        share_of_mark = MARK_HEIGHT / (1 + MARK_HEIGHT * self.marks)  # height of a mark on the axis that `fit` extended
        return self.bottom, self.value_at(1 - share_of_mark * (number + 1))


def fit(curves: Sequence[np.ndarray], bounds: Sequence[float | np.ndarray], marks: int, *, log: bool) -> Axis:
    """Returns the vertical axis of a plot.

    curves: values of each curve. bounds: bounds of healthy values, which are drawn if they are near the curves. marks:
    number of findings that are marked. log: whether the axis may be logarithmic; it is if the values span enough
    decades.
    """
    values = np.concatenate(curves)
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    # Nearly all values must be above 0, because a logarithmic axis cannot show zeros and negative values.
    is_wide = len(positive) > 0.9 * len(values) and math.log10(positive.max() / positive.min()) > DECADES
    log = bool(log and is_wide)
    values = np.log10(positive) if log else values
    low, high = float(values.min()), float(values.max())
    span = high - low or abs(high) or 1.0
    # A bound far from the curves is not drawn, because the curves would become flat lines.
    drawn_range = [low - NEAR_BOUND * span, high + NEAR_BOUND * span]
    for bound in bounds:
        edges = np.atleast_1d(np.asarray(bound, float))
        edges = edges[np.isfinite(edges) & ((edges > 0) | (not log))]
        edges = np.log10(edges) if log else edges
        edges = edges[(edges >= drawn_range[0]) & (edges <= drawn_range[1])]
        low, high = float(np.min(edges, initial=low)), float(np.max(edges, initial=high))
    # The span has a minimum, so that a constant curve has a range, and rounding does not look like a change.
    span = max(high - low, 0.0 if log else LEAST_SPAN * max(abs(low), abs(high))) or 1.0
    middle = (low + high) / 2
    low, high = min(low, middle - span / 2), max(high, middle + span / 2)
    # The axis of values that are never negative starts at 0 or above.
    low = max(low, 0.0) if not log and values.min() >= 0 else low
    low, high = low - 0.05 * span, high + 0.07 * span
    # The range is extended upwards, so that no mark of a finding covers a curve.
    return Axis(low, high + MARK_HEIGHT * marks * (high - low), marks, log)
