"""Changes of rows or of the user's functions between a run and its resumption, which the config must accept."""

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

FILE = "accepted_changes.jsonl"  # file in the work directory
ROWS = ".source"  # suffix of the config fields that name rows
CODE = "code of "  # prefix of the key of a function's hash
# Suffixes of the fields whose functions are not compared, because they only make rows, which are compared, or outputs.
NOT_COMPARED = (".source", ".convert", "log.to")


class ChangedInputs(UserError):
    """A run has other models, rows or code than at its start. `change`: what has changed, without a remedy."""

    def __init__(self, change: str, remedy: str):
        super().__init__(f"{change}: {remedy}")
        self.change = change


class Rows(NamedTuple):
    """The properties of the rows that a checkpoint holds, because the position in the data depends on them."""

    counts: dict[str, list[int]]  # config field -> number of rows of each source of the mixture
    prompts: str  # hash of the token ids of the training prompts


@dataclass(frozen=True)
class Change:
    """A change of rows or code that a run has accepted. Hashes of rows are made by `Dataset.fingerprint`."""

    after_step: int
    field: str  # config field of the rows, or CODE and the name of a function
    before: str  # hash before the change
    now: str  # hash since the change
    rows_before: list[int]  # number of rows of each source of the mixture; [] for code
    rows_now: list[int]

    def __str__(self) -> str:
        if self.field.startswith(CODE):
            return f"the {self.field} has changed since this run started"
        count_before, count_now = sum(self.rows_before), sum(self.rows_now)
        field = "data.mixture" if self.field == "data.source" and len(self.rows_now) > 1 else self.field
        line = f"config.{field} holds other rows than this run had ({count_before:,} rows then, {count_now:,} now"
        if self.field.startswith("eval."):
            return f"{line}; later accuracies are measured on the new rows)"
        return f"{line})" if self.rows_before == self.rows_now else f"{line}; the order of the rows starts again)"


def code_hashes(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the hashes of the user's functions that a checked config names, except those of rows and loggers."""
    compared = [value for field, value in fields.items() if not field.endswith(NOT_COMPARED)]
    return {CODE + name: digest for name, digest in own_code.digests(compared).items()}


def is_acceptable(key: str) -> bool:
    """Returns whether a run may resume with a changed hash: the user can accept changed rows and code only."""
    return key.endswith(ROWS) or key.startswith(CODE)


def acceptance_token(hashes: Mapping[str, str]) -> str:
    """Returns the value of config.checkpoint.accept with which a resumed run accepts rows and code of these hashes."""
    acceptable = "".join(hashes[key] for key in sorted(hashes) if is_acceptable(key))
    return hashlib.sha256(acceptable.encode()).hexdigest()[:12]


def check(
    workdir: Path, fields: Mapping[str, Any], hashes: Mapping[str, str], rows: Rows, step: int, notes: Mapping[str, Any]
) -> list[Change]:
    """Returns the changes of rows and code since a checkpoint.

    fields: flat fields of the config. hashes: hashes of rows and code now. rows: rows now. notes: notes of the
    checkpoint of `step`, with the entries "began_with" and "rows". Raises: ChangedInputs, unless the config accepts
    the changes.
    """
    saved_hashes, saved_counts = notes["began_with"], notes["rows"]["counts"]
    changed = [key for key in hashes if is_acceptable(key) and saved_hashes.get(key, hashes[key]) != hashes[key]]
    changes = [
        Change(
            after_step=step,
            field=key,
            before=saved_hashes[key],
            now=hashes[key],
            rows_before=saved_counts.get(key, []),
            rows_now=rows.counts.get(key, []),
        )
        for key in changed
    ]
    if changes and fields["checkpoint.accept"] != acceptance_token(hashes):
        raise ChangedInputs(
            f"{' and '.join(map(str, changes))}{_describe_fields(workdir, fields, changed)}",
            "restore the old rows or code, or use another --workdir, or resume with the new ones: "
            f"--config.checkpoint.accept={acceptance_token(hashes)}",
        )
    return changes


def _describe_fields(workdir: Path, fields: Mapping[str, Any], changed: Sequence[str]) -> str:
    """Returns text that lists the changed config fields of the sections with changed rows, with both values."""
    old_fields = flatten(json.loads((workdir / "config.json").read_text(encoding="utf-8")))
    sections = tuple(key.removesuffix("source") for key in changed if key.endswith(ROWS))
    different_names = [
        name for name in fields if name.startswith(sections) and name in old_fields and old_fields[name] != fields[name]
    ]
    descriptions = [f"{name} was {old_fields[name]!r} and is {fields[name]!r}" for name in different_names]
    return f"; {', '.join(descriptions)}" if descriptions else ""


def write(workdir: Path, changes: Sequence[Change]) -> None:
    """Adds changes to FILE, unless they are in it already. Raises: UserError, if the disk write fails."""
    old_changes = read(workdir)
    if new_changes := [change for change in changes if change not in old_changes]:
        with disk.writing(workdir):
            disk.replace(
                workdir / FILE, "".join(json.dumps(asdict(change)) + "\n" for change in [*old_changes, *new_changes])
            )


def read(workdir: Path) -> list[Change]:
    """Returns the changes that a run has accepted, the oldest first."""
    file = workdir / FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [Change(**json.loads(line)) for line in lines]
