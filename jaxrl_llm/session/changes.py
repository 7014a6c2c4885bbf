"""What a resumed run has otherwise than before: rows, or code of the user's functions. Its config must accept it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.config import own_code
from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import disk

FILE = "accepted_changes.jsonl"  # in the workdir
ROWS = ".source"  # ends the config fields that name rows
CODE = "code of "  # begins the key of the hash of a function
# Ends of the fields whose functions decide nothing but rows, which are compared themselves, or outputs.
NOT_COMPARED = (".source", ".convert", "log.to")


class Rows(NamedTuple):
    """What a checkpoint keeps of the rows, beside their hashes: the position in the data depends on it."""

    counts: dict[str, list[int]]  # rows by config field, of each source of a mixture
    prompts: str  # hash of the token ids of the training prompts


@dataclass(frozen=True)
class Change:
    """Rows or code that a run has accepted. Hashes of rows are those of `Dataset.fingerprint`."""

    after_step: int
    field: str  # of the config, or CODE and the name of a function
    before: str
    now: str
    rows_before: list[int]  # of each source of a mixture; of code none
    rows_now: list[int]

    def __str__(self) -> str:
        if self.field.startswith(CODE):
            return f"the {self.field} has changed since this run began"
        before, now = sum(self.rows_before), sum(self.rows_now)
        field = "data.mixture" if self.field == "data.source" and len(self.rows_now) > 1 else self.field
        line = f"config.{field} holds other rows than this run had ({before:,} rows then, {now:,} now"
        if self.field.startswith("eval."):
            return f"{line}; accuracies are of these from now on)"
        return f"{line})" if self.rows_before == self.rows_now else f"{line}; the order of the rows begins anew)"


def code_hashes(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the hashes of the user's functions that fields of a checked config name, except of rows and loggers."""
    compared = [value for field, value in fields.items() if not field.endswith(NOT_COMPARED)]
    return {CODE + name: digest for name, digest in own_code.digests(compared).items()}


def is_acceptable(key: str) -> bool:
    """Returns whether a run may go on if what this hash is of has changed."""
    return key.endswith(ROWS) or key.startswith(CODE)


def accepted_by(hashes: Mapping[str, str]) -> str:
    """Returns the value of `config.checkpoint.accept` that accepts rows and code with these hashes."""
    acceptable = "".join(hashes[key] for key in sorted(hashes) if is_acceptable(key))
    return hashlib.sha256(acceptable.encode()).hexdigest()[:12]


def check(
    workdir: Path, fields: Mapping[str, Any], hashes: Mapping[str, str], rows: Rows, step: int, saved: Mapping[str, Any]
) -> list[Change]:
    """Returns how rows and code differ from those of a checkpoint.

    fields: fields of the config. saved: `began_with` and `rows` of the checkpoint of `step`.
    Raises: UserError, unless the config accepts them.
    """
    before, counts = saved["began_with"], saved["rows"]["counts"]
    changed = [key for key in hashes if is_acceptable(key) and before.get(key, hashes[key]) != hashes[key]]
    changes = [
        Change(step, key, before[key], hashes[key], counts.get(key, []), rows.counts.get(key, [])) for key in changed
    ]
    if changes and fields["checkpoint.accept"] != accepted_by(hashes):
        raise UserError(
            f"{' and '.join(map(str, changes))}{_fields(workdir, fields, changed)}: put it back, or give another "
            f"--workdir, or go on with what is there now: --config.checkpoint.accept={accepted_by(hashes)}"
        )
    return changes


def _fields(workdir: Path, fields: Mapping[str, Any], changed: Sequence[str]) -> str:
    """Says which config fields of changed rows differ from those of the run, with both values."""
    then = flatten(json.loads((workdir / "config.json").read_text(encoding="utf-8")))
    sections = tuple(key.removesuffix("source") for key in changed if key.endswith(ROWS))
    differ = [name for name in fields if name.startswith(sections) and name in then and then[name] != fields[name]]
    told = [f"{name} was {then[name]!r} and is {fields[name]!r}" for name in differ]
    return f"; {', '.join(told)}" if told else ""


def write(workdir: Path, changes: Sequence[Change]) -> None:
    """Adds changes to FILE, unless a run that ended before its next checkpoint has done so. Raises: UserError."""
    before = read(workdir)
    if new := [change for change in changes if change not in before]:
        with disk.writing(workdir):
            disk.replace(workdir / FILE, "".join(json.dumps(asdict(change)) + "\n" for change in [*before, *new]))


def read(workdir: Path) -> list[Change]:
    """Returns the changes that a run has accepted, in order."""
    file = workdir / FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [Change(**json.loads(line)) for line in lines]
