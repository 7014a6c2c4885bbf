"""Finds the files of a log, and reads the numbers of each step from them, under the trainer's names."""

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
METRICS = "metrics.jsonl"  # the log in a workdir of ours
STATE = "trainer_state.json"  # that of TRL
SUMMARY = "wandb-summary.json"  # only the last values of a run
FILES = (STATE, "experiment_log.jsonl", METRICS)  # logs that a folder may have; the second is EasyR1's
SHOWN = 5  # files or runs in an error message
PRIME = ("logs/orchestrator.log", "logs/trainer/rank_0.log")  # of prime-rl: the first has the rewards


def steps(path: Path) -> dict[int, dict[str, float]]:
    """Returns the numbers of each step of a file or folder.

    Raises: ValueError, csv.Error and DecodeError, if there is no log or it is broken.
    """
    rows = defaultdict[int, dict[str, float]](dict)
    for part in _parts(path):
        for step, row in _joined(_lines(part)).items():
            rows[step] |= row
    return dict(rows)


def _parts(path: Path) -> list[Path]:
    """Returns the files of a log, or a folder with TensorBoard's files. Raises: ValueError, if there is none."""
    if path.name == SUMMARY:
        path = path.parent.parent  # the run's folder has the whole history
    if not path.is_dir():
        return [path]
    checkpoints = sorted(path.glob(f"checkpoint-*/{STATE}"), key=_number)
    single = [*(path / name for name in FILES if (path / name).is_file()), *checkpoints[-1:]]
    if single:
        return single[:1]
    if (path / PRIME[0]).is_file():
        return [path / name for name in PRIME if (path / name).is_file()]
    if any(path.rglob("*tfevents*")):
        return [path]
    histories = sorted(path.rglob("*.wandb"), key=lambda file: file.stat().st_mtime)
    # veRL's file logger lets the user choose the name.
    others = sorted(path.glob("*.jsonl"))
    if not histories and len(others) != 1:
        several = f", and several .jsonl: give one of {', '.join(map(str, others[:SHOWN]))}" if others else ""
        raise ValueError(
            f"the folder has no {STATE}, no checkpoint-N with one, and no files of TensorBoard or W&B{several}"
        )
    return histories[-1:] or others


def _lines(path: Path) -> Iterable[Any]:
    """Returns the rows of a file. Raises: ValueError, if it has none."""
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
            raise ValueError(f"it is no {STATE}: it has no list log_history")
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
    """Returns the number of the checkpoint of a trainer_state.json."""
    number = state.parent.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _joined(lines: Iterable[Any]) -> dict[int, dict[str, float]]:
    """Returns the values of each step. Lines of a step are joined; a line without its number belongs to the last."""
    flat = [dict(numbers(line)) for line in lines]
    clock = next((name for name in STEPS if any(name in line for line in flat)), "")
    rows, step = defaultdict[int, dict[str, float]](dict), 0
    for number, line in enumerate(flat, 1):
        step = int(line.get(clock, step)) if clock else number
        rows[step] |= line
    return dict(rows)


def numbers(line: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of a line. EasyR1's file has sections in sections; "data" is veRL's for all of them."""
    if not isinstance(line, dict):
        raise ValueError("a line is no JSON object")
    for key, value in line.items():
        if isinstance(value, dict):
            yield from numbers(value, "" if key == "data" and not name else f"{name}{key}/")
        elif isinstance(value, int | float):
            yield f"{name}{key}", value


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file, without a last one that is not complete."""
    text = path.read_text(encoding="utf-8")
    return [line for line in text[: text.rfind("\n") + 1].split("\n") if line.strip()]


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table that W&B exports. A column may have the name of its run before that of the metric."""
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
    """Yields the scalars of TensorBoard's event files. A record is its length, a checksum, the event, a checksum."""
    # Imported here because tensorboardX imports torch where it is installed, which takes a second.
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    for file in files:
        data, at = file.read_bytes(), 0
        while at + 12 <= len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            if at + 16 + size > len(data):  # it is being written
                break
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            values = {x.tag: _scalar(x) for x in event.summary.value}
            if values:
                yield {"step": event.step} | values


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return value.simple_value
    tensor = value.tensor  # torch and TensorFlow write a scalar as a tensor
    if tensor.float_val:
        return tensor.float_val[0]
    return struct.unpack("<f", tensor.tensor_content)[0] if len(tensor.tensor_content) == 4 else None
