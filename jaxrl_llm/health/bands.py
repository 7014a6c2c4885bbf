"""The healthy band of a metric, for plots: the values at which a health rule is silent.

The rules decide, not the bands, with the same constants. A rule may have more conditions, which `words` tells, and
most rules compare the mean of the last 8 values. `tests/tools/test_report.py` compares every bound with its rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

import numpy as np

from .finding import LogRecord
from .history import FEW, RECENT, History
from .rules import bounds

UNSOLVED = ", unless the task is solved"
# Metric, rule, what the words add, bounds.
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
# Metric, rule, what the words add, least part of the start.
AT_LEAST = (
    ("entropy", "entropy_collapse", UNSOLVED, bounds.ENTROPY[0]),
    ("completion/length", "length_collapse", ", unless short answers are right", bounds.LENGTH),
)
# Metric, rule, what the words add, largest multiple of the start, value that is always allowed.
AT_MOST = (
    ("entropy", "entropy_explosion", "", bounds.ENTROPY[1], 0.0),
    ("grad_norm", "gradient_climb", f", or {bounds.GRADIENT[1]:g} if few tokens are clipped", bounds.GRADIENT[0], 0.0),
    ("clip/fraction", "gradient_climb", ", unless the gradient norm stays", *bounds.CLIPPED),
    ("completion/truncated", "truncated", ", unless the reward stays", *bounds.TRUNCATED),
    ("completion/repeated", "repeats", "", *bounds.REPEATED),
)


class Band(NamedTuple):
    """The values of a metric at which a rule is silent. A bound is a number, or has a value for each record."""

    metric: str
    rule: str  # id of its finding
    words: str
    low: float | np.ndarray | None = None
    high: float | np.ndarray | None = None


def bands(records: Sequence[LogRecord]) -> list[Band]:
    """Returns the bands of a run. Those that the start of the run decides are there once the start is over."""
    return [*(_fixed_band(*row) for row in FIXED), *_start_bands(records), *_best_bands(records)]


def _fixed_band(metric: str, rule: str, more: str, low: float | None, high: float | None) -> Band:
    words = f"at least {low:g}" if high is None else f"at most {high:g}" if low is None else f"{low:g} to {high:g}"
    return Band(metric, rule, words + more, low, high)


def _start_bands(records: Sequence[LogRecord]) -> list[Band]:
    """Bounds that are multiples of the mean of the first 4 steps."""
    start, start_bands = _start(records).then, list[Band]()
    for metric, rule, more, part in AT_LEAST:
        if (first := start(metric)) > 0:
            start_bands.append(Band(metric, rule, f"at least {part:g} times the start{more}", part * first))
    for metric, rule, more, factor, allowed in AT_MOST:
        if not isnan(first := start(metric)):
            words = f"at most {factor:g} times the start{f' or {allowed:.0%}' if allowed else ''}{more}"
            start_bands.append(Band(metric, rule, words, None, max(factor * first, allowed)))
    spread, kl = start("reward/std"), start("reward/kl")
    if spread > 0 and not isnan(kl):
        words = f"at most {bounds.KL_PAYS:g} spreads of the rewards above the start, unless the reward stays"
        start_bands.append(Band("reward/kl", "kl_pays", words, None, max(kl, 0.0) + bounds.KL_PAYS * spread))
    return start_bands


def _best_bands(records: Sequence[LogRecord]) -> list[Band]:
    """The reward stays near its best mean of 8 steps so far."""
    spread = _start(records).then("reward/std")
    if not spread > 0:
        return []
    best, low, recent = -np.inf, [], list[float]()
    for record in records:
        value = record.get("reward/mean")
        if record["step"] and value is not None:
            recent = [*recent[1 - RECENT :], value]
            # A window that is not full is left out, as in `History.best`, because one lucky step would count as a mean.
            best = max(best, sum(recent) / RECENT) if len(recent) == RECENT else best
        low.append(best - bounds.REWARD_FALL * spread if np.isfinite(best) else np.nan)
    words = f"at most {bounds.REWARD_FALL:g} spreads of the first rewards below its best mean of {RECENT} steps"
    return [Band("reward/mean", "reward_collapse", words, np.array(low))]


def _start(records: Sequence[LogRecord]) -> History:
    """Returns a history with the first records and the last one: enough for `then`."""
    return History([*(record for record in records if 0 < record["step"] <= FEW), *records[-1:]])
