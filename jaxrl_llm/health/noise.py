"""Statistical tests of the health rules: is a change in a run's records more than noise?

The noise of a metric is estimated from the differences of neighbouring steps, because learning changes metrics slowly
and sampling changes them at once. A rule tests after every step. Each test ("look") gets a small part of the rate of
false alarms (alpha spending: Lan and DeMets, Biometrika 70, 1983), and all parts sum to RATE. So the rate holds for
runs of any length and, by the union bound, however the looks depend on each other.
"""

from __future__ import annotations

from math import ceil, inf, log
from typing import NamedTuple

import numpy as np
import scipy  # imports scipy.special at its first use, which takes half a second

RATE = 5e-3  # largest probability that noise makes a rule fire in a run of any length
# Share of a window's values that a trimmed mean drops on each side, so that a few odd batches do not count.
TRIM = 0.25
JUMPS = 0.1  # share of the largest differences of neighbouring steps that do not count as noise
# Variance of a trimmed mean of n normal values, in units of (variance of a value) / n. The exact factor is 1 / 0.84 for
# many values (Tukey, 1960), 1.19 for four and 1.18 for eight.
SPREAD = 1.2


class Noise(NamedTuple):
    """The noise of a metric in one step."""

    deviation: float  # standard deviation
    freedom: float  # degrees of freedom of the estimate; inf if the deviation is known


def step_noise(steps: np.ndarray, values: np.ndarray) -> Noise:
    """Estimates the noise of a metric from the differences of neighbouring steps, which slow changes hardly affect.

    deviation^2 = sum (x[t + 1] - x[t])^2 / 2 n over n pairs (von Neumann, Annals of Mathematical Statistics 12, 1941).
    The share JUMPS of the largest differences is left out, because a sudden change is not noise, and the sum is divided
    by its expectation for normal values. The degrees of freedom were found by simulation.
    """
    # Only neighbouring steps count, because `History` keeps records with gaps, across which the run also progresses. In
    # a log with every other step, neighbours are two steps apart.
    gaps = np.diff(steps)
    differences = np.sort(np.abs(np.diff(values)[gaps == min(gaps.min(initial=2), 2)]))
    count = len(differences) - ceil(JUMPS * len(differences))
    if count < 2:
        return Noise(inf, 1.0)
    share = count / len(differences)
    edge = scipy.special.ndtri((1 + share) / 2)
    # The mean square of the small differences is divided by its expectation for normal values. Without this division
    # the noise would be too small, and rules would fire too often.
    expected_square = 1 - 2 * edge * np.exp(-(edge**2) / 2) / np.sqrt(2 * np.pi) / share  # E[z^2] for |z| <= edge
    return Noise(
        float(np.sqrt(np.mean(np.square(differences[:count])) / (2 * expected_square))), max(len(differences) / 2, 1.0)
    )


def level(look_number: int) -> float:
    """Returns the part of RATE for look number k = 1, 2, ...: RATE ln 2 (1/ln(k+1) - 1/ln(k+2)).

    The parts sum to RATE. They fall like 1 / (k ln^2 k), about as slowly as a series with a finite sum can.
    """
    # The sum over all looks telescopes to 1 / ln 2, which the factor ln 2 makes 1.
    return RATE * log(2) * (1 / log(look_number + 1) - 1 / log(look_number + 2))


def quantile(look_number: int, freedom: float, *, choices: float = 1) -> float:
    """Returns how many standard errors noise may reach at a look: the quantile of Student's t at the look's level.

    freedom: degrees of freedom. choices: number of windows or metrics from which the rule picks the most extreme one;
    each gets an equal part of the level.
    """
    return float(-scipy.special.stdtrit(min(freedom, 1e6), level(max(look_number, 1)) / choices))


def center(values: np.ndarray) -> float:
    """Returns the trimmed mean, which averages the middle half of the values."""
    ordered = np.sort(values)
    # The number of dropped values is rounded down, so that fewer than four values are all kept.
    trimmed_count = int(TRIM * len(ordered))
    return float(ordered[trimmed_count : len(ordered) - trimmed_count].mean())


def strength(difference: float, error: float, allowed: float) -> float:
    """Returns a difference as a multiple of the largest one that noise explains, error * allowed.

    error: standard error of the difference. allowed: number of standard errors that noise may reach.
    """
    bound = error * allowed
    # If there is no noise, any change is infinitely strong, and no change is 0 instead of 0 / 0.
    return difference / bound if bound else np.sign(difference) * inf if difference else 0.0
