"""Reads the log of a run of jaxrl_llm or of another trainer, as records with the metric names of jaxrl_llm."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from ...errors import UserError
from .. import json_lines
from ..finding import Finding, LogRecord
from .files import FILES, METRICS, SHOWN, steps
from .names import KNOWN, by_rollouts, renamed

KNOWN_LOGS = (
    "use a work directory of jaxrl_llm, or a log of TRL, veRL, EasyR1, prime-rl or SkyRL: trainer_state.json, a "
    "TensorBoard folder, JSON lines, a CSV, a .wandb file or the console output"
)
# Bounds for logs of other trainers. max_skipped: gradients in a row that are not finite.
OTHER_TRAINER_BOUNDS = {"max_skipped": 3}


def read_health_section(path: Path) -> dict[str, Any] | None:
    """Returns the config section `health` in a work directory of jaxrl_llm; None for any other folder or file."""
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))["health"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_run_of_train(path: Path) -> bool:
    """Returns whether a path is the work directory of a run of `train`, whose steps `jaxrl replay` can open."""
    try:
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return "group_size" in fields
    except (OSError, ValueError, TypeError):
        return False


def read(path: Path, *other_paths: Path) -> list[LogRecord]:
    """Returns the records of a run, from a work directory of jaxrl_llm or from files of another trainer.

    Several files are joined by step. Rollouts of another trainer are numbered from 1 in "step", because it may log only
    some of its steps; "at" is the step in its log. Raises: UserError, if there is no log or it cannot be read.
    """
    if not other_paths and read_health_section(path) is not None and (path / METRICS).is_file():
        return json_lines.read(path / METRICS)
    rows = dict[int, dict[str, float]]()
    for file in (path, *other_paths):
        for step, row in _read_steps(file).items():
            rows[step] = rows.get(step, {}) | row
    records = by_rollouts({"at": trainer_step} | renamed(row) for trainer_step, row in sorted(rows.items()))
    if not records:
        known_names = ", ".join(KNOWN)
        raise UserError(f"{path} has no metric that a health rule reads, such as {known_names}: use the log of a run")
    return records


def _read_steps(path: Path) -> dict[int, dict[str, float]]:
    """Returns {step: metrics} of a log of another trainer. Raises: UserError, if it cannot be read."""
    if runs := _runs_in_folder(path):
        more_text = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
        raise UserError(
            f"{path} is a folder of several runs: use one of {', '.join(map(str, runs[:SHOWN]))}{more_text}"
        )
    try:
        return steps(path)
    except (OSError, ValueError, OverflowError, csv.Error, DecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): {KNOWN_LOGS}") from error


def _runs_in_folder(path: Path) -> list[Path]:
    """Returns the work directories of jaxrl_llm in a folder; [] if the folder itself has a log."""
    if any((path / name).is_file() for name in FILES):
        return []
    return sorted(file.parent for file in path.glob("*/config.json") if read_health_section(file.parent) is not None)


def initial_findings(workdir: Path, *, quiet: bool = False) -> list[Finding]:
    """Returns the findings that the self-test of a run wrote to health.jsonl before the first step.

    Prints how many lines of the file cannot be read, unless quiet.
    """
    lines = json_lines.read(workdir / "health.jsonl", quiet=quiet)
    return [Finding(**{name: x for name, x in line.items() if name != "step"}) for line in lines if not line["step"]]
