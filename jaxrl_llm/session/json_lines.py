"""Reads and truncates the log files of a run, which hold one JSON object per line.

A host that crashes may leave lines that cannot be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def parsed_lines(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line with its record, until the first line that is not a complete record of a step."""
    for line in lines:
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, TypeError, KeyError):
            return
        if not line.endswith(b"\n"):
            return  # because the end of a cut line may be missing although the line is valid JSON
        yield line, record


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a log, or [] if the file does not exist."""
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        return [record for _, record in parsed_lines(lines)]


def accuracies(records: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Returns the accuracies of all evaluations in the records of metrics.jsonl, by step."""
    measured = {record["step"]: record.get("eval/accuracy") for record in records}
    return {step: accuracy for step, accuracy in measured.items() if accuracy is not None}


def remove_after(file: Path, step: int) -> str:
    """Removes the lines after `step`, which a resumed run writes again, and all lines from an unreadable line on.

    Returns a warning for the console if the unreadable line was complete, so that no killed process can have left it;
    else "".
    """
    if not file.is_file():
        return ""
    kept_bytes = kept_lines = 0
    with file.open("r+b") as lines:  # read line by line, because a log of completions may be larger than the memory
        for line, record in parsed_lines(lines):
            if record["step"] > step:
                break
            kept_bytes, kept_lines = kept_bytes + len(line), kept_lines + 1
        lines.seek(kept_bytes)
        next_line = lines.readline()
        lines.truncate(kept_bytes)
        lines.flush()
        os.fsync(lines.fileno())
    is_damaged = next_line.endswith(b"\n") and not [*parsed_lines([next_line])]
    if not is_damaged:
        return ""
    return f"{file}: line {kept_lines + 1} cannot be read: this line and all lines after it were removed"
