"""Checks of a run's work directory before the run starts, and the config values that a resumed run takes from it."""

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
from jaxrl_llm.health import json_lines
from jaxrl_llm.machine import disk, distributed
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.session.checkpoint import SAVED, has_checkpoint
from jaxrl_llm.session.lock import LOCK


def check_workdir(workdir: Path, fields: Mapping[str, Any], field_table: Table) -> None:
    """Checks that the work directory can hold a run with these fields of a config.

    field_table: table of all fields of a config. Raises: UserError, if the directory is not writable, has files of
    another program, or holds a run of another config.
    """
    check_local("--workdir", str(workdir))
    # The directory itself, or the nearest folder above it that exists, must be writable.
    folders = (workdir.absolute(), *workdir.absolute().parents)
    existing_folder = next(folder for folder in folders if folder.exists())
    if not existing_folder.is_dir():
        raise UserError(
            f"--workdir {workdir} cannot be created, because {existing_folder} is a file: use another folder"
        )
    if not os.access(existing_folder, os.W_OK):
        is_read_only = os.statvfs(existing_folder).f_flag & os.ST_RDONLY
        reason = "is on a read-only disk" if is_read_only else "is not writable by you"
        raise UserError(f"--workdir {workdir}: {existing_folder} {reason}: use another folder")
    if not workdir.exists() or all(_is_left_by_launcher(file) for file in workdir.iterdir()):
        return  # the directory holds no run yet
    # A directory with other files must hold the config.json of a run.
    file = workdir / "config.json"
    remedy = "use a new folder"
    if has_checkpoint(workdir / "checkpoints"):  # a new folder would abandon these checkpoints
        remedy = (
            "restore config.json, because the checkpoints in this folder need it; a model card, hf/README.md, has the "
            "text of config.json too"
        )
    if not file.is_file():
        raise UserError(f"--workdir {workdir} is not empty and has no config.json of a run: {remedy}")
    try:
        saved_fields = flatten(json.loads(file.read_text()))
    except (ValueError, AttributeError):  # the file is not JSON, or holds no object
        raise UserError(f"--workdir {workdir}: {file} is not the config of a run: {remedy}") from None
    # The run continues only if each field has its first value, except fields that may change during a run.
    current_fields = json.loads(json.dumps(fields))  # converts tuples to lists, because the file has lists
    may_change = names_that_may_change(field_table, fields)
    # Function names are compared first, because a changed function also changes the other fields of its section.
    for name in sorted(set(saved_fields) | set(current_fields), key=lambda name: (not name.endswith(".name"), name)):
        default = json.loads(json.dumps(field_table.defaults.get(name)))
        current_value, saved_value = current_fields.get(name, default), saved_fields.get(name, default)
        if current_value != saved_value and name not in may_change:
            raise UserError(
                f"config.{name} = {current_value!r}: the run in {workdir} started with {saved_value!r}: set the field "
                f"to {saved_value!r} to resume that run, or use another --workdir, where model.path = {workdir}/hf "
                "starts from the weights of this run"
            )


def initial_values(read: Callable[[], str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for the fields that a config leaves open: schedule_steps = 0 and data.today = "".

    A resumed run takes the values with which it started; a new run takes num_steps and the current date. read() ->
    text of the run's config.json, "" for a new run. All processes get the same values.
    """
    values = {"schedule_steps": fields.get("num_steps", 0), "data.today": date.today().isoformat()}
    if distributed.first():
        with suppress(ValueError, AttributeError):  # the run is new, or `check_workdir` reports the error later
            saved_fields = flatten(json.loads(read()))
            if _sections(saved_fields) == _sections(fields):  # other sections belong to a run of another program
                values |= {name: saved_fields[name] for name in values if name in saved_fields}
    # Only open fields get a value. Missing fields and wrong types are reported by the checks of the config.
    return {name: x for name, x in distributed.exchange(values)[0].items() if fields.get(name) in (0, "")}


def _sections(fields: Iterable[str]) -> set[str]:
    """Returns the first words of dotted fields, such as "optim" of optim.learning_rate."""
    return {name.partition(".")[0] for name in fields}


def check_log(workdir: Path, start: int, checkpoint_every: int) -> None:
    """Checks that neither the checkpoints of a run nor its log have vanished.

    start: step of the newest checkpoint, 0 without one. checkpoint_every: steps between checkpoints. Prints a note if
    the run had no checkpoint yet, or if the log ends before the checkpoint. Raises: UserError, if `start` is 0 although
    a checkpoint was complete.
    """
    last_step = max((record["step"] for record in json_lines.read(workdir / "metrics.jsonl", quiet=True)), default=0)
    if last_step < start:
        print(
            f"note: {workdir / 'metrics.jsonl'} ends at step {last_step}, before the checkpoint of step {start}: the "
            "records of the steps between them are lost",
            flush=True,
        )
    if start or not last_step:
        return
    # Each of these files shows that a checkpoint was complete.
    marks = [name for name in ("hf", "adapter", SAVED) if (workdir / name).exists()]
    # Runs of earlier versions lack SAVED. Their second save waited until the first was complete, and the log had the
    # step of the second save before that. They exported a model after the last save was complete.
    if marks or last_step > 2 * checkpoint_every:
        raise UserError(
            f"--workdir {workdir} has a log of {last_step} steps, but no checkpoint: restore its folder checkpoints, "
            f"or remove {', '.join(['metrics.jsonl', *marks])} to start a new run"
        )
    print(
        f"note: {workdir} has a log of {last_step} steps, but no checkpoint: the run starts again at step 1", flush=True
    )


def _is_left_by_launcher(file: Path) -> bool:
    """Returns whether a launcher, or a run that was killed before it wrote config.json, may have left this file."""
    if file.name == "checkpoints":
        return file.is_dir() and not any(file.iterdir())
    return file.name.startswith(("launch.", "config.json.partial", agreement.TOKEN, LOCK))


def write_config(workdir: Path, config: dict[str, Any]) -> None:
    """Writes config.json into the work directory. Raises: UserError, if the disk write fails."""
    with disk.writing(workdir):
        disk.replace(workdir / "config.json", json.dumps(config, indent=2) + "\n")
