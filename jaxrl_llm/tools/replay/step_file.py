"""A replayed step as a safetensors file: arrays by name, and all other fields of the record as JSON in the metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import disk
from jaxrl_llm.tools.replay.record import StepRecord

FORMAT = "jaxrl_llm.step.1"  # version of the file's format, in its metadata
# Fields that hold several arrays, which the file names FIELD/NAME.
TABLES = ("channels", "columns", "gradient", "inputs")


def save(record: StepRecord, file: Path) -> None:
    """Writes a step into a file, which replaces an older one. The comparison of a what-if is left out.

    Raises: UserError, if the file cannot be written.
    """
    fields = vars(record).copy()
    del fields["what_if"]
    arrays = {f"{table}/{name}": x for table in TABLES for name, x in fields.pop(table).items()}
    arrays |= {name: fields.pop(name) for name in [*fields] if isinstance(fields[name], np.ndarray)}
    contiguous = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    content = safetensors.numpy.save(contiguous, {"format": FORMAT, "record": json.dumps(fields)})
    with disk.writing_output("--export", file):
        disk.replace(file, content)


def load(file: Path) -> StepRecord:
    """Reads a step from a file. Raises: UserError, if the file holds no step of this format."""
    try:
        with safe_open(file, "numpy") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--from {file} cannot be read ({error}): use a file of jaxrl replay --export") from error
    if metadata.get("format") != FORMAT:
        file_format = metadata.get("format")
        raise UserError(
            f"--from {file}: its format is {file_format}, not {FORMAT}: use a file of jaxrl replay --export"
        )
    fields: dict[str, Any] = json.loads(metadata["record"]) | {table: {} for table in TABLES}
    # An array with the name TABLE/NAME belongs to a field with several arrays, and any other array is a field itself.
    for name, array in arrays.items():
        table, _, array_name = name.partition("/")
        if array_name:
            fields[table][array_name] = array
        else:
            fields[name] = array
    fields["differences"] = {name: tuple(pair) for name, pair in fields["differences"].items()}
    return StepRecord(**fields)
