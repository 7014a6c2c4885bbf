"""Rows that differ from those that a run began with: a resumed run goes on with them if its config accepts them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import disk

FILE = "data_changes.jsonl"  # in the workdir
SECTIONS = {"data.source": "data", "eval.source": "eval"}  # config field that names rows -> its section


class Rows(NamedTuple):
    """What a checkpoint keeps of the rows, beside their hashes: the position in the data depends on it."""

    counts: dict[str, list[int]]  # rows by config field, of each source of a mixture
    prompts: str  # hash of the token ids of the training prompts


@dataclass(frozen=True)
class Change:
    """Rows that a run has accepted. The hashes are those of `Dataset.fingerprint`."""

    after_step: int
    field: str
    before: str
    now: str
    rows_before: list[int]  # of each source of a mixture
    rows_now: list[int]

    def __str__(self) -> str:
        before, now = sum(self.rows_before), sum(self.rows_now)
        field = "data.mixture" if self.field == "data.source" and len(self.rows_now) > 1 else self.field
        line = f"config.{field} holds other rows than this run had ({before:,} rows then, {now:,} now"
        if self.field == "eval.source":
            return f"{line}; accuracies are of these from now on)"
        return f"{line})" if self.rows_before == self.rows_now else f"{line}; the order of the rows begins anew)"


def accepted_by(hashes: Mapping[str, str]) -> str:
    """Returns the value of `config.data.accept` that accepts the rows with these hashes, by config field."""
    return hashlib.sha256("".join(hashes.get(field, "") for field in SECTIONS).encode()).hexdigest()[:12]


def check(
    workdir: Path, fields: Mapping[str, Any], hashes: Mapping[str, str], rows: Rows, step: int, saved: Mapping[str, Any]
) -> list[Change]:
    """Returns how the rows differ from those of a checkpoint: the hash and the number for each field.

    fields: of the config. saved: `began_with` and `rows` of the checkpoint of `step`.
    Raises: UserError, unless the config accepts the rows.
    """
    before, counts = saved["began_with"], saved["rows"]["counts"]
    changed = [field for field in SECTIONS if field in hashes and before.get(field, hashes[field]) != hashes[field]]
    changes = [
        Change(step, field, before[field], hashes[field], counts[field], rows.counts[field]) for field in changed
    ]
    if changes and fields["data.accept"] != accepted_by(hashes):
        raise UserError(
            f"{' and '.join(map(str, changes))}{_fields(workdir, fields, changed)}: put the rows back, or give another "
            f"--workdir, or go on with the rows that are there now: --config.data.accept={accepted_by(hashes)}"
        )
    return changes


def _fields(workdir: Path, fields: Mapping[str, Any], changed: Sequence[str]) -> str:
    """Says which config fields of changed rows differ from those of the run, with both values."""
    then = flatten(json.loads((workdir / "config.json").read_text(encoding="utf-8")))
    sections = tuple(f"{SECTIONS[field]}." for field in changed)
    differ = [name for name in fields if name.startswith(sections) and name in then and then[name] != fields[name]]
    told = [f"{name} was {then[name]!r} and is {fields[name]!r}" for name in differ if name != "data.accept"]
    return f"; {', '.join(told)}" if told else ""


def write(workdir: Path, changes: Sequence[Change]) -> None:
    """Adds changes to FILE, unless a run that ended before its next checkpoint has done so. Raises: UserError."""
    before = read(workdir)
    if new := [change for change in changes if change not in before]:
        with disk.writing(workdir):
            disk.replace(workdir / FILE, "".join(json.dumps(asdict(change)) + "\n" for change in [*before, *new]))


def read(workdir: Path) -> list[Change]:
    """Returns the changes of rows in a run, in order."""
    file = workdir / FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [Change(**json.loads(line)) for line in lines]
