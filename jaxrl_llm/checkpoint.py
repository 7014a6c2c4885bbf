"""The workdir and what survives a kill -9: Orbax checkpoints, log files cut back to the step resumed from."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import UserError
from jaxrl_llm.host import disk
from jaxrl_llm.structs import Config, PyTree


def check_workdir(workdir: Path, config: Config, may_change: Collection[str]) -> None:
    """may_change: fields that may differ from those of the run that is there.

    Raises: UserError, if the workdir cannot be made, is foreign, or holds a run of another config.
    """
    existing = next(folder for folder in (workdir.absolute(), *workdir.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--workdir {workdir} cannot be written ({existing} is no folder of yours): give another")
    if not workdir.exists() or all(_is_ours(file) for file in workdir.iterdir()):
        return  # new, or as good as
    file = workdir / "config.json"
    if not file.is_file():
        raise UserError(f"--workdir {workdir} is not empty and not a run of ours (no config.json): give a new folder")
    try:
        before = flatten(ConfigDict(json.loads(file.read_text())))
    except (ValueError, AttributeError):  # no JSON, or no object
        raise UserError(f"{file} is not a run's config: give another --workdir") from None
    now = flatten(ConfigDict(json.loads(_resolved(config))))
    # Names of functions come first: with another one the other fields of its section are others too.
    for name in sorted(set(before) | set(now), key=lambda name: (not name.endswith(".name"), name)):
        if before.get(name) != now.get(name) and name not in may_change:
            raise UserError(
                f"config.{name} is {now.get(name)!r}, but the run in {workdir} has {before.get(name)!r}: "
                "give another --workdir, or the run's own config"
            )


def keep_schedule(workdir: Path, config: Config) -> None:
    """Sets config.schedule_steps where it is 0: to what the run in the workdir began with, else to config.num_steps."""
    if "schedule_steps" not in config or config.schedule_steps != 0:
        return  # missing, of a wrong type, or said: `check_fields` and `check_workdir` judge it
    config.schedule_steps = config.num_steps
    with suppress(OSError, ValueError, KeyError, TypeError):  # no run, or `check_workdir` says what is wrong with it
        config.schedule_steps = json.loads((workdir / "config.json").read_text())["schedule_steps"]


def _is_ours(file: Path) -> bool:
    """What launch/tpu_vm.sh keeps in a workdir, and what a run killed before its config.json leaves there."""
    if file.name == "checkpoints":
        return file.is_dir() and not any(file.iterdir())
    return file.name.startswith(("launch.", "config.json.partial")) or file.name == disk.LOCK


def open_workdir(workdir: Path, config: Config) -> None:
    """Writes the resolved config.json into the workdir. Raises: UserError, if the disk does not take it."""
    partial = workdir / "config.json.partial"
    with disk.writing(workdir):
        partial.write_text(_resolved(config))
        os.replace(partial, workdir / "config.json")


def _resolved(config: Config) -> str:
    return json.dumps(config.to_dict(), indent=2) + "\n"


def cut_back(file: Path, step: int) -> None:
    """Drops the lines of a JSON-lines log after `step`, and one that a kill tore: they will be written again."""
    if not file.is_file():
        return
    kept = []
    *lines, _ = file.read_bytes().split(b"\n")  # what follows the last newline is torn, or nothing
    for line in lines:
        if json.loads(line)["step"] > step:
            break
        kept.append(line + b"\n")
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(b"".join(kept))
    os.replace(partial, file)


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder of `Checkpoints` holds a complete one."""
    return folder.is_dir() and bool(ocp.utils.checkpoint_steps(folder))


class Pending(NamedTuple):
    """What a checkpoint keeps of where samples come from: after it, the same ones follow."""

    position: dict[str, Any]  # of the data iterator, after the last batch here
    batches: list[tuple[dict[str, Any], dict[str, Any]]]  # arrays and metrics of each that is not yet learned from


class Checkpoints:
    """The states that learn, the data iterator and the step, saved in the background; a torn save never counts."""

    def __init__(self, folder: Path, began_with: dict[str, str], config: Config):
        """config: the `checkpoint` section; began_with: hashes by field of what the run must find as it was."""
        self._began_with = began_with
        self._most = config.keep + config.keep_best + 1  # on the disk at once: those kept, and the one being written
        by = itemgetter("accuracy")
        policies: list[Any] = [LatestN(config.keep)]
        if config.keep_best:
            policies.append(BestN(get_metric_fn=by, n=config.keep_best, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            best_fn=by,  # without it no accuracy is stored, and a resumed run would not know which one is the best
            preservation_policy=AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
        )
        quieten_orbax()
        self._folder = folder.absolute()
        with self._saving():
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def check_room(self, state: PyTree) -> None:
        """Raises: UserError, if the disk has no room for as many checkpoints of `state` as the run will hold."""
        one = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        more = max(self._most - len(self._manager.all_steps()), 1)
        if one * more > disk.free(self._folder):
            raise UserError(
                f"{self._folder} has room for {disk.gigabytes(disk.free(self._folder))}, but {more} checkpoints of "
                f"{disk.gigabytes(one)} need {disk.gigabytes(one * more)}: make room, lower checkpoint.keep, or give "
                "another --workdir"
            )

    def save(self, step: int, states: PyTree, pending: Pending, accuracy: float | None) -> None:
        """Saves a step; returns as soon as the arrays are copied, and they may be donated.

        Raises: UserError, if the save before this one failed.
        """
        metrics = [{name: float(x) for name, x in of_batch.items()} for _, of_batch in pending.batches]
        host = {"iterator": pending.position, "began_with": self._began_with, "waiting": metrics}
        items = {"state": ocp.args.StandardSave(states), "host": ocp.args.JsonSave(host)}
        if pending.batches:
            items["waiting"] = ocp.args.StandardSave([arrays for arrays, _ in pending.batches])
        accuracies = None if accuracy is None else {"accuracy": accuracy}
        with self._saving():
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=accuracies)

    def check(self) -> None:
        """Raises: UserError, if the last save has failed. It does not wait for one that is still going on."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when all that was saved is on the disk. Raises: UserError, if a save failed."""
        with self._saving():
            self._manager.wait_until_finished()

    def latest(self) -> Path | None:
        """The newest checkpoint, which may still be on its way to the disk."""
        step = self._manager.latest_step()
        return None if step is None else Path(self._manager.directory) / str(step)

    def check_beginning(self) -> int:
        """The newest complete step, 0 if there is none. Raises: UserError, if the run began from something else."""
        step = self._manager.latest_step()
        if step is None:
            return 0
        before = read(self._manager, step, ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]["began_with"]
        for field, found in self._began_with.items():
            if before.get(field, found) != found:  # what it did not have then, it may have now
                raise UserError(
                    f"config.{field} holds something else than when this run began: "
                    "put that back, or give another --workdir"
                )
        self._began_with = before | self._began_with
        return step

    def resume(self, states: PyTree, before: int | None = None) -> tuple[int, PyTree, Pending | None]:
        """The newest complete step, its states, placed as `states` are, and what was pending.

        states: shapes and shardings are enough. before: only a step below that, and later checkpoints are deleted: the
        run will make them again. (0, None, None) if there is no checkpoint. Raises: UserError, if it cannot be read.
        """
        if before is not None:
            self.wait()
            for later in [step for step in self._manager.all_steps() if step >= before]:
                self._manager.delete(later)
        step = self._manager.latest_step()
        if step is None:
            return 0, None, None
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(target), host=ocp.args.JsonRestore())
        restored = read(self._manager, step, wanted)
        metrics, arrays = restored["host"]["waiting"], []
        if metrics:
            arrays = read(self._manager, step, ocp.args.Composite(waiting=ocp.args.StandardRestore()))["waiting"]
        return step, restored["state"], Pending(restored["host"]["iterator"], list(zip(arrays, metrics, strict=True)))

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except (jax.errors.JaxRuntimeError, UserError):  # of the devices, and what is said already
            raise
        except Exception as error:  # of the disk: Orbax raises many kinds
            raise UserError(disk.cannot_write(self._folder.parent, _reason(error))) from error

    def close(self) -> None:
        """Waits until all that was saved is on the disk. Raises: UserError, if a save failed."""
        with self._saving(), closing(self._manager):
            self.wait()


def read(manager: ocp.CheckpointManager, step: int, wanted: ocp.args.Composite) -> Any:
    """The wanted items of a checkpoint. Raises: UserError, if its files cannot be read."""
    try:
        return manager.restore(step, args=wanted)
    except jax.errors.JaxRuntimeError:  # of the devices, such as their memory
        raise
    except Exception as error:  # of the files: Orbax raises many kinds
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"checkpoint {manager.directory / str(step)} cannot be read ({reason[:200]}): "
            "restore it, or move it away to go on from the one before it"
        ) from error


def _reason(error: Exception) -> str:
    """What an error of Orbax says is the matter: the system's own words, where they are in it."""
    said = " ".join(str(error).split())
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES):
        if os.strerror(number) in said:
            return os.strerror(number)
    return said[:200] or type(error).__name__


def quieten_orbax() -> None:
    """What it raises it also says in tracebacks: in two logs, and in threads of tensorstore. One line of ours does."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_of_orbax)
    sys.unraisablehook = _not_of_tensorstore


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname and "exception was never retrieved" not in record.getMessage()


def _not_of_tensorstore(said: sys.UnraisableHookArgs) -> None:
    """Its writes that end after the first one of a save has failed find no event loop."""
    if str(said.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(said)
