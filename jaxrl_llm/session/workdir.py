"""The work directory of a run: whether it can hold the run, and what it says of how the run began."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from jaxrl_llm.config.load import flatten
from jaxrl_llm.config.records import Table, names_that_may_change
from jaxrl_llm.errors import UserError, check_local
from jaxrl_llm.machine import disk, distributed
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.session import json_lines
from jaxrl_llm.session.checkpoint import has_checkpoint
from jaxrl_llm.session.lock import LOCK


def check_workdir(workdir: Path, fields: Mapping[str, Any], known: Table) -> None:
    """Checks that the workdir can hold a run of a config with these fields; known: table of the fields of a config.

    Raises: UserError, if the workdir is not writable, has files of another program, or holds a run of another config.
    """
    check_local("--workdir", str(workdir))
    existing = next(folder for folder in (workdir.absolute(), *workdir.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise UserError(f"--workdir {workdir} cannot be a folder, because {existing} is a file: give another")
    if not os.access(existing, os.W_OK):
        reason = "its disk is read-only" if os.statvfs(existing).f_flag & os.ST_RDONLY else "you may not write there"
        raise UserError(f"--workdir {workdir} cannot be written ({existing}: {reason}): give another")
    if not workdir.exists() or all(_is_ours(file) for file in workdir.iterdir()):
        return  # no run yet
    file = workdir / "config.json"
    # Never "give a new folder" alone: it would lose good checkpoints.
    remedy = "give a new folder"
    if has_checkpoint(workdir / "checkpoints"):
        remedy = "put it back, because the checkpoints there need it; a model card, hf/README.md, has its text too"
    if not file.is_file():
        raise UserError(f"--workdir {workdir} is not empty and has no config.json of a run: {remedy}")
    try:
        before = flatten(json.loads(file.read_text()))
    except (ValueError, AttributeError):  # not JSON, or not an object
        raise UserError(f"{file} is not a run's config: {remedy}") from None
    now = json.loads(json.dumps(fields))  # as the file has them: lists for tuples
    may_change = names_that_may_change(known, fields)
    # Function names are compared first: a changed function also changes the other fields of its section.
    for name in sorted(set(before) | set(now), key=lambda name: (not name.endswith(".name"), name)):
        default = json.loads(json.dumps(known.defaults.get(name)))
        here, then = now.get(name, default), before.get(name, default)
        if here != then and name not in may_change:
            raise UserError(
                f"config.{name} is {here!r}, but the run in {workdir} has {then!r}: give the run's own config, or "
                f"another --workdir, where model.path = {workdir}/hf begins from this run's weights"
            )


def beginning(read: Callable[[], str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with which the run began, for the fields that a config leaves open. All processes agree.

    read(): returns the text of the run's config.json, "" if the run is new. An open field is schedule_steps = 0, for
    which a new run takes num_steps, or data.today = "", for which a new run takes the current date.
    """
    began = {"schedule_steps": fields.get("num_steps", 0), "data.today": date.today().isoformat()}
    if distributed.first():
        with suppress(ValueError, AttributeError):  # no run, or `check_workdir` reports the error
            before = flatten(json.loads(read()))
            if _sections(before) == _sections(fields):  # else the run is of another program
                began |= {name: before[name] for name in began if name in before}
    # Missing fields, and those of a wrong type, are left to the checks, and set ones to `check_workdir`.
    return {name: x for name, x in distributed.exchange(began)[0].items() if fields.get(name) in (0, "")}


def _sections(fields: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in fields}


def check_log(workdir: Path, start: int, every: int) -> None:
    """Checks that a run that begins at `start` = 0 was stopped before its first checkpoint was complete, or is new.

    Prints a note where the run may have lost its checkpoints. Raises: UserError, if it has made checkpoints for sure.
    """
    last = max((record["step"] for record in json_lines.read(workdir / "metrics.jsonl")), default=0)
    if start or not last:
        return
    # The second save waits until the first one is complete, and the log has the step of the second one before. A model
    # is exported after the last save is complete.
    exported = [name for name in ("hf", "adapter") if (workdir / name).exists()]
    if last > 2 * every or exported:
        raise UserError(
            f"{workdir} has a log of {last} steps, but no checkpoint: put its folder checkpoints back, or remove "
            f"{' and '.join(['metrics.jsonl', *exported])} to start again at step 1"
        )
    print(f"note: {workdir} has a log of {last} steps, but no checkpoint: the run starts again at step 1", flush=True)


def _is_ours(file: Path) -> bool:
    """Whether launch/tpu_vm.sh, or a run that was killed before it wrote config.json, can have left this file."""
    if file.name == "checkpoints":
        return file.is_dir() and not any(file.iterdir())
    return file.name.startswith(("launch.", "config.json.partial", agreement.TOKEN, LOCK))


def open_workdir(workdir: Path, config: dict[str, Any]) -> None:
    """Writes config.json into the workdir. Raises: UserError, if the disk write fails."""
    with disk.writing(workdir):
        disk.replace(workdir / "config.json", json.dumps(config, indent=2) + "\n")
