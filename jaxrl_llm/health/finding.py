"""The result of a health rule (`Finding`), and the metrics that a rule needs (`RuleInputs`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

LogRecord: TypeAlias = dict[str, Any]
SEVERITIES = ("note", "warning", "error")
# Metrics reward/NAME where NAME is not a reward function.
OVERALL_METRICS = {
    f"reward/{name}"
    for name in (
        *("mean", "std", "std_bound", "error", "min", "max", "without_signal", "kl", "kl_pays", "overlong"),
        "no_verdict",
    )
}


@dataclass(frozen=True)
class Finding:
    """A problem of a run that a health rule or the self-test found, with its cause and remedy in words."""

    severity: str  # one of SEVERITIES
    evidence: str  # what was observed, with numbers
    cause: str = ""  # likely cause
    fix: str = ""  # what the user should do
    reference: str = ""  # paper, issue or docs page about the problem
    id: str = ""  # name of the rule
    since: int | None = None  # last step before the problem; None if the rule cannot tell

    def line(self) -> str:
        """Returns the finding as one line of text."""
        explanation = "; ".join(text for text in (self.cause, self.fix) if text)
        return f"{self.severity}: {self.evidence}: {explanation}" + (
            f" [{self.id}, {self.reference}]" if self.reference else ""
        )

    record = asdict


def channel_metrics(names: Iterable[str]) -> list[str]:
    """Returns those of these metric names that belong to single reward functions, sorted."""
    return sorted(name for name in names if name.startswith("reward/") and name not in OVERALL_METRICS)


class RuleInputs(NamedTuple):
    """What a rule needs to judge a run; without it, the rule is silent."""

    metrics: tuple[str, ...]  # names of metrics
    records: int = 1  # smallest number of records with these metrics
    functions: int = 0  # smallest number of reward functions

    def missing_input(self, records: Sequence[LogRecord]) -> str:
        """Returns what these records lack, in words; "" if they lack nothing."""
        counts = {name: sum(record.get(name) is not None for record in records) for name in self.metrics}
        if absent := [name for name, count in counts.items() if not count]:
            return f"no {absent[0]}"
        if min(counts.values(), default=len(records)) < self.records:
            return f"fewer than {self.records} records"
        if self.functions > len({name for record in records for name in channel_metrics(record)}):
            return f"fewer than {self.functions} reward functions"
        return ""
