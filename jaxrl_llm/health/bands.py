"""The healthy band of a metric, for plots: the values at which a health rule is silent.

The rules decide, not the bands, with the same constants. A rule may have more conditions, which `words` tells, and
most rules compare the mean of the last 8 values. `tests/test_report.py` compares every bound with its rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.health.finding import LogRecord
from jaxrl_llm.health.history import FEW, RECENT, History
from jaxrl_llm.health.rules.bounds import (
    CLIPPED,
    ENTROPY,
    EXPLAINED,
    FIRST_CLIPPED,
    GRADIENT,
    IMPORTANCE_KL,
    KL_PAYS,
    LENGTH,
    MEAN_WEIGHT,
    NEVER_STOPS,
    NO_SIGNAL,
    ONE_TURN,
    REPEATED,
    REWARD_FALL,
    SAMPLE_SIZE,
    TRUNCATED,
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
    return [*_fixed_bands(), *_start_bands(records), *_best_bands(records)]


def _fixed_bands() -> list[Band]:
    return [
        Band("groups/no_signal", "no_signal", f"at most {NO_SIGNAL:.0%}, unless the task is solved", None, NO_SIGNAL),
        Band("completion/truncated", "never_stops", f"below {NEVER_STOPS:.0%}", None, NEVER_STOPS),
        Band("clip/first", "phantom_clipping", f"at most {FIRST_CLIPPED:.0%}", None, FIRST_CLIPPED),
        Band("importance/mean", "sampler_mismatch", f"{MEAN_WEIGHT[0]:g} to {MEAN_WEIGHT[1]:g}", *MEAN_WEIGHT),
        Band("importance/ess", "sampler_mismatch", f"at least {SAMPLE_SIZE:.0%}", SAMPLE_SIZE, None),
        Band(
            "importance/kl",
            "sampler_mismatch",
            f"at most {IMPORTANCE_KL:g}, unless older weights sampled",
            None,
            IMPORTANCE_KL,
        ),
        Band("episode/turns", "tools_unused", f"above {ONE_TURN:g}, unless the task is solved", ONE_TURN, None),
        Band(
            "critic/explained_variance",
            "critic_lags",
            "at least -0.05 after 16 steps, unless it rises",
            EXPLAINED,
            None,
        ),
    ]


def _start_bands(records: Sequence[LogRecord]) -> list[Band]:
    """Bounds that are multiples of the mean of the first 4 steps."""
    start = _start(records).then
    start_bands = []
    if entropy := start("entropy"):
        low, high = ENTROPY
        words = f"at least {low:g} times the start, unless the task is solved"
        start_bands.append(Band("entropy", "entropy_collapse", words, low * entropy))
        start_bands.append(
            Band("entropy", "entropy_explosion", f"at most {high:g} times the start", None, high * entropy)
        )
    norm, clipped = start("grad_norm"), start("clip/fraction")
    if norm is not None and clipped is not None:
        words = f"at most {GRADIENT[0]:g} times the start, or {GRADIENT[1]:g} times if few tokens are clipped"
        start_bands.append(Band("grad_norm", "gradient_climb", words, None, GRADIENT[0] * norm))
        words = f"at most {CLIPPED[0]:g} times the start or {CLIPPED[1]:.0%}, unless the gradient norm stays"
        start_bands.append(Band("clip/fraction", "gradient_climb", words, None, max(CLIPPED[0] * clipped, CLIPPED[1])))
    if (cut := start("completion/truncated")) is not None:
        words = f"at most {TRUNCATED[0]:g} times the start or {TRUNCATED[1]:.0%}, unless the reward stays"
        start_bands.append(
            Band("completion/truncated", "truncated", words, None, max(TRUNCATED[0] * cut, TRUNCATED[1]))
        )
    if length := start("completion/length"):
        words = f"at least {LENGTH:g} times the start, unless the reward falls"
        start_bands.append(Band("completion/length", "length_collapse", words, LENGTH * length))
    if (again := start("completion/repeated")) is not None:
        words = f"at most {REPEATED[0]:g} times the start or {REPEATED[1]:.0%}"
        start_bands.append(Band("completion/repeated", "repeats", words, None, max(REPEATED[0] * again, REPEATED[1])))
    spread, kl = start("reward/std"), start("reward/kl")
    if spread and kl is not None:
        words = f"at most {KL_PAYS:g} spreads of the rewards above the start, unless the reward stays"
        start_bands.append(Band("reward/kl", "kl_pays", words, None, max(kl, 0.0) + KL_PAYS * spread))
    return start_bands


def _best_bands(records: Sequence[LogRecord]) -> list[Band]:
    """The reward stays near its best mean of 8 steps so far."""
    spread = _start(records).then("reward/std")
    if not spread:
        return []
    best, low, recent = -np.inf, [], list[float]()
    for record in records:
        value = record.get("reward/mean")
        if record["step"] and value is not None:
            recent = [*recent[1 - RECENT :], value]
            # As `History.best`: a window that is not full would count one lucky step as a mean.
            best = max(best, sum(recent) / RECENT) if len(recent) == RECENT else best
        low.append(best - REWARD_FALL * spread if np.isfinite(best) else np.nan)
    words = f"at most {REWARD_FALL:g} spreads of the first rewards below its best mean of {RECENT} steps"
    return [Band("reward/mean", "reward_collapse", words, np.array(low))]


def _start(records: Sequence[LogRecord]) -> History:
    """Returns a history with the first records and the last one: enough for `then`."""
    return History([*(record for record in records if 0 < record["step"] <= FEW), *records[-1:]])
