"""Studies: runs of a config that differ in one thing each, which are kept, and a table of them in a page of docs/."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.health.ill_runs import chance
from benchmarks.health.judging import Judged, judged, rate
from jaxrl_llm.config.load import load
from jaxrl_llm.health.finding import LogRecord
from jaxrl_llm.structs import Config
from jaxrl_llm.train import steps

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SEEDS = (0, 1, 2)
PAGE = ROOT / "docs" / "stability.md"
WIDEST = 9  # columns of a table that a window of 1,280 pixels shows without scrolling
CHEAP = {
    "checkpoint.every": 100_000, "checkpoint.keep_best": 0, "log.to": (), "log.completions_every": 0,
    "reward.timeout": 0.0, "health.self_test": False, "mesh.fsdp": 1, "eval": None,
}  # fmt: skip


def folder_of(name: str) -> str:
    """Returns the folder of a run."""
    return "".join(letter for letter in name.replace(" ", "-") if letter not in ",%")


def made(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Returns the workdir of a run, which it makes if it is not there whole."""
    workdir = folder / folder_of(name)
    if not workdir.exists():
        begun = workdir.with_name(workdir.name + ".partial")
        shutil.rmtree(begun, ignore_errors=True)
        with redirect_stdout(sys.stderr):
            make(begun)
        begun.rename(workdir)
    return workdir


def with_lies(right: list[float], prompts: list[Any], *, wrong: float) -> list[float]:
    """Returns verdicts with the opposite one for a share of the completions, whatever is written in them."""
    lies = [chance(f"{prompt}{i}") > 1 - 2 * wrong for i, prompt in enumerate(prompts)]
    return [float(bool(x) is not lie) for x, lie in zip(right, lies, strict=True)]


# Columns of the tables: from the records of a run to a number.


def at(step: int, name: str = "eval/accuracy") -> Callable[[list[LogRecord]], float]:
    return lambda records: next(record[name] for record in records if record["step"] == step)


def swing(records: list[LogRecord]) -> float:
    """The mean change of the reward from a step to the next, in the second half."""
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    later = rewards[len(rewards) // 2 :]
    return mean(abs(a - b) for a, b in pairwise(later))


def part(
    name: str, number: int, of: int = 4, typical: Callable[[list[float]], float] = median
) -> Callable[[list[LogRecord]], float]:
    """The median, or another typical value, of a metric in a part of the run; NaN if it has none."""

    def value(records: list[LogRecord]) -> float:
        values = [record[name] for record in records if record.get(name) is not None]
        here = values[len(values) * number // of : len(values) * (number + 1) // of]
        return typical(here) if here else math.nan

    return value


def largest(name: str) -> Callable[[list[LogRecord]], float]:
    return lambda records: max(record[name] for record in records if record.get(name) is not None)


Column = tuple[str, Callable[[list[LogRecord]], float], str]


@dataclass(frozen=True)
class Study:
    """Runs that differ in one thing each."""

    config: Path
    common: dict[str, Any]
    conditions: dict[str, dict[str, Any]]
    columns: tuple[Column, ...]
    starts_from: Callable[[Path], Path] | None = None  # makes the model that the runs start from; None: the config's
    seeds: tuple[int, ...] = SEEDS


def make_run(config: Path, changes: dict[str, Any], workdir: Path) -> None:
    """Makes a run."""
    made_of: Config = load(config)
    changes = CHEAP | changes
    if "engine" in changes:
        made_of.engine = type(made_of)(changes.pop("engine"))
    made_of.update_from_flattened_dict(changes)
    for _ in steps(made_of, workdir):
        pass


def runs(folder: Path, study: Study, name: str) -> dict[str, list[Path]]:
    """Returns the workdirs of a study: {condition: one for each seed}. Makes those that are not there."""
    start = {"model.path": str(study.starts_from(folder))} if study.starts_from else {}
    found = {condition: [] for condition in study.conditions}
    for seed in study.seeds:
        for condition, changes in study.conditions.items():
            make = partial(make_run, study.config, study.common | start | changes | {"seed": seed})
            found[condition].append(made(folder, f"{name} {condition} {seed}", make))
    return found


def table(study: Study, workdirs: dict[str, list[Path]]) -> list[str]:
    """Returns a row for each condition: the mean over the seeds, with the least and the most."""
    rows = ["| | " + " | ".join(title for title, _, _ in study.columns) + " |", "|---" * (len(study.columns) + 1) + "|"]
    for condition, folders in workdirs.items():
        records, cells = [read(one) for one in folders], []
        for _, value, form in study.columns:
            values = [value(one) for one in records]
            known = not any(map(math.isnan, values))  # a run without a reference has no KL
            spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
            cells.append(f"{mean(values):{form}}{spread}" if known else "")
        rows.append(f"| {condition} | " + " | ".join(cells) + " |")
    return rows


def alarms_in_words(run: Judged) -> str:
    """Returns the rules that found a run ill, each with its first step."""
    return ", ".join(f"`{rule}` (step {step:,})" for rule, (step, _) in run.alarms.items())


def rules_table(workdirs: dict[str, dict[str, list[Path]]]) -> list[str]:
    """Returns what the rules say of the first seed of each condition. A run is ill if its accuracy fell."""
    rows, every = ["| runs | | accuracy of samples | healthy | found |", "|---|---|---|---|---|"], list[Judged]()
    for study, conditions in workdirs.items():
        for condition, (first, *_) in conditions.items():
            run = judged(first)
            accuracy, healthy = f"{run.tenths[0]:.2f} to {run.tenths[-1]:.2f}", "yes" if run.healthy else "no"
            rows.append(f"| {study} | {condition} | {accuracy} | {healthy} | {alarms_in_words(run)} |")
            every.append(run)
    for words, kind in (("Healthy", True), ("Ruined", False)):
        of = [run for run in every if run.healthy is kind]
        rows += ["", f"{words} runs that were called ill: {rate(sum(bool(run.alarms) for run in of), len(of))}."]
    return rows


def read(workdir: Path) -> list[LogRecord]:
    """Returns the records of a run."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").open()]


def narrow(lines: list[str]) -> list[str]:
    """Returns the lines of a table, with rows and columns exchanged if it is wider than a page."""
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    if len(rows[0]) <= WIDEST:
        return lines
    head, *body = zip(rows[0], *rows[2:], strict=True)
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def write(page: Path, name: str, lines: list[str]) -> None:
    """Prints a table, and puts it into a page."""
    lines = narrow(lines)
    print("\n".join(lines), flush=True)
    begin, end = f"<!-- begin of {name} -->", f"<!-- end of {name} -->"
    before, rest = page.read_text().split(begin)
    page.write_text("\n".join([before + begin, "", *lines, "", end + rest.split(end)[1]]))
