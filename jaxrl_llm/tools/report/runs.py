"""Reads the files of a run, and applies the health rules to it."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm import recipe as recipes
from jaxrl_llm.errors import UserError
from jaxrl_llm.health import json_lines, logs
from jaxrl_llm.health.finding import SEVERITIES, Finding, LogRecord
from jaxrl_llm.health.history import RECENT_STEPS, START_STEPS
from jaxrl_llm.health.judge import FindingSpan, Judge
from jaxrl_llm.recipe import advice
from jaxrl_llm.structs import Config, Sizes
from jaxrl_llm.tools.report.follow import Lines

# Files of a work directory that the page reads.
FILES = ("config.json", logs.METRICS, "completions.jsonl", "health.jsonl")
# Short names of the runs on the page, in the order of the command line.
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class RunVerdict(NamedTuple):
    """Verdict of the health rules on a run."""

    level: str  # "error", "warning", "healthy", or "early" if the run has too few steps
    words: str  # the verdict in a few words


class SettingsReport(NamedTuple):
    """Sizes of a config, and findings of the rules for settings."""

    sizes: Sizes | None  # None if the config does not pass the checks of this version
    findings: list[Finding]
    problem: str = ""  # reason why sizes or findings are missing


class ReportedRun(NamedTuple):
    """A run, read from the files in its work directory."""

    letter: str  # short name in plots
    name: str
    workdir: Path
    config: Config
    records: list[LogRecord]
    spans: list[FindingSpan]
    groups: list[dict[str, Any]]  # first, middle and last group of completions.jsonl
    settings: SettingsReport
    wrote: list[str]  # ids of findings in health.jsonl that the rules of this version do not find
    damaged: Counter[str]  # {file: number of its lines that cannot be read}, without files that are whole

    @property
    def last(self) -> int:
        return self.records[-1]["step"]

    @property
    def verdict(self) -> RunVerdict:
        severities = [span.finding.severity for span in self.spans]
        counts = {severity: severities.count(severity) for severity in SEVERITIES}
        # The most severe findings come first in the text.
        texts = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in reversed(counts.items()) if count]
        if counts["error"] or counts["warning"]:
            return RunVerdict("error" if counts["error"] else "warning", ", ".join(texts))
        if self.last <= START_STEPS + RECENT_STEPS:
            return RunVerdict("early", f"no finding yet; most rules need {START_STEPS + RECENT_STEPS + 1} steps")
        return RunVerdict("healthy", ", ".join(["healthy", *texts]))

    def replay_command(self, span: FindingSpan) -> str:
        """Returns the command that opens the first step of a finding; "" for a run of sft, which samples nothing."""
        return span.replay_command(str(self.workdir)) if hasattr(self.config, "group_size") else ""

    def latest(self, metric: str) -> tuple[int, float] | None:
        """Returns the last finite value of a metric and its step."""
        for record in reversed(self.records):
            if record.get(metric) is not None:
                return record["step"], record[metric]
        return None


def read_all(workdirs: Sequence[Path], readers: dict[Path, Reader] | None = None) -> list[ReportedRun]:
    """Reads runs. readers: readers of an earlier call, which read only new records; None for the first call.

    Raises: UserError, for too many runs, or for a folder that is no run or has no record yet.
    """
    readers = {} if readers is None else readers
    if len(workdirs) > len(LETTERS):
        raise UserError(f"{len(workdirs)} runs are too many for one page: name at most {len(LETTERS)}")
    names = [workdir.resolve().name for workdir in workdirs]
    unique = len(set(names)) == len(names)
    return [
        readers.setdefault(workdir, Reader(workdir)).read(letter, name if unique else str(workdir))
        for workdir, letter, name in zip(workdirs, LETTERS, names, strict=False)
    ]


class Reader:
    """Reads a run repeatedly while it is running, and judges each record once."""

    def __init__(self, workdir: Path):
        self._workdir = workdir
        self._metrics, self._completions = Lines(workdir / logs.METRICS), Lines(workdir / "completions.jsonl")
        self._rules: tuple[dict[str, Any], list[Finding]] = {}, []  # config.health, and findings of the self-test
        self._records, self._judge = list[LogRecord](), Judge(*self._rules)
        # Only the offsets of the groups' lines are kept, because completions.jsonl may have gigabytes.
        self._groups = list[int]()
        # Lines of each file that cannot be read; of completions.jsonl only those that a page would have shown.
        self.damaged = Counter[str]()

    def read(self, letter: str, name: str) -> ReportedRun:
        """Reads new records, and returns the run. Raises: UserError, for a folder without a run."""
        config = read_config(self._workdir)
        # First the new records of metrics.jsonl are judged.
        rules = config.health.to_dict(), logs.initial_findings(self._workdir, quiet=True)
        # All records are judged again if bounds have changed, or if the self-test has ended since the last call.
        if rules != self._rules:
            self._metrics = Lines(self._metrics.file)  # begins at the first line again
        if self._metrics.begin():  # the file is new, or was replaced
            self._rules, self._records, self._judge = rules, [], Judge(*rules)
            self.damaged[logs.METRICS] = 0
        for _, line in self._metrics.new():
            if (record := json_lines.parse(line)) is None:
                self.damaged[logs.METRICS] += 1
                continue
            self._judge.add(record)
            self._records.append(record)
        if not self._records and self.damaged[logs.METRICS]:
            raise UserError(f"{self._metrics.file} has no line that can be read: restore the file")
        if not self._records:
            raise UserError(f"{self._workdir} has no record yet: wait for its first step")
        # Then the findings that the run itself has written are compared with those of this version's rules.
        ids = {span.finding.id for span in self._judge.spans()}
        findings_file = Lines(self._workdir / "health.jsonl")
        findings_file.begin()
        findings = [json_lines.parse(line) for _, line in findings_file.new()]
        outdated = sorted({finding["id"] for finding in findings if finding is not None} - ids)
        groups, settings = self._shown_groups(), read_settings(config)
        self.damaged[findings_file.file.name] = findings.count(None)
        # The list is copied, because it grows at the next call, while a page may still use it.
        records = list(self._records)
        return ReportedRun(
            letter=letter,
            name=name,
            workdir=self._workdir,
            config=config,
            records=records,
            spans=self._judge.spans(),
            groups=groups,
            settings=settings,
            wrote=outdated,
            damaged=+self.damaged,
        )

    def _shown_groups(self) -> list[dict[str, Any]]:
        """Returns the first, the middle and the last group of completions in the log that can be read."""
        if self._completions.begin():
            self._groups, self.damaged[self._completions.file.name] = [], 0
        self._groups += [offset for offset, line in self._completions.new() if b'"completions": []' not in line]
        # A line that cannot be read is dropped from the list, and other groups are chosen, until all can be read.
        while self._groups:
            last = len(self._groups) - 1
            chosen = [self._groups[i] for i in sorted({0, (last + 1) // 2, last})]
            groups = {offset: json_lines.parse(self._completions.line(offset)) for offset in chosen}
            damaged = {offset for offset, group in groups.items() if group is None}
            if not damaged:
                return [group for group in groups.values() if group]
            self._groups = [offset for offset in self._groups if offset not in damaged]
            self.damaged[self._completions.file.name] += len(damaged)
        return []


def read_config(workdir: Path) -> Config:
    """Reads the config of a run. Raises: UserError, if the folder has none."""
    try:
        config: Config = ConfigDict(tuples(json.loads((workdir / "config.json").read_text(encoding="utf-8"))))
        config.health.to_dict()
    except (OSError, ValueError, TypeError, AttributeError):
        raise UserError(
            f"{workdir} is not a jaxrl_llm run, because it has no config.json of a run: name a run's work directory"
        ) from None
    return config


def tuples(value: Any) -> Any:
    """Returns a value of JSON with tuples in place of lists, because configs hold tuples."""
    if isinstance(value, dict):
        return {name: tuples(x) for name, x in value.items()}
    return tuple(tuples(x) for x in value) if isinstance(value, list) else value


def read_settings(config: Config) -> SettingsReport:
    """Applies the checks and the rules for settings. Reads only files of this machine."""
    try:
        recipe = recipes.read_either(config)
    except UserError as error:
        reason = textwrap.shorten(str(error), 200, placeholder=" …")  # it may list all functions
        return SettingsReport(None, [], f"The config does not pass the checks of this version: {reason}")
    try:
        return SettingsReport(recipe.sizes, advice.findings(advice.RunSettings(recipe, advice.width_of(recipe))))
    except UserError as error:
        return SettingsReport(recipe.sizes, [], f"The rules for settings need the model: {error}")
