"""Reads the log of a run, ours or another trainer's, as records with our names."""

from __future__ import annotations

import csv
import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from jaxrl_llm.errors import UserError
from jaxrl_llm.health.finding import Finding, LogRecord

NAMES = {  # of another trainer -> ours
    # TRL: GRPO and RLOO, also of older versions; then PPO
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "groups/no_signal",
    "kl": "kl/ref",
    "clip_ratio": "clip/fraction",
    "clip_ratio/region_mean": "clip/fraction",
    "cispo_clip_ratio": "clip/fraction",
    "completion_length": "completion/length",
    "completions/mean_length": "completion/length",
    "completions/clipped_ratio": "completion/truncated",
    "sampling/importance_sampling_ratio/mean": "importance/mean",
    "objective/scores": "reward/mean",
    "objective/non_score_reward": "reward/kl",
    "objective/kl": "kl/ref",
    "policy/entropy_avg": "entropy",
    "policy/clipfrac_avg": "clip/fraction",
    # veRL, and below EasyR1, which is made from it
    "critic/score/mean": "reward/mean",
    "actor/entropy": "entropy",
    "actor/kl_loss": "kl/ref",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip/fraction",
    "actor/lr": "learning_rate",
    "critic/vf_explained_var": "critic/explained_variance",
    "response_length/mean": "completion/length",
    "response_length/clip_ratio": "completion/truncated",
    "rollout_corr/k3_kl": "importance/kl",
    "rollout_corr/rollout_is_mean": "importance/mean",
    "rollout_corr/rollout_is_eff_sample_size": "importance/ess",
    "reward/overall": "reward/mean",
    "actor/entropy_loss": "entropy",
    "actor/pg_clipfrac_higher": "clip/fraction",  # pg_clipfrac_lower is that of a second clip
}
STEPS = ("train/global_step", "training/global_step", "global_step", "step", "_step")  # names of the step
METRICS = "metrics.jsonl"  # the log in a workdir of ours
STATE = "trainer_state.json"  # that of TRL
FILES = (STATE, "experiment_log.jsonl", METRICS)  # logs that a folder may have; the second is EasyR1's
SHOWN = 5  # runs in an error message
GIVE = "give a workdir, or a log of TRL, veRL or EasyR1: trainer_state.json, TensorBoard's folder, JSON lines or a CSV"


def bounds(path: Path) -> dict[str, Any] | None:
    """Returns the `health` section of the config in a workdir of ours; None, if this is another folder or a file."""
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))["health"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read(path: Path) -> list[LogRecord]:
    """Returns the records of a run: a workdir, TensorBoard's folder, JSON lines, a trainer_state.json, or a CSV file.

    Steps of another trainer are numbered from 1, because it may log only some of them; "at" is its own number.
    Raises: UserError, if there is no log or it cannot be read.
    """
    if bounds(path) is not None and (path / METRICS).is_file():
        return [json.loads(line) for line in whole_lines(path / METRICS)]
    if runs := _runs(path):
        more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
        raise UserError(f"--run {path} is a folder of runs: give one of {', '.join(map(str, runs[:SHOWN]))}{more}")
    try:
        rows = _rows(_lines(path))
    except (OSError, ValueError, OverflowError, csv.Error, DecodeError) as error:
        raise UserError(f"--run {path} cannot be read ({error}): {GIVE}") from error
    records = [{"at": at} | ours(row) for at, row in sorted(rows.items())]
    records = _rollouts([record for record in records if "reward/mean" in record or "grad_norm" in record])
    if not records:
        known = ", ".join(["reward", "grad_norm", "critic/score/mean", "actor/grad_norm"])
        raise UserError(f"--run {path} has no number that a rule knows, such as {known}: give the log of a run")
    return [record | {"step": number} for number, record in enumerate(records, 1)]


def _runs(path: Path) -> list[Path]:
    """Returns the workdirs of ours in a folder that has no log itself."""
    if any((path / name).is_file() for name in FILES):
        return []
    return sorted(file.parent for file in path.glob("*/config.json") if bounds(file.parent) is not None)


def _lines(path: Path) -> Iterable[Any]:
    """Returns the rows of a log. Raises: ValueError, if it has none."""
    if path.is_dir():
        checkpoints = sorted(path.glob(f"checkpoint-*/{STATE}"), key=_number)
        logs = [*(path / name for name in FILES if (path / name).is_file()), *checkpoints[-1:]]
        if logs:
            return _lines(logs[0])
        events = sorted(path.rglob("*tfevents*"))
        if not events:
            raise ValueError(f"the folder has no {STATE}, no checkpoint-N with one, and no TensorBoard files")
        return _events(events)
    if path.suffix == ".csv":
        return _csv(path)
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        lines = content.get("log_history") if isinstance(content, dict) else content
        if not isinstance(lines, list):
            raise ValueError(f"it is no {STATE}: it has no list log_history")
        return lines
    return map(json.loads, whole_lines(path))


def _number(state: Path) -> int:
    """Returns the number of the checkpoint of a trainer_state.json."""
    number = state.parent.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def initial_findings(workdir: Path) -> list[Finding]:
    """Returns the findings of a run before its first step: those of the self-test."""
    file = workdir / "health.jsonl"
    lines = map(json.loads, whole_lines(file)) if file.is_file() else ()
    return [Finding(**{name: x for name, x in line.items() if name != "step"}) for line in lines if not line["step"]]


def _rows(lines: Iterable[Any]) -> dict[int, dict[str, float]]:
    """Returns the values of each step. Lines of a step are joined; a line without its number belongs to the last."""
    flat = [dict(_flat(line)) for line in lines]
    clock = next((name for name in STEPS if any(name in line for line in flat)), "")
    rows, step = defaultdict[int, dict[str, float]](dict), 0
    for number, line in enumerate(flat, 1):
        step = int(line.get(clock, step)) if clock else number
        rows[step] |= line
    return dict(rows)


def _flat(line: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of a line. EasyR1's file has sections in sections; "data" is veRL's for all of them."""
    if not isinstance(line, dict):
        raise ValueError("a line is no JSON object")
    for key, value in line.items():
        if isinstance(value, dict):
            yield from _flat(value, "" if key == "data" and not name else f"{name}{key}/")
        elif isinstance(value, int | float):
            yield f"{name}{key}", value


def _rollouts(records: list[LogRecord]) -> list[LogRecord]:
    """Joins the updates on a rollout. TRL logs each of them, and the reward only at the first: others are averaged."""
    groups = list[list[LogRecord]]()
    for record in records:
        if groups and "reward/mean" in groups[0][0] and "reward/mean" not in record:
            groups[-1].append(record)
        else:
            groups.append([record])
    while len(groups) > 1 and "reward/mean" not in groups[0][0] and "reward/mean" in groups[-1][0]:
        groups.pop(0)  # the log begins within a rollout
    return [_mean(group) for group in groups]


def _mean(group: list[LogRecord]) -> LogRecord:
    names = {name: [record[name] for record in group if name in record] for record in group for name in record}
    means = {name: None if None in values else sum(values) / len(values) for name, values in names.items()}
    return means | {"at": group[-1]["at"]}


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


def ours(row: dict[str, Any]) -> LogRecord:
    """Returns the values of another trainer under our names. A value that is not finite becomes None, as in our log."""
    row = {name.removeprefix("train/"): x if math.isfinite(x) else None for name, x in row.items()}
    record = {NAMES.get(name, name): x for name, x in row.items()}
    for name, x in row.items():
        if name.startswith("rewards/") and not name.endswith("/std"):  # TRL's reward functions
            record["reward/" + name.removeprefix("rewards/").removesuffix("/mean")] = x
    return _derived(row) | record


def _derived(row: dict[str, Any]) -> LogRecord:
    """Returns what follows from veRL's numbers: the deviation, the groups without a signal and the KL reward."""
    names = ("score/min", "score/mean", "score/max", "rewards/mean")
    low, mean, high, total = (row.get(f"critic/{name}") for name in names)
    derived = dict[str, Any]()
    if low is not None and mean is not None and high is not None:
        # That of rewards with two values, and at most so much for all others.
        derived["reward/std"] = math.sqrt(max((high - mean) * (mean - low), 0.0))
        derived |= {"groups/no_signal": 1.0} if low == high else {}
    if total is not None and mean is not None:
        derived["reward/kl"] = total - mean
    if row.get("rollout_corr/k3_kl") is not None and not any(name.startswith("fully_async/") for name in row):
        derived["rollout/lag_p95"] = 0.0  # the weights that sampled are those that score
    return derived
