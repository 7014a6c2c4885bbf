"""Reads the log of a run, ours or another trainer's, as records with our names."""

from __future__ import annotations

import csv
import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from jaxrl_llm.errors import UserError
from jaxrl_llm.health.finding import Record

NAMES = {  # of TRL, then of veRL and EasyR1 -> ours
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "groups/no_signal",
    "kl": "kl/ref",
    "objective/kl": "kl/ref",
    "policy/entropy_avg": "entropy",
    "policy/clipfrac_avg": "clip/fraction",
    "clip_ratio": "clip/fraction",
    "clip_ratio/region_mean": "clip/fraction",
    "completion_length": "completion/length",
    "completions/mean_length": "completion/length",
    "completions/clipped_ratio": "completion/truncated",
    "sampling/importance_sampling_ratio/mean": "importance/mean",
    "critic/score/mean": "reward/mean",
    "reward/overall": "reward/mean",
    "actor/entropy": "entropy",
    "actor/entropy_loss": "entropy",
    "actor/kl_loss": "kl/ref",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip/fraction",
    "actor/lr": "learning_rate",
    "critic/vf_explained_var": "critic/explained_variance",
    "response_length/mean": "completion/length",
    "response_length/clip_ratio": "completion/truncated",
}
METRICS = "metrics.jsonl"  # the log in a workdir of ours


def read(path: Path) -> list[Record]:
    """Returns the records of a run: a workdir, TensorBoard's folder, JSON lines, a trainer_state.json, or a CSV file.

    Steps of another trainer are numbered from 1, because it may log only some of them; "at" is its own number.
    Raises: UserError, if there is no log or it cannot be read.
    """
    if (path / METRICS).is_file():
        return [json.loads(line) for line in whole_lines(path / METRICS)]
    try:
        rows = _rows(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--run {path} cannot be read ({error}): give a workdir or a log") from error
    records = [{"at": at} | ours(row) for at, row in sorted(rows.items())]
    records = [record for record in records if "reward/mean" in record or "grad_norm" in record]
    if not records:
        known = ", ".join(["reward", "grad_norm", "critic/score/mean", "actor/grad_norm"])
        raise UserError(f"--run {path} has no number that a rule knows, such as {known}: give the log of a run")
    return [record | {"step": number} for number, record in enumerate(records, 1)]


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    """Returns the values of each step. Several lines of a step are joined."""
    rows: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    if path.is_dir():
        lines = _events(path)
    elif path.suffix == ".csv":
        lines = _csv(path)
    elif path.suffix == ".json":
        lines = json.loads(path.read_text())["log_history"]
    else:
        lines = map(json.loads, whole_lines(path))
    for number, line in enumerate(lines, 1):
        values = line["data"] if isinstance(line.get("data"), dict) else line  # veRL's file
        step = line.get("step", line.get("_step", line.get("global_step", number)))
        rows[int(step)] |= {name: x for name, x in values.items() if isinstance(x, int | float)}
    return dict(rows)


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


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the scalars of TensorBoard's event files. A record is its length, a checksum, the event, a checksum."""
    for file in sorted(folder.rglob("*tfevents*")):
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


def ours(row: dict[str, Any]) -> Record:
    """Returns the values of another trainer under our names. A value that is not finite becomes None, as in our log."""
    row = {name.removeprefix("train/"): x for name, x in row.items()}
    record = {NAMES.get(name, name): x if math.isfinite(x) else None for name, x in row.items()}
    for name, x in row.items():
        parts = name.split("/")
        if parts[0] == "rewards" and parts[-1] == "mean":  # TRL's reward functions
            record["reward/" + "/".join(parts[1:-1])] = x
    low, mean, high = (row.get(f"critic/score/{name}") for name in ("min", "mean", "max"))
    if low is not None and mean is not None and high is not None and "reward/std" not in record:
        # veRL has no deviation: that of rewards with two values, and at most so much for all others.
        record["reward/std"] = math.sqrt(max((high - mean) * (mean - low), 0.0))
    return record
