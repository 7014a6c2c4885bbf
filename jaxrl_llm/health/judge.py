"""Applies the rules to the records of a run one by one, and keeps when each finding was there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from . import rules
from .finding import SEVERITIES, Finding, LogRecord
from .history import WINDOW, History


class Spell(NamedTuple):
    """A finding, and when it was there."""

    finding: Finding  # the last one
    first: int
    last: int
    steps: int  # in which it was there
    lapses: int = 0  # times that it had gone and came back

    def record(self) -> dict[str, Any]:
        return self.finding.record() | {"first_step": self.first, "last_step": self.last, "steps": self.steps}


class Judge:
    """Applies the rules to records one by one. before: findings of step 0, which no record shows."""

    def __init__(self, bounds: dict[str, Any], before: Iterable[Finding] = ()):
        self._bounds, self._history = bounds, History()
        self._spells = {finding.id: Spell(finding, 0, 0, 1) for finding in before}
        self._at = 0  # step of the last record
        self._seen = dict[str, int]()  # the last record of each finding, by its number

    def add(self, record: LogRecord) -> list[Finding]:
        """Adds the next record. Returns the new findings: one that comes and goes is new after WINDOW steps."""
        self._history.add(record)
        new = []
        for finding in rules.findings(self._history, self._bounds):
            last = self._spells.get(finding.id)
            at = record.get("at", record["step"])
            first, steps, lapses = (last.first, last.steps, last.lapses) if last else (at, 0, 0)
            # It was not found at the last record, so it had gone and comes back.
            lapses += last is not None and last.last != self._at
            self._spells[finding.id] = Spell(finding, first, at, steps + 1, lapses)
            new += [finding] if record["step"] - self._seen.get(finding.id, -WINDOW) >= WINDOW else []
            self._seen[finding.id] = record["step"]
        self._at = record.get("at", record["step"])
        return new

    def spells(self) -> list[Spell]:
        """Returns what the rules have found, the worst first."""
        return sorted(self._spells.values(), key=lambda x: (-SEVERITIES.index(x.finding.severity), x.first))


def judge(records: Iterable[LogRecord], bounds: dict[str, Any], before: Iterable[Finding] = ()) -> list[Spell]:
    """Applies the rules after every record, as a run does, and returns what they find, the worst first.

    before: findings of step 0, which no record shows.
    """
    judge = Judge(bounds, before)
    for record in records:
        judge.add(record)
    return judge.spells()
