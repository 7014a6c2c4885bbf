"""Applies the health rules after every step, and writes their findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm import distributed
from jaxrl_llm.checkpoint import cut_back
from jaxrl_llm.health.rules import WINDOW, Finding, Record, findings
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
        self._history: list[Record] = []
        self._found: list[Finding] = []
        self._verdict = Verdict("go on")

    def begin(self, history: Sequence[Record]) -> None:
        """Continues after these records, the last `WINDOW` of the run. Drops later findings: rules find them again."""
        self._history = list(history)
        self._found, self._verdict = findings(self._history, self._bounds), Verdict("go on")
        if distributed.first():
            with disk.writing(self._workdir):
                cut_back(self._file, self._history[-1]["step"] if self._history else -1)

    def judge(self, record: Record | None) -> Verdict:
        """Returns the verdict after a record: the next one, or the last one again, perhaps with more entries."""
        if record is None or record in self._history[-1:]:
            return self._verdict
        if self._history and self._history[-1]["step"] == record["step"]:  # with more entries: replace it
            self.begin(self._history[:-1])
        self._history = [*self._history, record][-WINDOW:]
        before, self._found = {finding.id for finding in self._found}, findings(self._history, self._bounds)
        for finding in self._found:
            if distributed.first():
                with disk.writing(self._workdir), self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": record["step"]} | finding.record()) + "\n")
            if finding.id not in before and finding.action == "warn":
                self._say(f"    {finding.line()}")
        self._verdict = Verdict("go on")
        for found in self._found:
            if found.action == "stop":
                reason = f"step {record['step']}: {found.evidence}, because {found.cause}"
                self._verdict = Verdict("stop", reason, found.fix)
        return self._verdict
