"""Writes and restores the checkpoints of a run with Orbax. A run that is killed by kill -9 keeps its checkpoints."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint.path import atomicity

from jaxrl_llm.errors import PeerLost, UserError
from jaxrl_llm.machine import bucket, disk, distributed
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.machine.sharding import BATCH
from jaxrl_llm.session import alike, changes
from jaxrl_llm.session.changes import Change, ChangedInputs, Rows, is_acceptable
from jaxrl_llm.session.checksums import changed, checksums
from jaxrl_llm.session.settings import CheckpointSettings
from jaxrl_llm.structs import PartState, PyTree

NO_ROWS = Rows({}, "")  # default of `Checkpoints`, for checkpoints that depend on no data rows
FORMAT = 3  # version of the checkpoint format, which grows with each change that older versions cannot read
MODELS, SAMPLES = "models", "samples"  # names of the parts that have arrays
NOTES = "notes"  # name of the JSON file of a checkpoint
# Empty file beside the folder of checkpoints, which is written when the first checkpoint is complete. If a run has this
# file but no checkpoint, its checkpoints are lost. Without the file, it was killed before its first checkpoint.
SAVED = "checkpoints.saved"
# Seconds after which a save in the background fails, and with it the run. Orbax's 20 minutes are too few for a slow
# bucket, and it measures them by the clock of the host, which may be set forward.
SAVE_TIMEOUT = 6 * 3600
# File with which Orbax marks a complete checkpoint in a bucket, because a bucket cannot rename a folder.
COMMIT_MARK = "commit_success.txt"
DELETED_SUFFIX = ".deleted"  # suffix of the folder in which checkpoints wait for their deletion
MIN_SLICE_BYTES = 2**22  # an array is divided among the devices that hold copies of it only if each saves this much


def has_checkpoint(folder: Path) -> bool:
    """Returns whether a folder of `Checkpoints` holds a complete checkpoint."""
    return folder.is_dir() and bool(ocp.utils.checkpoint_steps(folder))


class Checkpoints:
    """Saves the states of a run's parts in the background, and restores them.

    The arrays of each part are stored under its name, and the notes of all parts in one JSON file. An interrupted save
    never counts as a checkpoint. Nor does an interrupted deletion, which moves the checkpoint out of the folder first.
    """

    def __init__(
        self,
        folder: Path,
        input_hashes: dict[str, str],
        settings: CheckpointSettings,
        mesh: Mesh,
        rows: Rows = NO_ROWS,
        *,
        goes_back: bool = False,
        check_lock: Callable[[], None] = lambda: None,
    ):
        """input_hashes: hash of each model and data source that must not change, by config field.

        rows: rows of the run, on which the position in the data depends. goes_back: True if a health rule may roll
        the run back to a checkpoint. check_lock: function that is called before a checkpoint in a bucket counts, and
        raises UserError if another process has taken the lock of the work directory.
        """
        self._input_hashes, self._mesh, self._rows = input_hashes, mesh, rows
        self._settings, self._goes_back = settings, goes_back
        self.accuracies: dict[int, float] = {}  # step -> accuracy of its evaluation, by which checkpoints are ranked
        self._in_bucket = bool(bucket.address(folder))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=KeptCheckpoints(self._steps_to_keep),
            cleanup_tmp_directories=True,
            todelete_subdir=f"../{folder.name}{DELETED_SUFFIX}",
            async_options=ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT),
            temporary_path_class=_committed_after(check_lock) if self._in_bucket else None,
        )
        quieten_orbax()
        save_small_arrays_whole()
        self._folder = folder if self._in_bucket else folder.absolute()
        self._deleted = self._folder.with_name(self._folder.name + DELETED_SUFFIX)
        self._removals: list[Thread] = []  # threads that delete checkpoints now
        self._is_marked = False  # whether this process has written the file SAVED
        self._start_removal()
        arrays = ocp.StandardCheckpointHandler()
        handlers = {MODELS: arrays, SAMPLES: arrays, NOTES: ocp.JsonCheckpointHandler()}
        with self._saving():
            self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)
        self._check_listing()

    def _check_listing(self) -> None:
        """Checks that all processes list the same checkpoints, because each would restore the newest of its own list.

        Afterwards Orbax keeps the list in memory. Raises: UserError, naming a checkpoint that a process does not see.
        """
        if distributed.count() == 1:
            return

        def list_steps() -> list[str]:
            with suppress(FileNotFoundError):  # a bucket has no folder without an object
                self._manager.reload()
            return [*map(str, self._manager.all_steps())]

        remedy = "mount the disk of --workdir in the same way on all hosts, without a cache, and start the run again"
        agreement.check_same_listing(self._folder, list_steps, remedy)

    def _steps_to_keep(self, steps: Sequence[int]) -> set[int]:
        return kept_steps(steps, self.accuracies, self._settings, goes_back=self._goes_back)

    def is_best(self, accuracy: float | None) -> bool:
        """Returns whether a checkpoint with this accuracy would be kept as one of the best."""
        count = self._settings.keep_best
        best = best_steps(self._manager.all_steps(), self.accuracies, count)
        return accuracy is not None and count > 0 and (len(best) < count or accuracy > self.accuracies[best[-1]])

    def check_room(self, state: PyTree, num_steps: int) -> None:
        """Raises: UserError, if the disk has less free space than the checkpoints of `state` need at the same time."""
        if self._in_bucket or not self._settings.keep:  # a replay keeps none
            return
        checkpoint_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        settings, saves = self._settings, num_steps // self._settings.every
        # These checkpoints exist at the same time: the latest and the best ones, one that a signal made, one that is
        # being written, and older ones for rollbacks.
        peak_count = (
            settings.keep + settings.keep_best + (settings.every > 1) + 1 + self._goes_back * saves.bit_length()
        )
        needed_count = max(peak_count - len(self._manager.all_steps()), 1)
        if checkpoint_bytes * needed_count > disk.free(self._folder):
            raise UserError(
                f"--workdir: the disk of {self._folder} has {disk.gigabytes(disk.free(self._folder))} free, but "
                f"{needed_count} checkpoints of {disk.gigabytes(checkpoint_bytes)} need "
                f"{disk.gigabytes(checkpoint_bytes * needed_count)}: free disk space, lower config.checkpoint.keep, or "
                "use another --workdir"
            )

    def save(self, step: int, parts: Mapping[str, PartState], *, attempt: int = 0) -> None:
        """Starts to save a step. Returns when the arrays are copied to the host, after which they may be donated.

        parts: states by part name; only MODELS and SAMPLES have arrays. attempt: number of rollbacks so far.
        Raises: UserError, if the previous save failed.
        """
        # The notes identify the inputs of the run, so that a resumed run can check that its own inputs are equal.
        notes = {"format": FORMAT, "attempt": attempt, "began_with": self._input_hashes, "rows": self._rows._asdict()}
        notes["machine"] = alike.machine()
        notes["parts"] = {name: part.notes for name, part in parts.items()}
        notes["checksums"] = {name: checksums(part.arrays) for name, part in parts.items()}
        items: dict[str, Any] = {
            name: ocp.args.StandardSave(part.arrays) for name, part in parts.items() if part.arrays
        }
        with self._saving():
            self._manager.save(step, args=ocp.args.Composite(**items, notes=ocp.args.JsonSave(notes)))

    def steps(self) -> list[int]:
        """Waits for all saves, and returns the steps to which a rollback may go.

        A rollback may go to the best checkpoints and to the checkpoints at multiples of `every`. Checkpoints that a
        signal made are left out, because a run without the signal would not have these checkpoints.
        Raises: UserError, if a save failed.
        """
        self.wait()
        steps, interval = self._manager.all_steps(), self._settings.every
        best = best_steps(steps, self.accuracies, self._settings.keep_best)
        return sorted({*best, *(step for step in steps if step % interval == 0)})

    def attempt(self) -> int:
        """Returns the number of rollbacks before the newest checkpoint was made; 0 without a checkpoint."""
        step = self._manager.latest_step()
        return 0 if step is None else read_notes(self._manager, step)["attempt"]

    def check(self) -> None:
        """Raises: UserError, if the last save failed. Does not wait for a save that is still running."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until all saves are on the disk. Raises: UserError, if a save failed."""
        with self._saving():
            self._manager.wait_until_finished()
            if not self._is_marked and distributed.first() and self._manager.latest_step() is not None:
                (self._folder.parent / SAVED).write_text("")
                self._is_marked = True
        self._start_removal()

    def _start_removal(self) -> None:
        """Starts a thread that deletes the checkpoints which Orbax has moved into the folder of deleted checkpoints."""
        if self._in_bucket or not distributed.first() or not self._deleted.is_dir():
            return
        self._removals = [thread for thread in self._removals if thread.is_alive()]
        with suppress(OSError):
            folders: list[Path] = []
            for folder in self._deleted.iterdir():
                if folder.name.isdecimal():
                    # Orbax names the folder by its step. The folder gets a unique name, because after a rollback Orbax
                    # may move another checkpoint of this step here, and refuses to replace a folder.
                    folders.append(folder.rename(folder.with_name(f"{folder.name}.{time.time_ns()}")))
                elif not self._removals:
                    # No thread deletes this folder, so a process that was killed has left it.
                    folders.append(folder)
            if folders:
                thread = Thread(target=lambda: [shutil.rmtree(folder, ignore_errors=True) for folder in folders])
                thread.start()
                self._removals.append(thread)

    def latest(self) -> str:
        """Returns text that names the newest checkpoint in an error. The checkpoint may not be complete yet."""
        step = self._manager.latest_step()
        folder = self._manager.directory
        return "the run has no checkpoint" if step is None else f"the last checkpoint is {folder / str(step)}"

    def check_beginning(self, fields: Mapping[str, Any]) -> tuple[int, list[Change]]:
        """Returns the step of the newest checkpoint, 0 without one, and the changed rows and code that the run accepts.

        fields: flat fields of the config.
        Raises: UserError, if the run began with another model, or with rows or code that the config does not accept.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0, []
        notes = read_notes(self._manager, step)
        accepted = self.check_inputs(fields, step, notes)
        self._input_hashes = notes["began_with"] | self._input_hashes
        return step, accepted

    def check_inputs(self, fields: Mapping[str, Any], step: int, notes: Mapping[str, Any]) -> list[Change]:
        """Returns the changed rows and code since a checkpoint, which the config accepts.

        fields: flat fields of the config. notes: notes of the checkpoint of `step`. Raises: ChangedInputs, if the run
        began with another model, or with rows or code that the config does not accept.
        """
        saved_hashes = notes["began_with"]
        for field, digest in self._input_hashes.items():
            # A field that is new in the config has no hash to compare.
            if not is_acceptable(field) and saved_hashes.get(field, digest) != digest:
                raise ChangedInputs(
                    f"config.{field}: the files have other content than when this run started",
                    "restore the old content, or use another --workdir",
                )
        return changes.check(
            workdir=self._folder.parent,
            fields=fields,
            hashes=self._input_hashes,
            rows=self._rows,
            step=step,
            notes=notes,
        )

    def go_back(self, step: int) -> None:
        """Deletes the checkpoints after `step`, because the run repeats these steps.

        Raises: UserError, if a save failed.
        """
        self.wait()  # because a running save may be one of the checkpoints to delete
        self._remove_steps([saved for saved in self._manager.all_steps() if saved > step])

    def tidy(self) -> None:
        """Deletes the checkpoints that need not be kept, after the last evaluation has changed which ones are best.

        Raises: UserError, if a save failed.
        """
        self.wait()
        steps = self._manager.all_steps()
        self._remove_steps([step for step in steps if step not in self._steps_to_keep(steps)])

    def tidy_bucket(self) -> None:
        """Deletes, as `tidy`, the checkpoints that need not be kept, if the run is in a bucket; else does nothing.

        In a bucket, a run that was killed while it deleted a checkpoint leaves some of its files.

        Raises: UserError, if a save failed.
        """
        if self._in_bucket:
            self.tidy()

    def _remove_steps(self, steps: Iterable[int]) -> None:
        """Deletes the checkpoints of these steps."""
        for step in steps:
            if self._in_bucket and distributed.first():
                # The file COMMIT_MARK is deleted first, because a checkpoint without it does not count. Orbax deletes
                # the other files in any order.
                (self._folder / str(step) / COMMIT_MARK).unlink(missing_ok=True)
            self._manager.delete(step)
        self._start_removal()

    def resume(self, models: PyTree) -> tuple[int, dict[str, PartState]]:
        """Restores the newest checkpoint. Returns its step and the state of each part, or (0, {}) without a checkpoint.

        models: shapes with shardings of the arrays of MODELS. Raises: UserError, if the checkpoint cannot be read.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0, {}
        notes = read_notes(self._manager, step)
        # Orbax needs the shape and sharding of each array. The models take the shardings of this run.
        shapes = {MODELS: jax.tree.map(ocp.utils.to_shape_dtype_struct, models)}
        # Batches that were sampled ahead keep their saved shapes, and are placed on this run's devices.
        with reading(self._manager, step):
            saved_shapes = self._manager.item_metadata(step)
        if saved_shapes.get(SAMPLES):
            batch_sharding = NamedSharding(self._mesh, BATCH)

            def place_batch(array: Any) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=batch_sharding)

            shapes[SAMPLES] = jax.tree.map(place_batch, saved_shapes[SAMPLES].tree)
        arrays = read(self._manager, step, {name: ocp.args.StandardRestore(tree) for name, tree in shapes.items()})
        for name, restored in arrays.items():
            check_unchanged(self._manager, step, restored, notes["checksums"][name])
        parts = {name: PartState(part_notes, arrays.get(name)) for name, part_notes in notes["parts"].items()}
        return step, self._fit_to_rows(notes, parts)

    def _fit_to_rows(self, notes: dict[str, Any], parts: dict[str, PartState]) -> dict[str, PartState]:
        """Returns the parts without the state that does not fit the rows of this process, if rows have changed.

        If the number of rows differs, the position in the data is dropped, because it would point to other rows. If
        the prompts differ, the completions that were sampled ahead are dropped.
        """
        field, saved_rows = "data.source", Rows(**notes["rows"])
        if notes["began_with"].get(field) == self._input_hashes.get(field):
            return parts
        if saved_rows.counts.get(field) != self._rows.counts.get(field):
            return {name: part for name, part in parts.items() if name != SAMPLES}
        samples = parts[SAMPLES] if saved_rows.prompts == self._rows.prompts else parts[SAMPLES]._replace(arrays=None)
        return parts | {SAMPLES: samples}

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Turns an error of saving into a UserError, or into PeerLost if another try may succeed."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, UserError):  # neither type is a disk error
            raise
        except Exception as error:  # disk errors: Orbax raises many types
            reason = _reason(error)
            if distributed.count() > 1 and not _is_disk_error(error):  # Orbax waits for the other processes
                raise UserError(
                    f"--workdir {self._folder.parent}: the processes could not save a checkpoint together ({reason}): "
                    "see the output of the other processes; the same command resumes from the last checkpoint"
                ) from error
            if self._in_bucket:
                # Another try may succeed, because the config was written to this bucket before.
                raise PeerLost(
                    f"{self._folder} cannot be written ({reason}): check the network and your access; the same command "
                    "resumes from the last checkpoint"
                ) from error
            raise UserError(disk.cannot_write(self._folder.parent, reason)) from error

    def close(self) -> None:
        """Waits until all saves are on the disk, and closes Orbax. Raises: UserError, if a save failed."""
        with self._saving(), closing(self._manager):
            self.wait()
        for thread in self._removals:
            thread.join()
        with suppress(OSError):  # the folder does not exist, or is not empty
            if not self._in_bucket:
                self._deleted.rmdir()


def _committed_after(check_lock: Callable[[], None]) -> type[atomicity.CommitFileTemporaryPath]:
    """Returns the class of checkpoints that count only if `check_lock` passes.

    A process that was stopped in a save may have lost the lock, and the new owner has deleted a part of the checkpoint.
    """

    class CheckedPath(atomicity.CommitFileTemporaryPath):
        async def finalize(self) -> None:
            await asyncio.to_thread(check_lock)
            await super().finalize()

    return CheckedPath


def best_steps(steps: Iterable[int], accuracies: Mapping[int, float], count: int) -> list[int]:
    """Returns the `count` steps with the highest accuracies, the best first.

    Of two steps with equal accuracies the older one comes first.
    """
    return sorted((step for step in steps if step in accuracies), key=lambda step: (-accuracies[step], step))[:count]


def kept_steps(
    steps: Sequence[int], accuracies: Mapping[int, float], settings: CheckpointSettings, *, goes_back: bool
) -> set[int]:
    """Returns the steps of the checkpoints to keep: the newest, the last `keep` multiples of `every`, and the best.

    A run that may roll back also keeps the last two multiples of `every`, of twice `every`, of four times `every` and
    so on. Checkpoints that a signal made between two multiples of `every` do not count toward `keep`.
    """
    due_steps = [step for step in steps if step % settings.every == 0]  # without checkpoints that a signal made
    selected = {*steps[-1:], *due_steps[-settings.keep :], *best_steps(steps, accuracies, settings.keep_best)}
    # Rollbacks need old checkpoints. Doubling the distance keeps few of them, yet reaches back far.
    distance = settings.every
    while goes_back and due_steps and distance <= due_steps[-1]:
        selected |= {*[step for step in due_steps if step % distance == 0][-2:]}
        distance *= 2
    return selected


@dataclass(frozen=True)
class KeptCheckpoints(managers.PreservationPolicy):
    """Keeps the checkpoints whose steps `select` returns."""

    select: Callable[[Sequence[int]], set[int]]

    def should_preserve(
        self, checkpoints: Sequence[managers.PolicyCheckpointInfo], *, context: managers.PreservationContext
    ) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        return [step in self.select(steps) for step in steps]


def read_notes(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """Reads the notes of a checkpoint. Raises: UserError, if another version made it, or its file cannot be read."""
    notes = read(manager, step, {NOTES: ocp.args.JsonRestore()})[NOTES]
    if notes["format"] != FORMAT:
        raise UserError(
            f"checkpoint {_folder(manager, step)} has format {notes['format']}, but this version of jaxrl_llm reads "
            f"format {FORMAT}: resume with the version that started the run, or start a new run with "
            "config.model.path = WORKDIR/hf"
        )
    return notes


def read(manager: ocp.CheckpointManager, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
    """Reads items of a checkpoint. items: arguments of Orbax's restore by name. Raises: UserError, if a read fails."""
    with reading(manager, step):
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    return dict(restored)


@contextmanager
def reading(manager: ocp.CheckpointManager, step: int) -> Iterator[None]:
    """Turns errors in reading a checkpoint's files into a UserError."""
    try:
        yield
    except jax.errors.JaxRuntimeError:  # device errors, such as out of memory
        raise
    except Exception as error:  # file errors: Orbax raises many types
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"checkpoint {_folder(manager, step)} cannot be read ({reason[:200]}): {_remedy(manager, step)}"
        ) from error


def check_unchanged(manager: ocp.CheckpointManager, step: int, arrays: PyTree, saved: Mapping[str, int]) -> None:
    """Raises: UserError, if restored arrays have other checksums than the saved ones."""
    if changed_arrays := changed(arrays, saved):
        further = f" and {len(changed_arrays) - 1} more" if changed_arrays[1:] else ""
        raise UserError(
            f"checkpoint {_folder(manager, step)} is damaged: the numbers of {changed_arrays[0]}{further} differ from "
            f"those that were saved: {_remedy(manager, step)}"
        )


def _folder(manager: ocp.CheckpointManager, step: int) -> str:
    return f"{manager.directory}/{step}"


def _remedy(manager: ocp.CheckpointManager, step: int) -> str:
    previous_step = max((saved for saved in manager.all_steps() if saved < step), default=0)
    resume_point = f"resume from step {previous_step}" if previous_step else "start the run from step 0"
    return f"restore the checkpoint from a backup, or move it away to {resume_point}"


def _is_disk_error(error: BaseException | None) -> bool:
    """Returns whether an error, or an error that caused it, comes from the operating system."""
    while error and not (isinstance(error, OSError) or "OS error" in str(error)):
        error = error.__cause__ or error.__context__
    return error is not None


def _reason(error: Exception) -> str:
    """Returns the short reason of an Orbax error: the operating system's message, if the error contains one."""
    message = " ".join(str(error).split())
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES):
        if os.strerror(number) in message:
            return os.strerror(number)
    return message[:200] or type(error).__name__


def save_small_arrays_whole() -> None:
    """Lets Orbax divide only large arrays among the devices that hold copies of them, to compile fewer programs.

    Orbax compiles a program for each part of an array. Five small arrays on eight devices took 40 programs, which
    `tests/session/test_stop.py` counts.
    """
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


def quieten_orbax() -> None:
    """Hides what Orbax and tensorstore's threads print after an error, because this package reports the errors."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_from_orbax)
    sys.unraisablehook = _report_unless_tensorstore
    # A full disk ends the gathering of a save's writes, of which some have not begun.
    warnings.filterwarnings("ignore", "coroutine '.*write_fragment' was never awaited", RuntimeWarning)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname and "exception was never retrieved" not in record.getMessage()


def _report_unless_tensorstore(unraisable: sys.UnraisableHookArgs) -> None:
    """Hides the error of tensorstore writes that end after a save has failed, when the event loop is closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
