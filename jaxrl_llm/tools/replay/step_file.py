"""A replayed step as a safetensors file: arrays by name, and all other fields of the record as JSON in the metadata."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.replay.record import StepRecord

FORMAT = "jaxrl_llm.step.1"  # version of the file's format, in its metadata
# Fields that hold several arrays, which the file names FIELD/NAME.
TABLES = ("channels", "columns", "gradient", "inputs")


def save(record: StepRecord, file: Path) -> None:
    """Writes a step into a file, which replaces an older one. The comparison of a what-if is left out.

    Raises: UserError, if the file cannot be written.
    """
    arrays: dict[str, np.ndarray] = {}
    others: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in TABLES:
            arrays |= {f"{field.name}/{name}": np.ascontiguousarray(x) for name, x in value.items()}
        elif isinstance(value, np.ndarray):
            arrays[field.name] = np.ascontiguousarray(value)
        elif field.name != "what_if":
            others[field.name] = value
    partial = file.with_name(file.name + ".partial")
    try:
        save_file(arrays, partial, {"format": FORMAT, "record": json.dumps(others)})
        partial.chmod(0o644)  # safetensors writes files that only their owner can read
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"--export {file} cannot be written ({error}): use another file") from error


def load(file: Path) -> StepRecord:
    """Reads a step from a file. Raises: UserError, if the file holds no step of this format."""
    try:
        with safe_open(file, "numpy") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--from {file} cannot be read ({error}): use a file of jaxrl replay --export") from error
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"--from {file}: its format is {metadata.get('format')}, but this version reads {FORMAT}: use a file of "
            "jaxrl replay --export"
        )
    fields: dict[str, Any] = json.loads(metadata["record"]) | {name: {} for name in TABLES}
    for name, array in arrays.items():
        table, _, key = name.partition("/")
        if key:
            fields[table][key] = array
        else:
            fields[name] = array
    fields["differences"] = {name: tuple(pair) for name, pair in fields["differences"].items()}
    return StepRecord(**fields)
