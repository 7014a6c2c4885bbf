"""Applies the health rules after every step, and writes their findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm import distributed
from jaxrl_llm.checkpoint import cut_back
from jaxrl_llm.health.finding import WINDOW, Finding, History, Record
from jaxrl_llm.health.rules import findings
from jaxrl_llm.host import disk


class Verdict(NamedTuple):
    """The decision after a step."""

    action: str  # "go on", or "stop"
    reason: str = ""
    fix: str = ""


class Health:
    """Judges the records of a run. Writes findings to health.jsonl, and to the console when they are new."""

    def __init__(self, workdir: Path, bounds: dict[str, Any], say: Callable[[str], None]):
        """bounds: the `health` section of the config; say: prints a line on the console."""
        self._workdir, self._file, self._bounds, self._say = workdir, workdir / "health.jsonl", bounds, say
        self._history = History()
        self._said: dict[str, int] = {}  # last step of each finding
        self._verdict = Verdict("go on")

    def begin(self, records: Iterable[Record]) -> None:
        """Continues after these records, which are those of the run. Drops later findings: rules find them again."""
        self._history, self._said = History(records), {}
        self._verdict = Verdict("go on")
        if distributed.first():
            self._forget_after(self._history.records[-1]["step"] if self._history.records else -1)

    def _forget_after(self, step: int) -> None:
        """Removes the findings of later steps from the file."""
        with disk.writing(self._workdir):
            cut_back(self._file, step)
        if self._file.is_file():
            lines = map(json.loads, self._file.read_text(encoding="utf-8").splitlines())
            self._said = {line["id"]: line["step"] for line in lines}

    def add(self, step: int, found: Iterable[Finding]) -> None:
        """Writes findings that need no record, such as those of the self-test, and shows them on the console."""
        for finding in found:
            if distributed.first():
                with disk.writing(self._workdir), self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step} | finding.record()) + "\n")
            self._say(f"    health {finding.line()}")

    def judge(self, record: Record | None) -> Verdict:
        """Returns the verdict after a record: the next one, or the last one again, perhaps with more entries."""
        last = self._history.latest[-1:]
        if record is None or record in last:
            return self._verdict
        again = last and last[0]["step"] == record["step"]
        if again and distributed.first():  # with more entries: its findings are written again
            self._forget_after(record["step"] - 1)
        self._history.add(record)
        self._verdict = Verdict("go on")
        for finding in findings(self._history, self._bounds):
            # A finding that comes and goes is said once: it is new after WINDOW steps without it.
            new = record["step"] - self._said.get(finding.id, -WINDOW) >= WINDOW
            self._said[finding.id] = record["step"]
            if distributed.first():
                with disk.writing(self._workdir), self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": record["step"]} | finding.record()) + "\n")
            if new and finding.action == "warn":
                self._say(f"    health {finding.line()}")
            if finding.action == "stop":
                reason = f"step {record['step']}: {finding.evidence}, because {finding.cause}"
                self._verdict = Verdict("stop", reason, finding.fix)
        return self._verdict
