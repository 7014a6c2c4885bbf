"""Applies the health rules to the records of a run one by one, and remembers at which steps each finding held."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import rules
from .finding import SEVERITIES, Finding, LogRecord
from .history import WINDOW, History


class FindingSpan(NamedTuple):
    """A finding of one rule, and the steps at which it held."""

    finding: Finding  # as of the last step
    first: int  # first step
    last: int  # last step
    steps: int  # number of steps
    lapses: int = 0  # number of times that the finding disappeared and came back

    def record(self) -> dict[str, Any]:
        return self.finding.record() | {"first_step": self.first, "last_step": self.last, "steps": self.steps}

    def replay_command(self, run: str) -> str:
        """Returns the command that opens the first step of the finding; "" before the first step of a run.

        run: work directory of a run of `train`, or its address.
        """
        command = f"jaxrl replay --run {shlex.quote(run)} --step {self.first} --to step{self.first}.html"
        return command if self.first > 0 else ""


class Judge:
    """Applies the health rules to the records of a run, one by one, and collects the findings.

    bounds: fields of the config section `health`. initial_findings: findings of the self-test before the first step.
    """

    def __init__(self, bounds: dict[str, Any], initial_findings: Iterable[Finding] = ()):
        self._bounds, self._history = bounds, History()
        self._spans = {finding.id: FindingSpan(finding, 0, 0, 1) for finding in initial_findings}
        self._last_step = 0  # step of the last record, as the trainer counts it
        self._last_found = dict[str, int]()  # {id of a finding: step of the last record with it}

    def add(self, record: LogRecord) -> list[Finding]:
        """Adds the next record, and returns the findings that are new.

        A finding that comes back is new only if it has been absent for WINDOW steps.
        """
        self._history.add(record)
        new_findings = []
        for finding in rules.findings(self._history, self._bounds):
            earlier_span = self._spans.get(finding.id)
            log_step = record.get("at", record["step"])
            first, steps, lapses = (
                (earlier_span.first, earlier_span.steps, earlier_span.lapses) if earlier_span else (log_step, 0, 0)
            )
            # A lapse is counted if the finding did not hold at the last record.
            lapses += earlier_span is not None and earlier_span.last != self._last_step
            self._spans[finding.id] = FindingSpan(finding, first, log_step, steps + 1, lapses)
            new_findings += [finding] if record["step"] - self._last_found.get(finding.id, -WINDOW) >= WINDOW else []
            self._last_found[finding.id] = record["step"]
        self._last_step = record.get("at", record["step"])
        return new_findings

    def spans(self) -> list[FindingSpan]:
        """Returns all findings with their steps, the most severe first."""
        return sorted(self._spans.values(), key=lambda x: (-SEVERITIES.index(x.finding.severity), x.first))


def judge_records(
    records: Iterable[LogRecord], bounds: dict[str, Any], initial_findings: Iterable[Finding] = ()
) -> list[FindingSpan]:
    """Applies the rules after each record, as a run does, and returns the findings, the most severe first.

    bounds: fields of the config section `health`. initial_findings: findings of the self-test before the first step.
    """
    run_judge = Judge(bounds, initial_findings)
    for record in records:
        run_judge.add(record)
    return run_judge.spans()
