"""A problem that a rule found, and what the rules look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple, TypeAlias

Record: TypeAlias = dict[str, Any]
SEVERITIES = ("note", "warning", "error")
FEW = 4  # records at the start that a rule compares with
RECENT = 8  # records that a rule averages, so that one odd step is no finding
WINDOW = 16  # last records that are kept without a gap
PAST = 128  # records between start and window that are kept, at most
# Metrics reward/* that are no reward function's.
NO_CHANNELS = {
    f"reward/{name}"
    for name in ("mean", "std", "error", "min", "max", "without_signal", "kl", "kl_pays", "overlong", "no_verdict")
}


@dataclass(frozen=True)
class Finding:
    """A problem that a rule found."""

    id: str
    severity: str  # one of SEVERITIES
    evidence: str
    cause: str
    fix: str
    reference: str

    def line(self) -> str:
        """Returns the finding in a line."""
        why = "; ".join(text for text in (self.cause, self.fix) if text)
        return f"{self.severity}: {self.evidence}: {why}" + (
            f" [{self.id}, {self.reference}]" if self.reference else ""
        )

    record = asdict


class History:
    """The records of a run that rules see: the first, the last, and some between, whose distance doubles in time.

    What is kept depends only on the steps, so a resumed run judges as an uninterrupted one does.
    """

    def __init__(self, records: Iterable[Record] = ()):
        self.records: list[Record] = []
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Adds the next record, or puts it in the place of the last one, if it has the same step."""
        if self.records and self.records[-1]["step"] == record["step"]:
            self.records.pop()
        self.records.append(record)
        last, distance = record["step"], 1
        while last // distance > PAST:
            distance *= 2
        kept = lambda step: step <= FEW or step > last - WINDOW or step % distance == 0  # noqa: E731
        self.records = [one for one in self.records if kept(one["step"])]

    @property
    def latest(self) -> list[Record]:
        """The last records, without a gap."""
        return self.records[-WINDOW:]

    @property
    def start(self) -> list[Record]:
        """The records of the first steps, if they are here. Step 0 has only an evaluation."""
        return [record for record in self.records if 0 < record["step"] <= FEW]

    def now(self, name: str) -> float | None:
        """Returns the mean of the last RECENT values; None, if a value is missing."""
        return mean(name, self.latest[-RECENT:], RECENT)

    def typical(self, name: str) -> float | None:
        """Returns the median of the last RECENT values, which one odd batch does not move; None, if one is missing."""
        values = [record[name] for record in self.latest[-RECENT:] if record.get(name) is not None]
        return median(values) if len(values) == RECENT else None

    def then(self, name: str) -> float | None:
        """Returns the mean of the first FEW values; None, if a value is missing or the start is not over."""
        return mean(name, self.start, FEW) if self.records and self.records[-1]["step"] > FEW + RECENT else None

    def best(self, name: str) -> float | None:
        """Returns the largest mean of RECENT values in a row that the history has; None, if there are too few."""
        values = [record[name] for record in self.records if record["step"] and record.get(name) is not None]
        return max((sum(values[i : i + RECENT]) / RECENT for i in range(len(values) - RECENT + 1)), default=None)

    @property
    def trains_nothing(self) -> bool:
        """Whether no completion of the step has a verdict: means over trained tokens then mean nothing."""
        return self.latest[-1].get("reward/no_verdict") == 1

    @property
    def solved(self) -> bool:
        """Whether the rewards have risen and hardly differ any more: nothing is left to learn."""
        before, now = self.then("reward/mean"), self.now("reward/mean")
        spread, left = self.then("reward/std"), self.now("reward/std")
        if before is None or now is None or spread is None or left is None:
            return False
        return now > before and left < 0.7 * spread


def mean(name: str, records: Sequence[Record], count: int) -> float | None:
    """Returns the mean of a value over `count` records; None, if one of them lacks it."""
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / count if len(values) == count else None


def channels(names: Iterable[str]) -> list[str]:
    """Returns the metrics of single reward functions among these names."""
    return sorted(name for name in names if name.startswith("reward/") and name not in NO_CHANNELS)


class Needs(NamedTuple):
    """What a rule reads: it is silent about records that do not have it."""

    metrics: tuple[str, ...]
    records: int = 1  # with these metrics, at least
    functions: int = 0  # reward functions, at least

    def lacks(self, records: Sequence[Record]) -> str:
        """Returns what these records do not have, in words; "": nothing."""
        counts = {name: sum(record.get(name) is not None for record in records) for name in self.metrics}
        if absent := [name for name, count in counts.items() if not count]:
            return f"no {absent[0]}"
        if min(counts.values(), default=len(records)) < self.records:
            return f"fewer than {self.records} records"
        if self.functions > len({name for record in records for name in channels(record)}):
            return f"fewer than {self.functions} reward functions"
        return ""
