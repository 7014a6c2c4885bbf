"""Healthy bands of metrics, for plots: the values at which a health rule is silent.

Bands use the constants of the rules. A rule may have further conditions, which `Band.description` names, and most rules
compare the mean of the last 8 values. `tests/tools/test_report.py` compares every bound with its rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

import numpy as np

from .finding import LogRecord
from .history import RECENT_STEPS, START_STEPS, History
from .rules import bounds

UNSOLVED = ", unless the task is solved"
# Bands with fixed bounds: metric, rule, further condition, lower bound, upper bound.
FIXED = (
    ("groups/no_signal", "no_signal", UNSOLVED, None, bounds.NO_SIGNAL),
    ("completion/truncated", "never_stops", "", None, bounds.NEVER_STOPS),
    ("clip/first", "phantom_clipping", "", None, bounds.FIRST_CLIPPED),
    ("importance/mean", "sampler_mismatch", "", *bounds.MEAN_WEIGHT),
    ("importance/ess", "sampler_mismatch", "", bounds.SAMPLE_SIZE, None),
    ("importance/kl", "sampler_mismatch", ", unless older weights sampled", None, bounds.IMPORTANCE_KL),
    ("episode/turns", "tools_unused", UNSOLVED, bounds.ONE_TURN, None),
    ("critic/explained_variance", "critic_lags", " after 32 steps, unless it rises", bounds.EXPLAINED, None),
)
# Bands with a lower bound: metric, rule, further condition, bound as a share of the mean at the start.
AT_LEAST = (
    ("entropy", "entropy_collapse", UNSOLVED, bounds.ENTROPY[0]),
    ("completion/length", "length_collapse", ", unless short answers are right", bounds.LENGTH_SHARE),
)
# Bands with an upper bound: metric, rule, further condition, bound as a multiple of the mean at the start, and a value
# that is always allowed.
AT_MOST = (
    ("entropy", "entropy_explosion", "", bounds.ENTROPY[1], 0.0),
    ("grad_norm", "gradient_climb", f", or {bounds.GRADIENT[1]:g} if few tokens are clipped", bounds.GRADIENT[0], 0.0),
    ("clip/fraction", "gradient_climb", ", unless the gradient norm stays", *bounds.CLIPPED),
    ("completion/truncated", "truncated", ", unless the reward stays", *bounds.TRUNCATED),
    ("completion/repeated", "repeats", "", *bounds.REPEATED),
)


class Band(NamedTuple):
    """The values of a metric at which a health rule is silent."""

    metric: str
    rule: str  # name of the rule
    description: str  # the band in words, for readers of a plot
    # Bounds: a number, or an array with a value for each record; None if the band is unbounded.
    low: float | np.ndarray | None = None
    high: float | np.ndarray | None = None


def make_bands(records: Sequence[LogRecord]) -> list[Band]:
    """Returns the bands of a run. Bands that depend on the start of the run appear once the start is over."""
    return [*(_fixed_band(*row) for row in FIXED), *_start_bands(records), *_best_bands(records)]


def _fixed_band(metric: str, rule: str, condition: str, low: float | None, high: float | None) -> Band:
    description = (
        f"at least {low:g}" if high is None else f"at most {high:g}" if low is None else f"{low:g} to {high:g}"
    )
    return Band(metric, rule, description + condition, low, high)


def _start_bands(records: Sequence[LogRecord]) -> list[Band]:
    """Returns the bands whose bounds are multiples of the mean of the first steps."""
    start_mean, start_bands = _history_of_start(records).start_mean, list[Band]()
    for metric, rule, condition, share in AT_LEAST:
        if (metric_at_start := start_mean(metric)) > 0:
            start_bands.append(
                Band(metric, rule, f"at least {share:g} times the start{condition}", share * metric_at_start)
            )
    for metric, rule, condition, factor, allowed in AT_MOST:
        if not isnan(metric_at_start := start_mean(metric)):
            description = f"at most {factor:g} times the start{f' or {allowed:.0%}' if allowed else ''}{condition}"
            start_bands.append(Band(metric, rule, description, None, max(factor * metric_at_start, allowed)))
    deviation, kl = start_mean("reward/std"), start_mean("reward/kl")
    if deviation > 0 and not isnan(kl):
        description = f"at most {bounds.KL_PAYS:g} spreads of the rewards above the start, unless the reward stays"
        start_bands.append(Band("reward/kl", "kl_pays", description, None, max(kl, 0.0) + bounds.KL_PAYS * deviation))
    return start_bands


def _best_bands(records: Sequence[LogRecord]) -> list[Band]:
    """Returns the band of the mean reward: near its best mean of 8 steps so far."""
    deviation = _history_of_start(records).start_mean("reward/std")
    if not deviation > 0:
        return []
    best_mean, lower_bounds, recent_rewards = -np.inf, [], list[float]()
    for record in records:
        reward = record.get("reward/mean")
        if record["step"] and reward is not None:
            recent_rewards = [*recent_rewards[1 - RECENT_STEPS :], reward]
            # Incomplete windows are left out, because a single lucky step would count as a mean.
            best_mean = (
                max(best_mean, sum(recent_rewards) / RECENT_STEPS) if len(recent_rewards) == RECENT_STEPS else best_mean
            )
        lower_bounds.append(best_mean - bounds.REWARD_FALL * deviation if np.isfinite(best_mean) else np.nan)
    description = (
        f"at most {bounds.REWARD_FALL:g} spreads of the first rewards below its best mean of {RECENT_STEPS} steps"
    )
    return [Band("reward/mean", "reward_collapse", description, np.array(lower_bounds))]


def _history_of_start(records: Sequence[LogRecord]) -> History:
    """Returns a history of the first records and the last one, which is enough for `History.start_mean`."""
    return History([*(record for record in records if 0 < record["step"] <= START_STEPS), *records[-1:]])
