"""Reads the log of a run, ours or another trainer's, as records with our names."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from ...errors import UserError
from ..finding import Finding, LogRecord
from .files import FILES, METRICS, SHOWN, steps, whole_lines
from .names import KNOWN, by_rollouts, renamed

GIVE = (
    "give a workdir, or a log of TRL, veRL, EasyR1, prime-rl or SkyRL: trainer_state.json, TensorBoard's folder, "
    "JSON lines, a CSV, a .wandb file or what was printed"
)
BOUNDS = {"max_skipped": 3}  # for logs of other trainers: so many gradients in a row that are not finite


def bounds(path: Path) -> dict[str, Any] | None:
    """Returns the `health` section of the config in a workdir of ours; None, if this is another folder or a file."""
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))["health"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read(path: Path, *more: Path) -> list[LogRecord]:
    """Returns the records of a run: a workdir of ours, or files of another trainer, which are joined by their steps.

    Steps of another trainer are numbered from 1, because it may log only some of them; "at" is its own number.
    Raises: UserError, if there is no log or it cannot be read.
    """
    if not more and bounds(path) is not None and (path / METRICS).is_file():
        return _lines(path / METRICS)
    rows = dict[int, dict[str, float]]()
    for part in (path, *more):
        for step, row in _steps(part).items():
            rows[step] = rows.get(step, {}) | row
    records = by_rollouts({"at": at} | renamed(row) for at, row in sorted(rows.items()))
    if not records:
        known = ", ".join(KNOWN)
        raise UserError(f"{path} has no number that a rule knows, such as {known}: give the log of a run")
    return records


def _lines(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file of ours. Raises: UserError, naming a line that cannot be read."""
    lines = []
    for number, line in enumerate(whole_lines(file), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            remedy = "put the file back, or remove this line and those after it"
            raise UserError(f"{file}: line {number} cannot be read ({error}): {remedy}") from error
    return lines


def _steps(path: Path) -> dict[int, dict[str, float]]:
    """Returns the numbers of each step of a log. Raises: UserError."""
    if runs := _runs(path):
        more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
        raise UserError(f"{path} is a folder of runs: give one of {', '.join(map(str, runs[:SHOWN]))}{more}")
    try:
        return steps(path)
    except (OSError, ValueError, OverflowError, csv.Error, DecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): {GIVE}") from error


def _runs(path: Path) -> list[Path]:
    """Returns the workdirs of ours in a folder that has no log itself."""
    if any((path / name).is_file() for name in FILES):
        return []
    return sorted(file.parent for file in path.glob("*/config.json") if bounds(file.parent) is not None)


def initial_findings(workdir: Path) -> list[Finding]:
    """Returns the findings that the self-test of a run wrote before its first step."""
    file = workdir / "health.jsonl"
    lines = _lines(file) if file.is_file() else []
    return [Finding(**{name: x for name, x in line.items() if name != "step"}) for line in lines if not line["step"]]
