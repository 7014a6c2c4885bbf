"""Reads and shortens the log files of a run, which hold one JSON object per line.

A host that crashes, a full disk or a hand may leave lines that cannot be read. Every reader leaves these lines out, and
says how many they are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from itertools import compress, takewhile
from pathlib import Path
from typing import Any

from ..errors import printable


def parse(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line, or None if the line is not a complete record of a step."""
    try:
        record = json.loads(line)
        is_record = isinstance(record["step"], int) and line.endswith(b"\n")  # a cut line may be valid JSON
    except (ValueError, TypeError, KeyError):
        return None
    return record if is_record else None


def is_damaged(line: bytes, record: dict[str, Any] | None) -> bool:
    """Returns whether a line is complete but holds no record. A killed process leaves only lines without an end.

    record: result of `parse`.
    """
    return record is None and line.endswith(b"\n") and bool(line.strip())


def read(file: Path, *, quiet: bool = False) -> list[dict[str, Any]]:
    """Returns the records of a log, or [] if the file does not exist.

    Prints how many lines cannot be read, unless quiet.
    """
    if not file.is_file():
        return []
    records, damaged_count = list[dict[str, Any]](), 0
    with file.open("rb") as lines:
        for line in lines:
            if (record := parse(line)) is not None:
                records.append(record)
            damaged_count += is_damaged(line, record)
    if damaged_count and not quiet:
        print(printable(left_out(str(file), damaged_count)), file=sys.stderr)
    return records


def left_out(file: str, count: int) -> str:
    """Returns a note that lines of a file cannot be read. count: number of these lines."""
    return f"note: {file}: {count} line{'s' * (count > 1)} cannot be read and {'are' if count > 1 else 'is'} left out"


def accuracies(records: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Returns the accuracies of all evaluations in the records of metrics.jsonl, by step."""
    measured = {record["step"]: record.get("eval/accuracy") for record in records}
    return {step: accuracy for step, accuracy in measured.items() if accuracy is not None}


def remove_after(file: Path, step: int) -> str:
    """Removes the lines after `step`, which a resumed run writes again, and all lines that cannot be read.

    Returns a warning for the console if such a line was complete, so that no killed process can have left it; else "".
    """
    if not file.is_file():
        return ""
    sizes, damaged = list[int](), list[int]()  # bytes of each line, 0 = to be removed; numbers of the damaged lines
    with file.open("rb") as lines:  # read line by line, because a log of completions may be larger than the memory
        for number, line in enumerate(lines, 1):
            record = parse(line)
            sizes.append(len(line) if record is not None and record["step"] <= step else 0)
            if is_damaged(line, record):
                damaged.append(number)
    kept_bytes = sum(takewhile(bool, sizes))
    if kept_bytes == sum(sizes):
        with file.open("r+b") as lines:
            lines.truncate(kept_bytes)
            os.fsync(lines.fileno())
    else:  # a damaged line stands before a kept one
        partial = file.with_name(file.name + ".partial")
        with file.open("rb") as lines, partial.open("wb") as kept_lines:
            kept_lines.writelines(compress(lines, sizes))
            kept_lines.flush()
            os.fsync(kept_lines.fileno())
        os.replace(partial, file)
    if step < 0 or not damaged:  # a new run keeps no line
        return ""
    lines_text = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first of them {damaged[0]},"
    return f"{file}: {lines_text} cannot be read: removed; the lines after it that can be read were kept"
