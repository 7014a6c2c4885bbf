"""What the health rules say of the log of a run, and whether the run was healthy by its accuracy."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest

from jaxrl_llm.health import logs, rules
from jaxrl_llm.health.finding import Finding, LogRecord
from jaxrl_llm.health.history import History

BOUNDS = {"max_skipped": 10}  # the section `health` of a run that has none
TRUTHS = ("reward/arithmetic.accuracy", "reward/search.exact_match")  # right verdicts, whatever the run learns from
FALL = 0.1  # of the accuracy from the best tenth of a run to the last one, from which on it is not healthy


class Judged(NamedTuple):
    """What the rules say of a run."""

    name: str
    steps: int
    alarms: dict[str, tuple[int, Finding]]  # rule -> first step with a finding of severity warning or error
    looked: frozenset[str]  # rules that had their metrics
    tenths: list[float]  # the accuracy of the samples in each tenth of the run; [] if it is not known

    @property
    def healthy(self) -> bool:
        best = max(self.tenths, default=0.0)
        return not self.tenths or self.tenths[-1] > max(best - FALL, best / 2)


def judge(name: str, records: Sequence[LogRecord], bounds: dict[str, Any]) -> Judged:
    """Applies the rules after every record, as a run does."""
    history, alarms, blind = History(), dict[str, tuple[int, Finding]](), rules.unjudged_rules(records)
    for record in records:
        history.add(record)
        for finding in rules.findings(history, bounds):
            if finding.severity != "note":
                alarms.setdefault(finding.id, (record["step"], finding))
    looked = frozenset(rule.__name__ for rule in rules.RULES) - blind.keys()
    return Judged(name, records[-1]["step"], alarms, looked, accuracy_by_tenths(records))


def judged(workdir: Path) -> Judged:
    return judge(workdir.name, logs.read(workdir), logs.read_health_section(workdir) or BOUNDS)


def accuracy_by_tenths(records: Sequence[LogRecord]) -> list[float]:
    """Returns the mean accuracy of the samples in each tenth of a run; [] if the log does not have it."""
    name = next((name for name in TRUTHS if records[-1].get(name) is not None), "")
    values = [record[name] for record in records if record.get(name) is not None]
    return [float(part.mean()) for part in np.array_split(values, 10)] if len(values) >= 10 else []


def rate(alarms: int, runs: int) -> str:
    """Returns a count with the interval in which its rate is with 95 % (Clopper and Pearson, 1934)."""
    if not runs:
        return ""
    low, high = binomtest(alarms, runs).proportion_ci(0.95, method="exact")
    return f"{alarms} of {runs} ({low:.1%} to {high:.1%})"


def keep(file: Path, workdirs: Sequence[Path]) -> None:
    """Writes the logs of runs into a small file: {run: {metric: a value for each record}}, without times."""
    runs = dict[str, dict[str, list[Any]]]()
    for workdir in workdirs:
        records = logs.read(workdir)
        names = {name: None for record in records for name in record if not name.startswith(("time/", "tokens_per"))}
        runs[workdir.name] = {name: [shorter(record.get(name)) for record in records] for name in names}
    file.write_bytes(gzip.compress(json.dumps(runs, separators=(",", ":")).encode(), mtime=0))


def shorter(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def kept(file: Path) -> dict[str, list[LogRecord]]:
    """Returns the records of the runs in a file of `keep`. A metric that a record lacks is None."""
    runs = json.loads(gzip.decompress(file.read_bytes()))
    return {
        run: [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for run, columns in runs.items()
    }
