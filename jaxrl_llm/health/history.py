"""The records of a run as the health rules read them: means over steps, and comparisons of these with noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cache
from math import exp, inf, isnan, log, nan
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy

from . import noise
from .finding import LogRecord

Metric: TypeAlias = str | Callable[[LogRecord], float | None]  # name of a metric, or a function of a record
START_STEPS = 4  # number of records at the start of a run that rules compare with
RECENT_STEPS = 8  # number of last records that rules average, so that a single odd step gives no finding
LONGER_FACTOR = 4  # factor of the number of records in longer means, for runs whose batches are small
WINDOW = 16  # number of last records that rules read one by one
TREND_STEPS, TREND_VALUES = (
    2 * WINDOW,
    3 * WINDOW,
)  # number of steps until a trend is judged; number of values that it covers
KEPT_WITHOUT_GAP = 4 * LONGER_FACTOR * RECENT_STEPS  # number of last records that are all kept
KEPT_BETWEEN = 128  # largest number of kept records between the start and the last ones
KEPT_EVALUATIONS = 8  # number of last evaluations that are kept, besides the best one
MOST_GROUPS = 2 / 3  # share of the groups without a signal
TINY = 1e-12  # smallest argument of logarithms
HELD_OUT_FALL = 0.05  # fall of the held-out accuracy that counts as one
NEAR_BEST = 0.25  # a mean is near the best if it is below by at most this share of the whole fall
# Share of the significance level for a fall from the best mean. The rest is for a fall from the start.
LEVEL_FROM_BEST = 0.1
# {metric: metric of its standard error in a step, computed from the groups of the step}.
ERRORS = {
    "reward/mean": "reward/error",
    "completion/length": "completion/length_error",
    "completion/truncated": "completion/truncated_error",
}


class Column(NamedTuple):
    """The values of a metric in a history, and their steps."""

    steps: np.ndarray
    values: np.ndarray


class History:
    """The records of a run that the rules read: the first and the last records, and some in between.

    The distance of the records in between doubles as the run grows, so a history stays small. They are kept in pairs of
    neighbouring steps, because the noise is estimated from such pairs. The best and the last evaluations are kept too.
    Which records are kept depends only on the records, so a resumed run judges like an uninterrupted one.
    """

    start_steps, recent_steps = (
        START_STEPS,
        RECENT_STEPS,
    )  # number of steps of the start; number of last steps that are averaged

    def __init__(self, records: Iterable[LogRecord] = ()):
        self.records: list[LogRecord] = []
        self._columns: dict[Any, Column] = {}
        for record in records:
            self.add(record)

    def add(self, record: LogRecord) -> None:
        """Adds the next record. A record with the step of the last one replaces the last one."""
        self._columns.clear()
        if self.records and self.records[-1]["step"] == record["step"]:
            self.records.pop()
        self.records.append(record)
        last_step, distance = record["step"], 1
        # Two records are kept for each `distance` steps. The distance is a power of two, because then the records that
        # a longer distance needs were also kept for all shorter ones.
        while 2 * last_step // distance > KEPT_BETWEEN and last_step > KEPT_BETWEEN:
            distance *= 2
        kept_evaluations = _kept_evaluations(self.records)

        def is_kept(old_record: LogRecord) -> bool:
            step = old_record["step"]
            return (
                step <= LONGER_FACTOR * START_STEPS
                or step > last_step - KEPT_WITHOUT_GAP
                or step % distance < 2
                or step in kept_evaluations
            )

        self.records = [record for record in self.records if is_kept(record)]

    def with_longer_means(self) -> History:
        """Returns a history of the same records whose means cover LONGER_FACTOR times as many steps.

        With small batches, a change shows only in longer means.
        """
        # Both histories share one cache of columns, because columns do not depend on the length of means.
        longer = copy(self)
        longer.start_steps, longer.recent_steps = LONGER_FACTOR * START_STEPS, LONGER_FACTOR * RECENT_STEPS
        return longer

    def column(self, name: Metric) -> Column:
        """Returns the steps and the values of a metric, without records in which it is None."""
        if name not in self._columns:
            all_values = _metric_of_records(name, self.records)
            step_values = [
                (record["step"], x) for record, x in zip(self.records, all_values, strict=True) if x is not None
            ]
            steps, values = zip(*step_values, strict=True) if step_values else ((), ())
            self._columns[name] = Column(np.array(steps, int), np.array(values, float))
        return self._columns[name]

    @property
    def last_records(self) -> list[LogRecord]:
        """The last WINDOW records."""
        return self.records[-WINDOW:]

    def recent_values(self, name: Metric, *, back: int = 0) -> np.ndarray:
        """Returns the last `recent_steps` values; all NaN if the log lacks more than half of them.

        back: number of windows of this length to go back. Missing values are skipped, because a single value that is
        not finite tells nothing about the others.
        """
        steps, values = self.column(name)
        step_range = 2 * (back + 1) * self.recent_steps
        values = values[steps > self.records[-1]["step"] - step_range] if self.records else values
        stop = len(values) - back * self.recent_steps
        return _all_or_nan(values[max(stop - self.recent_steps, 0) : max(stop, 0)], self.recent_steps)

    def start_values(self, name: Metric) -> np.ndarray:
        """Returns the first `start_steps` values; all NaN if too many are missing or the start is not over yet."""
        steps, values = self.column(name)
        # A log that begins late in the run has no start to compare with.
        started = (
            len(values) > self.start_steps + self.recent_steps and steps[self.start_steps - 1] <= 2 * self.start_steps
        )
        return _all_or_nan(values[: self.start_steps] if started else values[:0], self.start_steps)

    def values_until(self, name: Metric, step: int) -> np.ndarray:
        """Returns the last `recent_steps` values up to a step; all NaN if there are fewer than `start_steps` values."""
        steps, values = self.column(name)
        last = values[steps <= step][-self.recent_steps :]
        return _all_or_nan(last, max(len(last), self.start_steps))

    def misses_recent(self, name: str) -> bool:
        """Returns whether one of the last `recent_steps` records lacks a metric."""
        return any(record.get(name) is None for record in self.records[-self.recent_steps :])

    def recent_mean(self, name: Metric) -> float:
        """Returns the mean of the last `recent_steps` values; NaN if too many are missing."""
        return _mean(self.recent_values(name))

    def previous_mean(self, name: Metric) -> float:
        """Returns the mean of the values before those of `recent_mean`."""
        return _mean(self.recent_values(name, back=1))

    def recent_median(self, name: Metric) -> float:
        """Returns the median of the last `recent_steps` values, which a single odd batch does not change."""
        return float(np.median(self.recent_values(name)))

    def start_mean(self, name: Metric) -> float:
        """Returns the mean of the first `start_steps` values; NaN if too many are missing or the start is not over."""
        return _mean(self.start_values(name))

    def best_mean(self, name: Metric) -> float:
        """Returns the largest mean of `recent_steps` consecutive values; NaN if there are fewer values."""
        windows = self._windows(name)
        return float(windows.mean(axis=1).max()) if len(windows) else nan

    def last_step_near_best(self, name: Metric) -> int:
        """Returns the step since which the mean of a metric has fallen: the last one at which it was near its best.

        Raises: ValueError, if there are too few values.
        """
        # The last window near the best mean counts, because the best window may be the first one of a long plateau.
        # Where a rule reports a fall, noise is smaller than the share NEAR_BEST of it.
        means = self._windows(name).mean(axis=1)
        near_best = np.flatnonzero(means >= means.max() - NEAR_BEST * (means.max() - means[-1]))
        return int(self.column(name).steps[near_best[-1] + (self.recent_steps - 1) // 2])

    def _windows(self, name: Metric) -> np.ndarray:
        """Returns all windows [N, recent_steps] of consecutive values."""
        values = self.column(name).values
        if len(values) < self.recent_steps:
            return np.zeros((0, self.recent_steps))
        return np.lib.stride_tricks.sliding_window_view(values, self.recent_steps)

    def rise_strength(self, name: Metric, *, logarithmic: bool = False, choices: float = 1) -> float:
        """Returns the change of a metric since the start, as a multiple of the largest change that noise explains.

        A result above 1 means that the metric has risen, below -1 that it has fallen; NaN means that values are
        missing. log: whether to compare logarithms. choices: number of metrics from which the rule picks the most
        extreme one.
        """
        name, look_number = (
            _logarithm(name) if logarithmic else name,
            self.records[-1]["step"] - self.start_steps - self.recent_steps,
        )
        return self._strength(
            name, self.recent_values(name), self.start_values(name), look_number=look_number, choices=choices
        )

    def trend_strength(self, name: Metric) -> float:
        """Returns the trend of a metric over the later half of the run, or over at least its last TREND_VALUES values.

        The unit is the standard error of values without a trend (Mann, 1945; Kendall, 1948); positive means rising. NaN
        if there are too few values.
        """
        # The first steps are left out, because they tell nothing about the later trend.
        steps, values = (column[RECENT_STEPS:] for column in self.column(name))
        values = values[-max(TREND_VALUES, int((2 * steps > self.records[-1]["step"]).sum())) :]
        count = len(values)
        # Ranks are compared, so that a single extreme value, such as an explained variance of -1,000, counts little.
        rank_sum = np.sign(np.subtract.outer(values, values))[np.tril_indices(count)].sum()
        has_enough = count >= TREND_STEPS - RECENT_STEPS
        return float(rank_sum / np.sqrt(count * (count - 1) * (2 * count + 5) / 18)) if has_enough else nan

    def factor_since(self, name: str, step: int) -> float:
        """Returns the factor (>= 1) between the values at a step and the recent ones.

        The factor is 1 if noise explains the change, and NaN if values are missing.
        """
        metric = _logarithm(name)
        recent, values_then = self.recent_values(metric), self.values_until(metric, step)
        strength = self._strength(metric, recent, values_then, look_number=self.records[-1]["step"])
        if not abs(strength) > 1:
            return nan if isnan(strength) else 1.0
        return exp(abs(noise.center(recent) - noise.center(values_then)))

    def keeps_held_out_accuracy(self, step: int | None = None) -> bool:
        """Returns whether the held-out accuracy has not fallen since a step; False if it was not measured.

        A fall of the reward then means that problems have become harder, not that the policy is worse. step: None for
        the step of the first evaluation.
        """
        evaluations = [record for record in self.records if record.get("eval/accuracy") is not None and record["step"]]
        step = evaluations[0]["step"] if evaluations and step is None else step
        accuracies_before = [record["eval/accuracy"] for record in evaluations if record["step"] <= step]
        accuracies_after = [record["eval/accuracy"] for record in evaluations if record["step"] > step]
        return (
            bool(accuracies_before and accuracies_after)
            and accuracies_after[-1] > accuracies_before[-1] - HELD_OUT_FALL
        )

    def fall_strength(self, name: Metric) -> float:
        """Returns the fall of a metric from its best mean or from its start, as a multiple of what noise explains.

        A result above 1 means that the metric has fallen. The larger of the two multiples is returned. Both tests share
        one significance level, of which the fall from the start has 1 - LEVEL_FROM_BEST.
        """
        recent, windows = self.recent_values(name), self._windows(name)
        if not len(windows):
            return nan
        # The best of many windows is high by chance, so its share of the level is divided by the number of windows.
        best_window = windows[np.argmax(windows.mean(axis=1))]
        look_number = self.records[-1]["step"] - self.recent_steps  # the rule has tested once a step since then
        from_best = self._strength(
            name, best_window, recent, look_number=look_number, choices=len(windows) / LEVEL_FROM_BEST
        )
        return max(from_best, -self.rise_strength(name, choices=1 / (1 - LEVEL_FROM_BEST)))

    def strength_above(self, name: Metric, bound: float, *, known_error: float = 0.0) -> float:
        """Returns the distance of the recent values above a bound, as a multiple of what noise explains.

        A result above 1 means that the values are above the bound, below -1 that they are below it. known_error: known
        standard error of one step; a larger estimate from the records replaces it.
        """
        look_number = self.records[-1]["step"] - self.recent_steps + 1
        return self._strength(
            name, self.recent_values(name), np.array([bound]), look_number=look_number, known_error=known_error
        )

    def is_often_above(self, name: Metric, bound: float, chance_above: float) -> bool:
        """Returns whether more of the last `recent_steps` values are above a bound than chance explains (sign test).

        chance_above: probability that a step of a healthy run is above the bound.
        """
        recent = self.column(name).values[-self.recent_steps :]
        # bdtrc(k, n, p) is P(X > k), so k = count - 1 gives P(X >= count).
        above = int((recent > bound).sum())
        tail = scipy.special.bdtrc(above - 1, len(recent), chance_above) if above else 1.0
        return tail < noise.level(self.records[-1]["step"])

    def _strength(
        self,
        name: Metric,
        first_values: np.ndarray,
        second_values: np.ndarray,
        *,
        look_number: int,
        choices: float = 1,
        known_error: float = 0.0,
    ) -> float:
        """Returns the difference of two windows of a metric, as a multiple of the largest one that noise explains.

        second_values: second window, or an array of one known number. look_number: number of times that the rule has
        tested, this time included. choices: number of windows or metrics from which the rule picks the most extreme
        one.
        """
        deviation, freedom = self.step_noise(name, known_error)
        counts = [len(first_values), *([len(second_values)] if len(second_values) > 1 else [])]
        # The variances of two independent means add up. A known number has no variance.
        spread = deviation * np.sqrt(sum(noise.SPREAD / count for count in counts))
        allowed = noise.quantile(look_number, freedom, choices=choices)
        return noise.strength(noise.center(first_values) - noise.center(second_values), float(spread), allowed)

    def step_noise(self, name: Metric, known_error: float = 0.0) -> noise.Noise:
        """Returns the noise of a metric in one step: the larger of two estimates.

        One comes from the differences of neighbouring steps, the other from the groups of a step or from known_error.
        """
        # Neighbouring steps show too little noise where a metric rarely jumps, such as a reward that is nearly always
        # 0. Then the differences between the groups of a step are the better estimate.
        deviation, freedom = noise.step_noise(*self.column(name))
        if isinstance(name, str) and name in ERRORS and not isnan(group_error := self.recent_mean(ERRORS[name])):
            group_count = self.recent_mean("groups/count")
            return noise.Noise(
                max(deviation, group_error),
                max(freedom, (group_count - 1 if group_count >= 1 else 1.0) * self.recent_steps),
            )
        # A known error has infinite degrees of freedom, so Student's t becomes the normal distribution.
        return noise.Noise(deviation, freedom) if deviation > known_error else noise.Noise(known_error, inf)

    @property
    def trains_nothing(self) -> bool:
        """Whether no completion of the last step has a reward, so that means over trained tokens mean nothing."""
        return self.last_records[-1].get("reward/no_verdict") == 1

    @property
    def is_solved(self) -> bool:
        """Whether the task is nearly solved: rewards have risen, and hardly differ or are best in most groups."""
        start_reward, reward = self.start_mean("reward/mean"), self.recent_mean("reward/mean")
        start_deviation, deviation = self.start_mean("reward/std"), self.recent_mean("reward/std")
        # Rewards of 0 and 1 have the deviation sqrt(p (1 - p)). It falls to 0.7 of its largest value at p = 0.86.
        return reward > start_reward and (
            deviation < 0.7 * start_deviation or (start_deviation + deviation >= 0 and self.solved_share > MOST_GROUPS)
        )

    @property
    def solved_share(self) -> float:
        """Share of right answers in the groups without a signal, which are all right or all wrong; NaN if unknown.

        The largest reward of the run counts as right, and the smallest as wrong.
        """
        without_signal, lowest, highest = (
            self.column(f"reward/{name}").values for name in ("without_signal", "min", "max")
        )
        if not len(without_signal) or not len(lowest) or not len(highest) or highest.max() <= lowest.min():
            return nan
        return float((without_signal[-self.recent_steps :].mean() - lowest.min()) / (highest.max() - lowest.min()))


def _kept_evaluations(records: Sequence[LogRecord]) -> set[int]:
    """Returns the steps of the evaluations that a history keeps: the best one, and the last ones."""
    accuracies = [
        # The step is negated, so that of equal accuracies the first one counts as the best.
        (record["eval/accuracy"], -record["step"])
        for record in records
        if record.get("eval/accuracy") is not None
    ]
    return {-step for _, step in [*accuracies[-KEPT_EVALUATIONS:], *([max(accuracies)] if accuracies else [])]}


def _metric_of_records(name: Metric, records: Sequence[LogRecord]) -> list[float | None]:
    """Returns the value of a metric in each record; None where it is missing, and at step 0."""
    if callable(name):
        return [name(record) if record["step"] else None for record in records]
    return [record.get(name) if record["step"] else None for record in records]


def _all_or_nan(values: np.ndarray, count: int) -> np.ndarray:
    """Returns `values` if there are `count` of them, else `count` NaNs."""
    # Comparisons with NaN are false, so rules are silent where values are missing.
    return values if len(values) == count else np.full(count, nan)


def _mean(values: np.ndarray) -> float:
    # The sum of a list is faster than NumPy for a few numbers.
    return sum(values.tolist()) / len(values)


@cache
def _logarithm(name: Metric) -> Metric:
    """Returns a function of a record: the logarithm of a metric, or None if the record lacks the metric."""
    metric = name if callable(name) else lambda record: record.get(name)

    def logarithm(record: LogRecord) -> float | None:
        return None if (x := metric(record)) is None else log(max(x, TINY))

    return logarithm
