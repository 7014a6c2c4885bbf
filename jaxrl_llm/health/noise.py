"""Whether a change in a run's records is more than noise, with one rate of false alarms for runs of any length.

Noise is what the values of neighbouring steps differ by: a run that learns moves slowly, and a sampled batch jumps. A
rule looks after every step, so each look has a small part of the rate (alpha spending: Lan and DeMets, Biometrika 70,
1983), and the parts of all looks together are the rate: by the union bound, however the looks depend on each other.
"""

from __future__ import annotations

from math import ceil, inf, log
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

RATE = 5e-3  # bound of the chance that noise makes a rule fire in a run, of any length
# Share of a window's values that count on neither side, so that a few odd batches decide nothing.
TRIM = 0.25
JUMPS = 0.1  # share of the differences of neighbouring steps that are no noise
# Variance of a trimmed mean of normal values, times their number, as a share of theirs. It is 1 / 0.84 for many values
# (Tukey, 1960), 1.19 for four and 1.18 for eight.
SPREAD = 1.2


class Noise(NamedTuple):
    """The noise of a metric, step by step."""

    deviation: float
    freedom: float  # degrees of freedom of the estimate; inf: it is known


def step_noise(steps: np.ndarray, values: np.ndarray) -> Noise:
    """Estimates the noise from differences of neighbouring steps, which slow changes do not move.

    deviation^2 = sum (x[t + 1] - x[t])^2 / 2 n over n pairs (von Neumann, Annals of Mathematical Statistics 12, 1941).
    The JUMPS largest differences are left out, because a sudden change is no noise, and the sum is divided by what the
    others are of all for normal values. The degrees of freedom are those of a simulation.
    """
    # Only pairs of neighbours: `History` keeps records with gaps, whose differences also have the progress of the run.
    # Where a log lacks every other value, its pairs are two steps apart.
    gaps = np.diff(steps)
    moves = np.sort(np.abs(np.diff(values)[gaps == min(gaps.min(initial=2), 2)]))
    count = len(moves) - ceil(JUMPS * len(moves))
    if count < 2:
        return Noise(inf, 1.0)
    share = count / len(moves)
    edge = ndtri((1 + share) / 2)
    # The mean square of the small differences is divided by its expectation for normal values. Undivided, it would
    # make the noise too small and every rule too eager.
    whole = 1 - 2 * edge * np.exp(-(edge**2) / 2) / np.sqrt(2 * np.pi) / share  # E[z^2] for |z| <= edge
    return Noise(float(np.sqrt(np.mean(np.square(moves[:count])) / (2 * whole))), max(len(moves) / 2, 1.0))


def level(look: int) -> float:
    """Returns the part of RATE that the look of this number, from 1 on, may use: RATE ln 2 (1/ln(k+1) - 1/ln(k+2)).

    The sum over all k is RATE. It falls as 1 / (k ln^2 k), the slowest that still has a sum.
    """
    # The sum over all looks telescopes: 1 / ln 2 is left, which ln 2 makes 1.
    return RATE * log(2) * (1 / log(look + 1) - 1 / log(look + 2))


def quantile(look: int, freedom: float, *, choices: float = 1) -> float:
    """Returns how many standard errors noise may reach at a look: the quantile of Student's t at its level.

    choices: windows or metrics of which the rule takes the most extreme one, each with a part of the level.
    """
    return float(-stdtrit(min(freedom, 1e6), level(max(look, 1)) / choices))


def center(values: np.ndarray) -> float:
    """Returns the trimmed mean, which averages the middle half of the values."""
    ordered = np.sort(values)
    # The number is rounded down, so that none of fewer than four values is left out.
    cut = int(TRIM * len(ordered))
    return float(ordered[cut : len(ordered) - cut].mean())


def strength(difference: float, error: float, allowed: float) -> float:
    """Returns a difference as a multiple of what noise may reach: above 1 or below -1, it is more than noise."""
    bound = error * allowed
    # Values that never differ have no noise: any change is more than that, and none is 0, not 0 / 0.
    return difference / bound if bound else np.sign(difference) * inf if difference else 0.0
