"""Applies the health rules to each step's record, writes their findings, and decides whether the run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.health import json_lines
from jaxrl_llm.health.finding import Finding, LogRecord
from jaxrl_llm.health.history import WINDOW, History
from jaxrl_llm.health.rules import findings
from jaxrl_llm.machine import disk, distributed
from jaxrl_llm.session.settings import HealthSettings


class Verdict(NamedTuple):
    """What the run does after a step, as `Health.judge` decides."""

    action: str = "continue"  # "continue", "stop" or "roll back"
    step: int = 0  # step of the judged record
    finding: Finding | None = None  # reason to stop or roll back, None if the run continues


class Health:
    """Judges the records of a run. Writes all findings to health.jsonl, and shows the new ones on the console."""

    def __init__(self, workdir: Path, settings: HealthSettings, show_finding: Callable[[int, Finding], None]):
        """show_finding(step, finding): shows a finding on the console and in the loggers."""
        self._workdir, self._file = workdir, workdir / "health.jsonl"
        self._bounds, self._show_finding = vars(settings), show_finding
        # {name of a health rule: what its finding makes the run do}; findings of all other rules are only shown.
        self._actions = dict.fromkeys(settings.stop, "stop")
        if settings.rollback:
            self._actions |= dict.fromkeys(settings.rollback.rules, "roll back")
        self._history = History()
        self._last_steps: dict[str, int] = {}  # last step of each finding
        self._verdict = Verdict()

    def start(self, records: Iterable[LogRecord]) -> None:
        """Continues after these records of the run. Removes findings of later steps, which will be found again."""
        self._history, self._last_steps, self._verdict = History(records), {}, Verdict()
        if distributed.first():
            self._remove_findings_after(self._history.records[-1]["step"] if self._history.records else -1)

    def _remove_findings_after(self, step: int) -> None:
        """Removes the findings of later steps from the file."""
        with disk.writing(self._workdir):
            json_lines.remove_after(self._file, step)
        if self._file.is_file():
            lines = map(json.loads, self._file.read_text(encoding="utf-8").splitlines())
            self._last_steps = {line["id"]: line["step"] for line in lines}

    def add(self, step: int, new_findings: Iterable[Finding]) -> None:
        """Writes findings that need no record, such as those of the self-test, and shows them on the console."""
        for finding in new_findings:
            self._write(step, finding)
            self._show_finding(step, finding)

    def _write(self, step: int, finding: Finding) -> None:
        if distributed.first():
            with disk.writing(self._workdir), self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step} | finding.record()) + "\n")

    def judge(self, records: list[LogRecord]) -> Verdict:
        """Returns the verdict after a record.

        records: the next record; or the last record again, perhaps with further entries; or [] for no new record.
        """
        last_records = self._history.last_records[-1:]
        if records in ([], last_records):
            return self._verdict
        (record,) = records
        is_same_step = last_records and last_records[0]["step"] == record["step"]
        # The last record has come again with further entries, such as those of an evaluation, so its findings are
        # written again.
        if is_same_step and distributed.first():
            self._remove_findings_after(record["step"] - 1)
        self._history.add(record)
        self._verdict = Verdict()
        for finding in findings(self._history, self._bounds):
            # A recurring finding is shown again only after WINDOW steps without it.
            is_new = record["step"] - self._last_steps.get(finding.id, -WINDOW) >= WINDOW
            self._last_steps[finding.id] = record["step"]
            self._write(record["step"], finding)
            action = self._actions.get(finding.id)
            if is_new and not action:
                self._show_finding(record["step"], finding)
            if action and self._verdict.action != "stop":
                self._verdict = Verdict(action, record["step"], finding)
        return self._verdict
