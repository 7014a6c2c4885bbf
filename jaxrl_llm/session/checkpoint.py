"""The workdir of a run, which survives a kill -9: config.json, Orbax checkpoints, and log files cut at a resume."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from operator import itemgetter
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    BestN,
    LatestN,
    PolicyCheckpointInfo,
    PreservationContext,
    PreservationPolicy,
)

from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import disk, distributed
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.machine.sharding import BATCH, shard_batch, to_host
from jaxrl_llm.session import other_rows
from jaxrl_llm.session.lock import LOCK
from jaxrl_llm.session.other_rows import SECTIONS, Change, Rows
from jaxrl_llm.structs import Config, Pending, PyTree

NO_ROWS = Rows({}, "")  # of a checkpoint of an earlier version
UNSET = {"schedule_steps": 0, "data.today": ""}  # fields that the beginning of a run decides, as the user leaves them
# Seconds after which a save in the background fails, and with it the run. Orbax's 20 minutes are too few for a slow
# bucket, and it measures them by the clock of the host, which may be set forward.
COMMIT = 6 * 3600
DELETED = ".deleted"  # behind the folder's name: where checkpoints are that are being deleted


def check_workdir(workdir: Path, config: Config, may_change: Collection[str]) -> None:
    """Checks that the workdir can hold a run of this config.

    may_change: fields that may differ from the config of the run in the workdir.
    Raises: UserError, if the workdir is not writable, has files of another program, or holds a run of another config.
    """
    existing = next(folder for folder in (workdir.absolute(), *workdir.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--workdir {workdir} cannot be written ({existing} is no folder of yours): give another")
    if not workdir.exists() or all(_is_ours(file) for file in workdir.iterdir()):
        return  # no run yet
    file = workdir / "config.json"
    if not file.is_file():
        raise UserError(f"--workdir {workdir} is not empty and not a run of ours (no config.json): give a new folder")
    try:
        before = flatten(ConfigDict(json.loads(file.read_text())))
    except (ValueError, AttributeError):  # not JSON, or not an object
        raise UserError(f"{file} is not a run's config: give another --workdir") from None
    now = flatten(ConfigDict(json.loads(_resolved(config))))
    # Function names are compared first: a changed function also changes the other fields of its section.
    for name in sorted(set(before) | set(now), key=lambda name: (not name.endswith(".name"), name)):
        if before.get(name) != now.get(name) and name not in may_change:
            raise UserError(
                f"config.{name} is {now.get(name)!r}, but the run in {workdir} has {before.get(name)!r}: "
                "give another --workdir, or the run's own config"
            )


def keep_beginning(workdir: Path, config: Config) -> None:
    """Replaces what a config leaves open by what the workdir's run began with, in all processes by the same.

    These are schedule_steps = 0, in a new run num_steps, and data.today = "", in a new run the date of this day.
    """
    # Missing fields, and those of a wrong type, are left to `check_fields`, and set ones to `check_workdir`.
    began = distributed.exchange(_beginning(workdir, config) if distributed.first() else None)[0]
    now = flatten(config)
    open_fields = {name: began[name] for name, unset in UNSET.items() if name in began and now[name] == unset}
    config.update_from_flattened_dict(open_fields)


def _beginning(workdir: Path, config: Config) -> dict[str, Any]:
    """Returns the values of the fields UNSET with which the run in the workdir began, or with which it would begin."""
    began, now = {"schedule_steps": config.num_steps, "data.today": date.today().isoformat()}, flatten(config)
    with suppress(OSError, ValueError, AttributeError):  # no run, or `check_workdir` reports the error
        before = flatten(ConfigDict(json.loads((workdir / "config.json").read_text())))
        began |= {name: before[name] for name in began if name in before}  # runs of earlier versions have no date
    return {name: x for name, x in began.items() if name in now}


def _is_ours(file: Path) -> bool:
    """Whether launch/tpu_vm.sh, or a run that was killed before it wrote config.json, can have left this file."""
    if file.name == "checkpoints":
        return file.is_dir() and not any(file.iterdir())
    return file.name.startswith(("launch.", "config.json.partial", agreement.TOKEN, LOCK))


def open_workdir(workdir: Path, config: Config) -> None:
    """Writes the resolved config.json into the workdir. Raises: UserError, if the disk write fails."""
    with disk.writing(workdir):
        disk.replace(workdir / "config.json", _resolved(config))


def _resolved(config: Config) -> str:
    return json.dumps(config.to_dict(), indent=2) + "\n"


def cut_back(file: Path, step: int) -> None:
    """Removes the lines after `step`, and a torn last line, from a JSON-lines log. A resumed run writes them again."""
    if not file.is_file():
        return
    end = 0
    with file.open("r+b") as lines:  # a log of completions may be larger than the memory
        for line in lines:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
            end += len(line)
        lines.truncate(end)
        lines.flush()
        os.fsync(lines.fileno())


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder of `Checkpoints` holds a complete checkpoint."""
    return folder.is_dir() and bool(ocp.utils.checkpoint_steps(folder))


class Checkpoints:
    """Saves model states, the data position and the step in the background.

    A torn save is never a checkpoint. Neither is one whose deletion was cut off: it has left the folder before.
    """

    def __init__(self, folder: Path, began_with: dict[str, str], config: Config, mesh: Mesh, rows: Rows = NO_ROWS):
        """config: the `checkpoint` section; began_with: per field, the hash of a model or data that must not change.

        rows: of the run; the position in the data depends on them.
        """
        self._began_with, self._mesh, self._rows = began_with, mesh, rows
        self._best, self._every = config.keep_best, config.every
        self._accuracies: dict[int, float] = {}  # of checkpoints, by step
        # On the disk at once: those that are due, the best, one that a signal made between two of them, and a new one.
        self._at_once = config.keep + config.keep_best + (config.every > 1) + 1
        by = itemgetter("accuracy")
        policies: list[Any] = [LatestN(1), LatestDue(config.keep, config.every)]
        if config.keep_best:
            policies.append(BestN(get_metric_fn=by, n=config.keep_best, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            best_fn=by,  # without it Orbax stores no accuracy, and a resumed run could not tell the best
            preservation_policy=AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
            todelete_subdir=f"../{folder.name}{DELETED}",
            async_options=ocp.AsyncOptions(timeout_secs=COMMIT),
        )
        quieten_orbax()
        self._folder = folder.absolute()
        self._deleted = self._folder.with_name(self._folder.name + DELETED)
        self._removal: Thread | None = None
        self._delete()
        arrays = ocp.StandardCheckpointHandler()
        handlers = {"state": arrays, "waiting": arrays, "host": ocp.JsonCheckpointHandler()}
        with self._saving():
            self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)
        self._check_seen()

    def _check_seen(self) -> None:
        """Checks that all processes have found the same checkpoints. From here on Orbax keeps their list in memory.

        Otherwise each would restore the newest that it sees, go back to another one, or have another best one.
        Raises: UserError, naming one that a process lacks.
        """
        if distributed.count() == 1:
            return

        def look() -> list[str]:
            self._manager.reload()
            steps = self._manager.all_steps()
            return [*map(str, steps), *(f"{step}/metrics" for step in steps if self._manager.metrics(step))]

        remedy = "mount the disk of --workdir alike on all hosts, without a cache, and start again"
        agreement.check_seen(self._folder, look, remedy)

    def is_best(self, accuracy: float | None) -> bool:
        """Whether a checkpoint with this accuracy would be kept as one of the best."""
        best = sorted(self._accuracies.values(), reverse=True)[: self._best]
        return accuracy is not None and self._best > 0 and (len(best) < self._best or accuracy > best[-1])

    def check_room(self, state: PyTree) -> None:
        """Raises: UserError, if the disk has no room for all checkpoints of `state` that exist at once."""
        one = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        more = max(self._at_once - len(self._manager.all_steps()), 1)
        if one * more > disk.free(self._folder):
            raise UserError(
                f"{self._folder} has room for {disk.gigabytes(disk.free(self._folder))}, but {more} checkpoints of "
                f"{disk.gigabytes(one)} need {disk.gigabytes(one * more)}: make room, lower checkpoint.keep, or give "
                "another --workdir"
            )

    def save(self, step: int, states: PyTree, pending: Pending, accuracy: float | None, **host: Any) -> None:
        """Starts to save a step. Returns when the arrays are copied to the host; then they may be donated.

        host: ladders, the states of the ladders of shapes that learning uses (`shapes.Book`); rollbacks, how often the
        run has gone back.
        Raises: UserError, if the previous save failed.
        """
        waiting = [{name: float(x) for name, x in of_batch.items()} for _, of_batch in pending.batches]
        host |= {"iterator": pending.position, "began_with": self._began_with, "waiting": waiting}
        host |= {"rows": self._rows._asdict()}
        items = {"state": ocp.args.StandardSave(states), "host": ocp.args.JsonSave(host)}
        if pending.batches:
            items["waiting"] = ocp.args.StandardSave([shard_batch(arrays, self._mesh) for arrays, _ in pending.batches])
        metrics = None if accuracy is None else {"accuracy": accuracy}
        with self._saving():
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
        if accuracy is not None:
            self._accuracies[step] = accuracy

    def steps(self) -> list[int]:
        """Waits for all saves, and returns the steps of the checkpoints at multiples of `every`.

        A signal makes others: a rollback that chose one would go elsewhere than that of a run without the signal.
        Raises: UserError, if a save failed.
        """
        self.wait()
        return sorted(step for step in self._manager.all_steps() if step % self._every == 0)

    def rollbacks(self) -> int:
        """Returns how often the run had gone back when it made the newest checkpoint; 0 without one."""
        step = self._manager.latest_step()
        if step is None:
            return 0
        host = read(self._manager, step, ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        return host.get("rollbacks", 0)  # checkpoints of earlier versions have none

    def check(self) -> None:
        """Raises: UserError, if the last save failed. Does not wait for a save that is still running."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until all saves are on the disk. Raises: UserError, if a save failed."""
        with self._saving():
            self._manager.wait_until_finished()
        self._delete()

    def _delete(self) -> None:
        """Starts to remove the checkpoints that Orbax has moved out of the folder."""
        if not distributed.first() or (self._removal and self._removal.is_alive()) or not self._deleted.is_dir():
            return
        with suppress(OSError):
            moved = list(self._deleted.iterdir())
            # Under a name of its own: Orbax may delete another checkpoint of the same step before the files are gone.
            moved = [x.rename(x.with_name(f"{x.name}.{time.time_ns()}")) if x.name.isdecimal() else x for x in moved]
            if moved:
                self._removal = Thread(target=lambda: [shutil.rmtree(x, ignore_errors=True) for x in moved])
                self._removal.start()

    def latest(self) -> Path | None:
        """Path of the newest checkpoint, which may not be complete yet; None if there is none."""
        step = self._manager.latest_step()
        return None if step is None else Path(self._manager.directory) / str(step)

    def check_beginning(self, config: Config) -> tuple[int, list[Change]]:
        """Returns the newest complete step, or 0 if none, and which rows the config accepts instead of those before.

        Raises: UserError, if the run began with another model, or with other rows that the config does not accept.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0, []
        host = read(self._manager, step, ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        before = host["began_with"]
        for field, found in self._began_with.items():
            # A field that is new in the config has no hash to compare.
            if field not in SECTIONS and before.get(field, found) != found:
                raise UserError(
                    f"config.{field} holds something else than when this run began: "
                    "put that back, or give another --workdir"
                )
        changes = other_rows.check(self._folder.parent, config, self._began_with, self._rows, step, host)
        self._began_with = before | self._began_with
        return step, changes

    def resume(self, states: PyTree, before: int | None = None) -> tuple[int, PyTree, Pending | None, dict[str, Any]]:
        """Restores the newest checkpoint: step, states with the shardings of `states`, pending batches, ladders.

        states: shapes and shardings are enough. before: restores only a smaller step, and deletes all other
        checkpoints, because the run will make them again. Returns (0, None, None, {}) if there is no checkpoint.
        Raises: UserError, if the checkpoint cannot be read.
        """
        if before is not None:
            self.wait()  # a running save may be one of those to delete
            for later in [step for step in self._manager.all_steps() if step >= before]:
                self._manager.delete(later)
            self._delete()
        step = self._manager.latest_step()
        metrics: dict[int, Any] = {kept: self._manager.metrics(kept) for kept in self._manager.all_steps()}
        self._accuracies = {kept: found["accuracy"] for kept, found in metrics.items() if found}
        if step is None:
            return 0, None, None, {}
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(target), host=ocp.args.JsonRestore())
        restored = read(self._manager, step, wanted)
        waits, arrays = restored["host"]["waiting"], []
        if waits:
            place, stored = NamedSharding(self._mesh, BATCH), self._manager.item_metadata(step)["waiting"].tree
            wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), stored)
            waiting = ocp.args.Composite(waiting=ocp.args.StandardRestore(wanted))
            arrays = to_host(read(self._manager, step, waiting)["waiting"])
        host, batches = restored["host"], list(zip(arrays, waits, strict=True))
        # Checkpoints of earlier versions have no ladders.
        return step, restored["state"], self._pending(host, batches), host.get("ladders", {})

    def _pending(self, host: dict[str, Any], batches: list[tuple[dict[str, Any], dict[str, Any]]]) -> Pending | None:
        """Returns what a checkpoint has of the data, as far as it holds for the rows of today.

        With another number of rows, a position stands for other rows: None, the order begins anew. With other prompts,
        completions that wait are those of other prompts, and are dropped.
        """
        field = "data.source"
        if host["began_with"].get(field) != self._began_with.get(field):
            rows = Rows(**host["rows"]) if "rows" in host else NO_ROWS
            if rows.counts.get(field) != self._rows.counts.get(field):
                return None
            batches = batches if rows.prompts == self._rows.prompts else []
        return Pending(host["iterator"], batches)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except (jax.errors.JaxRuntimeError, UserError):  # these are not disk errors
            raise
        except Exception as error:  # disk errors: Orbax raises many types
            reason = _reason(error)
            if distributed.count() > 1 and not _of_disk(error):  # Orbax waits for the other processes
                raise UserError(
                    f"the processes could not save a checkpoint together ({reason}): see the output of the others; the "
                    "same command goes on from the last checkpoint"
                ) from error
            raise UserError(disk.cannot_write(self._folder.parent, reason)) from error

    def close(self) -> None:
        """Waits until all saves are on the disk, and closes Orbax. Raises: UserError, if a save failed."""
        with self._saving(), closing(self._manager):
            self.wait()
        if self._removal:
            self._removal.join()
        with suppress(OSError):  # not there, or not empty
            self._deleted.rmdir()


@dataclass(frozen=True)
class LatestDue(PreservationPolicy):
    """Keeps the latest `count` checkpoints at multiples of `every`: one that a signal made takes no place of theirs."""

    count: int
    every: int

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        due = [checkpoint.step for checkpoint in checkpoints if checkpoint.step % self.every == 0][-self.count :]
        return [checkpoint.step in due for checkpoint in checkpoints]


def read(manager: ocp.CheckpointManager, step: int, wanted: ocp.args.Composite) -> Any:
    """Reads the wanted items of a checkpoint. Raises: UserError, if its files cannot be read."""
    try:
        return manager.restore(step, args=wanted)
    except jax.errors.JaxRuntimeError:  # device errors, such as out of memory
        raise
    except Exception as error:  # file errors: Orbax raises many types
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"checkpoint {manager.directory / str(step)} cannot be read ({reason[:200]}): "
            "restore it, or move it away to go on from the one before it"
        ) from error


def _of_disk(error: BaseException | None) -> bool:
    """Returns whether an error, or one that led to it, is of the operating system."""
    while error and not (isinstance(error, OSError) or "OS error" in str(error)):
        error = error.__cause__ or error.__context__
    return error is not None


def _reason(error: Exception) -> str:
    """Short reason of an Orbax error: the operating system's message, if the error contains one."""
    said = " ".join(str(error).split())
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES):
        if os.strerror(number) in said:
            return os.strerror(number)
    return said[:200] or type(error).__name__


def quieten_orbax() -> None:
    """Hides the tracebacks of errors that Orbax also raises: in two loggers, and in threads of tensorstore.

    The program reports such an error in one line.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_of_orbax)
    sys.unraisablehook = _not_of_tensorstore


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname and "exception was never retrieved" not in record.getMessage()


def _not_of_tensorstore(said: sys.UnraisableHookArgs) -> None:
    """Hides the error of tensorstore writes that end after a save has failed, when the event loop is closed."""
    if str(said.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(said)
