"""Finds the files of another trainer's log, and reads the metrics of each step, under the trainer's names."""

from __future__ import annotations

import csv
import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import console, wandb_file

STEPS = ("train/global_step", "training/global_step", "trainer/global_step", "global_step", "step", "_step")
METRICS = "metrics.jsonl"  # log in a work directory of jaxrl_llm
STATE = "trainer_state.json"  # log of TRL
SUMMARY = "wandb-summary.json"  # W&B's file with only the last values of a run
FILES = (STATE, "experiment_log.jsonl", METRICS)  # log files that a folder may have, of TRL, EasyR1 and jaxrl_llm
SHOWN = 5  # largest number of files or runs in an error message
PRIME = ("logs/orchestrator.log", "logs/trainer/rank_0.log")  # logs of prime-rl; only the first has the rewards


def steps(path: Path) -> dict[int, dict[str, float]]:
    """Returns {step: {metric: value}} of a log file or folder.

    Raises: ValueError, csv.Error or DecodeError, if there is no log or it is damaged.
    """
    rows = defaultdict[int, dict[str, float]](dict)
    for part in _log_files(path):
        for step, row in _join_steps(_read_rows(part)).items():
            rows[step] |= row
    return dict(rows)


def _log_files(path: Path) -> list[Path]:
    """Returns the files of a log, or the folder of TensorBoard's files. Raises: ValueError, if there is no log."""
    if path.name == SUMMARY:
        path = path.parent.parent  # The folder of the run has the whole history.
    if not path.is_dir():
        return [path]
    checkpoints = sorted(path.glob(f"checkpoint-*/{STATE}"), key=_number)
    single_files = [*(path / name for name in FILES if (path / name).is_file()), *checkpoints[-1:]]
    if single_files:
        return single_files[:1]
    if (path / PRIME[0]).is_file():
        return [path / name for name in PRIME if (path / name).is_file()]
    if any(path.rglob("*tfevents*")):
        return [path]
    histories = sorted(path.rglob("*.wandb"), key=lambda file: file.stat().st_mtime)
    # A single .jsonl file is used, because veRL's file logger lets the user choose the name.
    jsonl_files = sorted(path.glob("*.jsonl"))
    if not histories and len(jsonl_files) != 1:
        several_text = (
            f", but several .jsonl files: use one of {', '.join(map(str, jsonl_files[:SHOWN]))}" if jsonl_files else ""
        )
        raise ValueError(
            f"the folder has no {STATE}, no checkpoint-N with one, and no files of TensorBoard or W&B{several_text}"
        )
    return histories[-1:] or jsonl_files


def _read_rows(path: Path) -> Iterable[Any]:
    """Returns the rows of a log file as dicts. Raises: ValueError, if its content is not a log."""
    if path.is_dir() or "tfevents" in path.name:
        return _events(sorted(path.rglob("*tfevents*")) if path.is_dir() else [path])
    if path.suffix == ".wandb":
        return wandb_file.rows(path.read_bytes())
    if path.suffix == ".csv":
        return _csv(path)
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        lines = content.get("log_history") if isinstance(content, dict) else content
        if not isinstance(lines, list):
            raise ValueError(f"a {STATE} must have a list log_history")
        return lines
    lines = whole_lines(path)
    if path.suffix == ".jsonl" or (lines[:1] and _is_json(lines[0])):
        return map(json.loads, lines)
    return console.rows(lines)


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _number(state: Path) -> int:
    """Returns N for the file checkpoint-N/trainer_state.json; -1 for any other name."""
    number = state.parent.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _join_steps(lines: Iterable[Any]) -> dict[int, dict[str, float]]:
    """Returns {step: metrics} of rows; rows of the same step are joined.

    A row without a step number belongs to the step of the row before it.
    """
    flat = [dict(numbers(line)) for line in lines]
    step_key = next((name for name in STEPS if any(name in line for line in flat)), "")
    rows, step = defaultdict[int, dict[str, float]](dict), 0
    for number, line in enumerate(flat, 1):
        step = int(line.get(step_key, step)) if step_key else number
        rows[step] |= line
    return dict(rows)


def numbers(line: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yields (name, number) of a row. Names of nested sections, as EasyR1 writes them, are joined by "/".

    name: prefix of the names, for nested sections. The outer section "data", in which veRL nests all metrics, is
    dropped from the names.
    """
    if not isinstance(line, dict):
        raise ValueError("each line must be a JSON object")
    for key, value in line.items():
        if isinstance(value, dict):
            yield from numbers(value, "" if key == "data" and not name else f"{name}{key}/")
        elif isinstance(value, int | float):
            yield f"{name}{key}", value


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file, without an incomplete last line, which is still being written."""
    text = path.read_text(encoding="utf-8")
    return [line for line in text[: text.rfind("\n") + 1].split("\n") if line.strip()]


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a CSV that W&B exports. A column may be named "RUN - METRIC"."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            named = {key.rpartition(" - ")[2]: x for key, x in row.items() if not key.endswith(("__MIN", "__MAX"))}
            yield {("step" if key == "Step" else key): float(x) for key, x in named.items() if _is_number(x)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


def _events(files: list[Path]) -> Iterator[dict[str, Any]]:
    """Yields the scalars in TensorBoard's event files, whose records are: length, checksum, event, checksum."""
    # Imported here, because tensorboardX also imports torch where it is installed, which takes a second.
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    for file in files:
        data, offset = file.read_bytes(), 0
        while offset + 12 <= len(data):
            (size,) = struct.unpack_from("<Q", data, offset)
            if offset + 16 + size > len(data):  # The record is still being written.
                break
            event = Event.FromString(data[offset + 12 : offset + 12 + size])
            offset += 16 + size
            values = {x.tag: _scalar(x) for x in event.summary.value}
            if values:
                yield {"step": event.step} | values


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return value.simple_value
    tensor = value.tensor  # torch and TensorFlow write a scalar as a tensor.
    if tensor.float_val:
        return tensor.float_val[0]
    return struct.unpack("<f", tensor.tensor_content)[0] if len(tensor.tensor_content) == 4 else None
