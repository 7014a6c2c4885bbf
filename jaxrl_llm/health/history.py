"""The records of a run as the health rules see them: means of steps, and what noise may make of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cache
from math import exp, inf, isnan, log, nan
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from scipy.special import bdtrc

from . import noise
from .finding import LogRecord

Metric: TypeAlias = str | Callable[[LogRecord], float | None]  # its name, or how it follows from a record
FEW = 4  # records at the start that a rule compares with
RECENT = 8  # records that a rule averages, so that one odd step is no finding
SLOWER = 4  # times as many records, where a small batch hides a change in fewer
WINDOW = 16  # last records that a rule looks at one by one
TREND, LONG = 2 * WINDOW, 3 * WINDOW  # values until a trend is judged, and over which at least, once they are there
GAPLESS = 4 * SLOWER * RECENT  # last records that are kept without a gap
PAST = 128  # records between start and window that are kept, at most
EVALUATIONS = 8  # last evaluations that are kept, beside the best one
MOSTLY = 2 / 3  # of the groups without a signal
TINY = 1e-12  # for logarithms
HELD_OUT_FALL = 0.05  # of the accuracy
NEAR_BEST = 0.25  # part of the way from the best mean to that of now
FROM_BEST = 0.1  # part of a level for a fall from the best mean; the rest is for one from the start
# Metric -> its standard error in a step, from the groups of the step.
ERRORS = {
    "reward/mean": "reward/error",
    "completion/length": "completion/length_error",
    "completion/truncated": "completion/truncated_error",
}


class Column(NamedTuple):
    """The values of a metric in a history."""

    steps: np.ndarray
    values: np.ndarray


class History:
    """The records of a run that rules see: the first, the last, and some between, whose distance doubles in time.

    What is kept depends only on the records, so a resumed run judges as an uninterrupted one does. The records between
    are pairs of neighbouring steps, because their differences are the noise. Of the evaluations, the best one and the
    last ones stay.
    """

    few, recent = FEW, RECENT  # steps of the start, and steps that are averaged

    def __init__(self, records: Iterable[LogRecord] = ()):
        self.records: list[LogRecord] = []
        self._columns: dict[Any, Column] = {}
        for record in records:
            self.add(record)

    def add(self, record: LogRecord) -> None:
        """Adds the next record, or puts it in the place of the last one, if it has the same step."""
        self._columns.clear()
        if self.records and self.records[-1]["step"] == record["step"]:
            self.records.pop()
        self.records.append(record)
        last, distance = record["step"], 1
        # Two records for each `distance` steps. A power of two: what this distance keeps, all shorter ones have kept,
        # so nothing that it needs is gone.
        while 2 * last // distance > PAST and last > PAST:
            distance *= 2
        judged = _evaluations(self.records)

        def stays(past: LogRecord) -> bool:
            step = past["step"]
            return step <= SLOWER * FEW or step > last - GAPLESS or step % distance < 2 or step in judged

        self.records = [past for past in self.records if stays(past)]

    def slowly(self) -> History:
        """Returns the same records, for means over SLOWER times as many steps: a small batch shows less in few."""
        # Both use the same records and one cache: a column does not depend on how many steps a mean has.
        slow = copy(self)
        slow.few, slow.recent = SLOWER * FEW, SLOWER * RECENT
        return slow

    def column(self, name: Metric) -> Column:
        """Returns the steps and the values of a metric, or of a function of a record, where it is not None."""
        if name not in self._columns:
            values = _values(name, self.records)
            rows = [(record["step"], x) for record, x in zip(self.records, values, strict=True) if x is not None]
            steps, present = zip(*rows, strict=True) if rows else ((), ())
            self._columns[name] = Column(np.array(steps, int), np.array(present, float))
        return self._columns[name]

    @property
    def latest(self) -> list[LogRecord]:
        """The last records, without a gap."""
        return self.records[-WINDOW:]

    def window(self, name: Metric, *, back: int = 0) -> np.ndarray:
        """Returns the last `recent` values, or those `back` windows before; NaN for all, if the log lacks half of them.

        Missing values are passed over, because one reward in a few that is not finite says nothing of the others.
        """
        steps, values = self.column(name)
        reach = 2 * (back + 1) * self.recent
        values = values[steps > self.records[-1]["step"] - reach] if self.records else values
        end = len(values) - back * self.recent
        return _whole(values[max(end - self.recent, 0) : max(end, 0)], self.recent)

    def beginning(self, name: Metric) -> np.ndarray:
        """Returns the first `few` values; NaN for all, if half of them are missing or the start is not over."""
        steps, values = self.column(name)
        # A log that begins late has no beginning to compare with.
        started = len(values) > self.few + self.recent and steps[self.few - 1] <= 2 * self.few
        return _whole(values[: self.few] if started else values[:0], self.few)

    def until(self, name: Metric, step: int) -> np.ndarray:
        """Returns the last `recent` values up to a step, or at least `few`; NaN for all, if there are fewer."""
        steps, values = self.column(name)
        last = values[steps <= step][-self.recent :]
        return _whole(last, max(len(last), self.few))

    def lacks(self, name: str) -> bool:
        """Returns whether one of the last `recent` records has no value of a metric."""
        return any(record.get(name) is None for record in self.records[-self.recent :])

    def now(self, name: Metric) -> float:
        """Returns the mean of the last `recent` values; NaN, if too many are missing."""
        return _mean(self.window(name))

    def earlier(self, name: Metric) -> float:
        """Returns the mean of the values before those of `now`."""
        return _mean(self.window(name, back=1))

    def typical(self, name: Metric) -> float:
        """Returns the median of the last values, which one odd batch does not move; NaN, if too many are missing."""
        return float(np.median(self.window(name)))

    def then(self, name: Metric) -> float:
        """Returns the mean of the first `few` values; NaN, if too many are missing or the start is not over."""
        return _mean(self.beginning(name))

    def best(self, name: Metric) -> float:
        """Returns the largest mean of `recent` values in a row that the history has; NaN, if there are too few."""
        windows = self._windows(name)
        return float(windows.mean(axis=1).max()) if len(windows) else nan

    def near_best_until(self, name: Metric) -> int:
        """Returns the step in the middle of the latest window that is near the best one: the mean has fallen since.

        Raises: ValueError, if there are too few values.
        """
        # The latest window near the best one counts, because the best window may be the first of a long plateau. Noise
        # alone is less than the part NEAR_BEST of a fall that a rule reports.
        means = self._windows(name).mean(axis=1)
        near = np.flatnonzero(means >= means.max() - NEAR_BEST * (means.max() - means[-1]))
        return int(self.column(name).steps[near[-1] + (self.recent - 1) // 2])

    def _windows(self, name: Metric) -> np.ndarray:
        """Returns all windows [N, recent] of values in a row."""
        values = self.column(name).values
        if len(values) < self.recent:
            return np.zeros((0, self.recent))
        return np.lib.stride_tricks.sliding_window_view(values, self.recent)

    def risen(self, name: Metric, *, log: bool = False, choices: float = 1) -> float:
        """Returns how far a metric has moved since the start, as a multiple of what noise may reach in this run.

        Above 1 it has risen, below -1 it has fallen. log: judges the ratio of two positive values. choices: number of
        metrics of which a rule takes the most extreme one (`noise.quantile`). NaN, if a value is missing.
        """
        name, look = _logarithm(name) if log else name, self.records[-1]["step"] - self.few - self.recent
        return self._strength(name, self.window(name), self.beginning(name), look=look, choices=choices)

    def trend(self, name: Metric) -> float:
        """Returns how far a metric rises over the later half of the run, or over its last LONG values.

        The unit is the standard error of values without a trend (Mann, 1945; Kendall, 1948). NaN: too few values.
        """
        # What a metric does in its first steps says nothing of the later ones.
        steps, values = (column[RECENT:] for column in self.column(name))
        values = values[-max(LONG, int((2 * steps > self.records[-1]["step"]).sum())) :]
        count = len(values)
        # Ranks: an explained variance of -1,000 in one batch counts no more than one of -1.
        rises = np.sign(np.subtract.outer(values, values))[np.tril_indices(count)].sum()
        enough = count >= TREND - RECENT
        return float(rises / np.sqrt(count * (count - 1) * (2 * count + 5) / 18)) if enough else nan

    def changed_since(self, name: str, step: int) -> float:
        """Returns the factor, of 1 or more, between now and a step; 1: noise may be all; NaN: values are missing."""
        metric = _logarithm(name)
        now, before = self.window(metric), self.until(metric, step)
        strength = self._strength(metric, now, before, look=self.records[-1]["step"])
        if not abs(strength) > 1:
            return nan if isnan(strength) else 1.0
        return exp(abs(noise.center(now) - noise.center(before)))

    def is_well_held_out(self, step: int | None = None) -> bool:
        """Returns whether the held-out accuracy, measured up to a step and after it, has not fallen since.

        Then the problems are harder if the reward has fallen, and the policy is not worse. step: None for that of the
        first evaluation.
        """
        judged = [record for record in self.records if record.get("eval/accuracy") is not None and record["step"]]
        step = judged[0]["step"] if judged and step is None else step
        before, after = ([r["eval/accuracy"] for r in judged if (r["step"] > step) is later] for later in (False, True))
        return bool(before and after) and after[-1] > before[-1] - HELD_OUT_FALL

    def fallen(self, name: Metric) -> float:
        """Returns how far a metric is below its best mean of `recent` values, or below its start.

        The unit is what noise may reach in this run: above 1 it has fallen. A fall from the start, a window that
        nobody chose, has most of the level.
        """
        now, windows = self.window(name), self._windows(name)
        if not len(windows):
            return nan
        # The best of many windows is high by chance. So its level is split over all of them, and the start, which
        # nobody chose, keeps the rest of the level.
        best = windows[np.argmax(windows.mean(axis=1))]
        look = self.records[-1]["step"] - self.recent
        from_best = self._strength(name, best, now, look=look, choices=len(windows) / FROM_BEST)
        return max(from_best, -self.risen(name, choices=1 / (1 - FROM_BEST)))

    def above(self, name: Metric, bound: float, *, error: float = 0.0) -> float:
        """Returns how far the recent values are above a bound, as a multiple of what noise may reach in this run.

        Above 1 they are above it, below -1 they are below it.
        error: the standard error of a step that is known, at least.
        """
        look = self.records[-1]["step"] - self.recent + 1
        return self._strength(name, self.window(name), np.array([bound]), look=look, error=error)

    def often_above(self, name: Metric, bound: float, chance: float) -> bool:
        """Returns whether more of the recent values, up to `recent` of them, are above a bound than noise explains.

        chance: probability that a step of a healthy run is above the bound. The test is the sign test, which takes the
        tail of a binomial.
        """
        now = self.column(name).values[-self.recent :]
        # bdtrc(k, n, p) is P(X > k), and P(X >= count) is wanted.
        tail = bdtrc(int((now > bound).sum()) - 1, len(now), chance) if (now > bound).any() else 1.0
        return tail < noise.level(self.records[-1]["step"])

    def _strength(
        self, name: Metric, a: np.ndarray, b: np.ndarray, *, look: int, choices: float = 1, error: float = 0.0
    ) -> float:
        """Compares two windows of a metric; b may be one number that is known."""
        step, freedom = self.noise_of(name, error)
        counts = [len(a), *([len(b)] if len(b) > 1 else [])]
        # The variances of two independent means add up. A bound that is known has none.
        spread = step * np.sqrt(sum(noise.SPREAD / count for count in counts))
        allowed = noise.quantile(look, freedom, choices=choices)
        return noise.strength(noise.center(a) - noise.center(b), float(spread), allowed)

    def noise_of(self, name: Metric, error: float = 0.0) -> noise.Noise:
        """Returns the noise of a step: from neighbouring steps, and at least what the groups of a step show."""
        # Neighbours show too little where a metric hardly ever jumps, such as a reward that is 0 in nearly all steps.
        # What the groups of one step differ by is then the better bound.
        deviation, freedom = noise.step_noise(*self.column(name))
        if isinstance(name, str) and name in ERRORS and not isnan(group_error := self.now(ERRORS[name])):
            groups = self.now("groups/count")
            return noise.Noise(
                max(deviation, group_error), max(freedom, (groups - 1 if groups >= 1 else 1.0) * self.recent)
            )
        # A known error has no estimate in it: Student's t becomes the normal distribution.
        return noise.Noise(deviation, freedom) if deviation > error else noise.Noise(error, inf)

    @property
    def trains_nothing(self) -> bool:
        """Whether no completion of the step has a verdict: means over trained tokens then mean nothing."""
        return self.latest[-1].get("reward/no_verdict") == 1

    @property
    def solved(self) -> bool:
        """Whether the rewards have risen, and what is left to learn is little: they hardly differ, or most are best."""
        before, now = self.then("reward/mean"), self.now("reward/mean")
        spread, spread_now = self.then("reward/std"), self.now("reward/std")
        # Rewards of 0 and 1 have the spread sqrt(p (1 - p)): 0.7 of its largest value is p = 0.86.
        return now > before and (spread_now < 0.7 * spread or (spread + spread_now >= 0 and self.easy > MOSTLY))

    @property
    def easy(self) -> float:
        """The share of the groups without a signal in which all is right; the others are all wrong. NaN: not known.

        Right is the largest reward that the run has seen, wrong the smallest.
        """
        mean, lowest, highest = (self.column(f"reward/{name}").values for name in ("without_signal", "min", "max"))
        if not len(mean) or not len(lowest) or not len(highest) or highest.max() <= lowest.min():
            return nan
        return float((mean[-self.recent :].mean() - lowest.min()) / (highest.max() - lowest.min()))


def _evaluations(records: Sequence[LogRecord]) -> set[int]:
    """Returns the steps of the evaluations that stay: the best one, and the last ones."""
    accuracies = [
        # Minus the step: of equal accuracies the first one is the best.
        (record["eval/accuracy"], -record["step"])
        for record in records
        if record.get("eval/accuracy") is not None
    ]
    return {-step for _, step in [*accuracies[-EVALUATIONS:], *([max(accuracies)] if accuracies else [])]}


def _values(name: Metric, records: Sequence[LogRecord]) -> list[float | None]:
    """Returns a metric of each record; None, where it is missing, as at step 0."""
    if callable(name):
        return [name(record) if record["step"] else None for record in records]
    return [record.get(name) if record["step"] else None for record in records]


def _whole(values: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` values; NaN for all, if there are fewer."""
    # No comparison with NaN holds: a rule is silent where values are missing.
    return values if len(values) == count else np.full(count, nan)


def _mean(values: np.ndarray) -> float:
    # Faster than NumPy for a few numbers.
    return sum(values.tolist()) / len(values)


@cache
def _logarithm(name: Metric) -> Metric:
    """Returns the function of a record that is the logarithm of a metric."""
    metric = name if callable(name) else lambda record: record.get(name)

    def logarithm(record: LogRecord) -> float | None:
        return None if (x := metric(record)) is None else log(max(x, TINY))

    return logarithm
