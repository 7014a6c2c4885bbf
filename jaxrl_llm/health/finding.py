"""A problem that a rule finds, and the metrics that a rule needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

LogRecord: TypeAlias = dict[str, Any]
SEVERITIES = ("note", "warning", "error")
# Metrics reward/* that are no reward function's.
NO_CHANNELS = {
    f"reward/{name}"
    for name in (
        *("mean", "std", "std_bound", "error", "min", "max", "without_signal", "kl", "kl_pays", "overlong"),
        "no_verdict",
    )
}


@dataclass(frozen=True)
class Finding:
    """A problem that a rule found."""

    severity: str  # one of SEVERITIES
    evidence: str
    cause: str = ""
    fix: str = ""
    reference: str = ""
    id: str = ""  # the name of its rule
    since: int | None = None  # last step before the problem; None: the rule does not know it

    def line(self) -> str:
        """Returns the finding in a line."""
        why = "; ".join(text for text in (self.cause, self.fix) if text)
        return f"{self.severity}: {self.evidence}: {why}" + (
            f" [{self.id}, {self.reference}]" if self.reference else ""
        )

    record = asdict


def channels(names: Iterable[str]) -> list[str]:
    """Returns the metrics of single reward functions among these names."""
    return sorted(name for name in names if name.startswith("reward/") and name not in NO_CHANNELS)


class Needs(NamedTuple):
    """What a rule reads: it is silent about records that do not have it."""

    metrics: tuple[str, ...]
    records: int = 1  # with these metrics, at least
    functions: int = 0  # reward functions, at least

    def lacks(self, records: Sequence[LogRecord]) -> str:
        """Returns what these records do not have, in words; "": nothing."""
        counts = {name: sum(record.get(name) is not None for record in records) for name in self.metrics}
        if absent := [name for name, count in counts.items() if not count]:
            return f"no {absent[0]}"
        if min(counts.values(), default=len(records)) < self.records:
            return f"fewer than {self.records} records"
        if self.functions > len({name for record in records for name in channels(record)}):
            return f"fewer than {self.functions} reward functions"
        return ""
