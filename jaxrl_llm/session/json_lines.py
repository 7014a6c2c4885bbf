"""Log files of a run: a JSON object in each line. A lost host may leave lines that cannot be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def readable(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields the lines, and the record of each, up to the first line that is no record of a step."""
    for line in lines:
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, TypeError, KeyError):
            return
        if not line.endswith(b"\n"):
            return  # a torn number may look like a whole one
        yield line, record


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a log; []: there is no file."""
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        return [record for _, record in readable(lines)]


def accuracies(records: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Returns the accuracies of all evaluations in the records of metrics.jsonl, by step."""
    measured = {record["step"]: record.get("eval/accuracy") for record in records}
    return {step: accuracy for step, accuracy in measured.items() if accuracy is not None}


def cut_back(file: Path, step: int) -> str:
    """Removes the lines after `step`, which a resumed run writes again, and all lines from an unreadable one on.

    Returns a line on an unreadable line that a killed process cannot have left, for the console; "": all is well.
    """
    if not file.is_file():
        return ""
    end = count = 0
    with file.open("r+b") as lines:  # a log of completions may be larger than the memory
        for line, record in readable(lines):
            if record["step"] > step:
                break
            end, count = end + len(line), count + 1
        lines.seek(end)
        following = lines.readline()
        lines.truncate(end)
        lines.flush()
        os.fsync(lines.fileno())
    damaged = following.endswith(b"\n") and not [*readable([following])]
    return f"{file}: line {count + 1} cannot be read: it was removed, with the lines after it" if damaged else ""
