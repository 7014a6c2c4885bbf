"""Applies the health rules after every step, writes their findings, and decides what the run does about them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.health.finding import Finding, LogRecord
from jaxrl_llm.health.history import WINDOW, History
from jaxrl_llm.health.rules import findings
from jaxrl_llm.machine import disk, distributed
from jaxrl_llm.session import json_lines
from jaxrl_llm.session.settings import HealthSettings


class Verdict(NamedTuple):
    """The decision after a step."""

    action: str = "go on"  # "go on", "stop" or "roll back"
    step: int = 0  # of the record
    finding: Finding | None = None  # the reason, if the run does not go on


class Health:
    """Judges the records of a run. Writes findings to health.jsonl, and tells those that are new."""

    def __init__(self, workdir: Path, settings: HealthSettings, tell: Callable[[int, Finding], None]):
        """tell(step, finding): shows it on the console."""
        self._workdir, self._file, self._bounds, self._tell = workdir, workdir / "health.jsonl", vars(settings), tell
        self._actions = dict.fromkeys(settings.stop, "stop")
        if settings.rollback:
            self._actions |= dict.fromkeys(settings.rollback.rules, "roll back")
        self._history = History()
        self._last_steps: dict[str, int] = {}  # last step of each finding
        self._verdict = Verdict()

    def begin(self, records: Iterable[LogRecord]) -> None:
        """Continues after these records, which are those of the run. Drops later findings: rules find them again."""
        self._history, self._last_steps, self._verdict = History(records), {}, Verdict()
        if distributed.first():
            self._forget_after(self._history.records[-1]["step"] if self._history.records else -1)

    def _forget_after(self, step: int) -> None:
        """Removes the findings of later steps from the file."""
        with disk.writing(self._workdir):
            json_lines.cut_back(self._file, step)
        if self._file.is_file():
            lines = map(json.loads, self._file.read_text(encoding="utf-8").splitlines())
            self._last_steps = {line["id"]: line["step"] for line in lines}

    def add(self, step: int, new_findings: Iterable[Finding]) -> None:
        """Writes findings that need no record, such as those of the self-test, and shows them on the console."""
        for finding in new_findings:
            self._write(step, finding)
            self._tell(step, finding)

    def _write(self, step: int, finding: Finding) -> None:
        if distributed.first():
            with disk.writing(self._workdir), self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step} | finding.record()) + "\n")

    def judge(self, records: list[LogRecord]) -> Verdict:
        """Returns the verdict after a record: the next one, or the last one again, perhaps with more entries.

        records: this one; []: none is new.
        """
        last = self._history.last_records[-1:]
        if records in ([], last):
            return self._verdict
        (record,) = records
        again = last and last[0]["step"] == record["step"]
        # The last record with more entries, such as those of an evaluation: its findings are written again.
        if again and distributed.first():
            self._forget_after(record["step"] - 1)
        self._history.add(record)
        self._verdict = Verdict()
        for finding in findings(self._history, self._bounds):
            # A finding that comes and goes is said once: it is new after WINDOW steps without it.
            new = record["step"] - self._last_steps.get(finding.id, -WINDOW) >= WINDOW
            self._last_steps[finding.id] = record["step"]
            self._write(record["step"], finding)
            action = self._actions.get(finding.id)
            if new and not action:
                self._tell(record["step"], finding)
            if action and self._verdict.action != "stop":
                self._verdict = Verdict(action, record["step"], finding)
        return self._verdict
