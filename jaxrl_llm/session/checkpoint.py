"""The checkpoints of a run, which survive a kill -9, by Orbax."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import shutil
import sys
import time
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
from jaxrl_llm.session import changes
from jaxrl_llm.session.changes import Change, Rows, is_acceptable
from jaxrl_llm.session.checksums import changed, checksums
from jaxrl_llm.session.settings import CheckpointSettings
from jaxrl_llm.structs import PartState, PyTree

NO_ROWS = Rows({}, "")
FORMAT = 3  # of checkpoints; a change that an older version cannot read gets the next number
MODELS, SAMPLES = "models", "samples"  # parts with arrays
NOTES = "notes"  # the file of JSON
# Seconds after which a save in the background fails, and with it the run. Orbax's 20 minutes are too few for a slow
# bucket, and it measures them by the clock of the host, which may be set forward.
COMMIT = 6 * 3600
COMMITTED = "commit_success.txt"  # of Orbax: in a bucket, where nothing is renamed, it marks a complete checkpoint
DELETED = ".deleted"  # behind the folder's name: where checkpoints are that are being deleted


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder of `Checkpoints` holds a complete checkpoint."""
    return folder.is_dir() and bool(ocp.utils.checkpoint_steps(folder))


class Checkpoints:
    """Saves {part: state} in the background: arrays under the name of the part, and all notes in one file of JSON.

    A torn save is never a checkpoint. Neither is one whose deletion was cut off: it has left the folder before.
    """

    def __init__(
        self,
        folder: Path,
        began_with: dict[str, str],
        settings: CheckpointSettings,
        mesh: Mesh,
        rows: Rows = NO_ROWS,
        *,
        goes_back: bool = False,
        check_lock: Callable[[], None] = lambda: None,
    ):
        """began_with: per field, the hash of a model or data that must not change.

        rows: rows of the run, on which the position in the data depends. goes_back: whether a health rule may send the
        run back to a checkpoint. check_lock: called before a checkpoint in a bucket counts; raises: UserError, if
        another process has taken the lock of the work directory.
        """
        self._began_with, self._mesh, self._rows = began_with, mesh, rows
        self._settings, self._goes_back = settings, goes_back
        self.accuracies: dict[int, float] = {}  # accuracy of each evaluation in the log, by step: ranks the checkpoints
        self._in_bucket = bool(bucket.address(folder))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=KeptCheckpoints(self._select),
            cleanup_tmp_directories=True,
            todelete_subdir=f"../{folder.name}{DELETED}",
            async_options=ocp.AsyncOptions(timeout_secs=COMMIT),
            temporary_path_class=_committed_after(check_lock) if self._in_bucket else None,
        )
        quieten_orbax()
        self._folder = folder if self._in_bucket else folder.absolute()
        self._deleted = self._folder.with_name(self._folder.name + DELETED)
        self._removal: Thread | None = None
        self._delete()
        arrays = ocp.StandardCheckpointHandler()
        handlers = {MODELS: arrays, SAMPLES: arrays, NOTES: ocp.JsonCheckpointHandler()}
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
            with suppress(FileNotFoundError):  # a bucket has no folder without an object
                self._manager.reload()
            return [*map(str, self._manager.all_steps())]

        remedy = "mount the disk of --workdir alike on all hosts, without a cache, and start again"
        agreement.check_seen(self._folder, look, remedy)

    def _select(self, steps: Sequence[int]) -> set[int]:
        return kept_steps(steps, self.accuracies, self._settings, goes_back=self._goes_back)

    def is_best(self, accuracy: float | None) -> bool:
        """Whether a checkpoint with this accuracy would be kept as one of the best."""
        count = self._settings.keep_best
        best = best_steps(self._manager.all_steps(), self.accuracies, count)
        return accuracy is not None and count > 0 and (len(best) < count or accuracy > self.accuracies[best[-1]])

    def check_room(self, state: PyTree, num_steps: int) -> None:
        """Raises: UserError, if the disk has no room for all checkpoints of `state` that exist at once."""
        if self._in_bucket:
            return
        one = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        settings, saves = self._settings, num_steps // self._settings.every
        # The latest and the best, one that a signal made between two of them, a new one, and those far back.
        at_once = settings.keep + settings.keep_best + (settings.every > 1) + 1 + self._goes_back * saves.bit_length()
        more = max(at_once - len(self._manager.all_steps()), 1)
        if one * more > disk.free(self._folder):
            raise UserError(
                f"{self._folder} has room for {disk.gigabytes(disk.free(self._folder))}, but {more} checkpoints of "
                f"{disk.gigabytes(one)} need {disk.gigabytes(one * more)}: make room, lower checkpoint.keep, or give "
                "another --workdir"
            )

    def save(self, step: int, parts: Mapping[str, PartState], *, attempt: int = 0) -> None:
        """Starts to save a step. Returns when the arrays are copied to the host; then they may be donated.

        parts: MODELS, SAMPLES and others without arrays. attempt: how often the run has gone back.
        Raises: UserError, if the previous save failed.
        """
        notes = {"format": FORMAT, "attempt": attempt, "began_with": self._began_with, "rows": self._rows._asdict()}
        notes["parts"] = {name: part.notes for name, part in parts.items()}
        notes["checksums"] = {name: checksums(part.arrays) for name, part in parts.items()}
        items: dict[str, Any] = {name: ocp.args.StandardSave(x.arrays) for name, x in parts.items() if x.arrays}
        with self._saving():
            self._manager.save(step, args=ocp.args.Composite(**items, notes=ocp.args.JsonSave(notes)))

    def steps(self) -> list[int]:
        """Waits for all saves, and returns the steps of the best checkpoints and of those at multiples of `every`.

        A signal makes others: a rollback that chose one would go elsewhere than that of a run without the signal.
        Raises: UserError, if a save failed.
        """
        self.wait()
        steps, every = self._manager.all_steps(), self._settings.every
        best = best_steps(steps, self.accuracies, self._settings.keep_best)
        return sorted({*best, *(step for step in steps if step % every == 0)})

    def attempt(self) -> int:
        """Returns how often the run had gone back when it made the newest checkpoint; 0 without one."""
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
        self._delete()

    def _delete(self) -> None:
        """Starts to remove the checkpoints that Orbax has moved out of the folder."""
        if self._in_bucket or not distributed.first() or (self._removal and self._removal.is_alive()):
            return
        if not self._deleted.is_dir():
            return
        with suppress(OSError):
            moved = list(self._deleted.iterdir())
            # Each folder gets a unique name, because Orbax may delete another checkpoint of this step before
            # the files are gone.
            moved = [x.rename(x.with_name(f"{x.name}.{time.time_ns()}")) if x.name.isdecimal() else x for x in moved]
            if moved:
                self._removal = Thread(target=lambda: [shutil.rmtree(x, ignore_errors=True) for x in moved])
                self._removal.start()

    def latest(self) -> str:
        """Says which checkpoint is the newest, for an error. It may not be complete yet."""
        step = self._manager.latest_step()
        folder = self._manager.directory
        return "there is no checkpoint" if step is None else f"the last checkpoint is {folder / str(step)}"

    def check_beginning(self, fields: Mapping[str, Any]) -> tuple[int, list[Change]]:
        """Returns the newest complete step, or 0 if none, and the changes of rows and code that the config accepts.

        fields: fields of the config.
        Raises: UserError, if the run began with another model, or with rows or code that the config does not accept.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0, []
        notes = read_notes(self._manager, step)
        before = notes["began_with"]
        for field, digest in self._began_with.items():
            # A field that is new in the config has no hash to compare.
            if not is_acceptable(field) and before.get(field, digest) != digest:
                raise UserError(
                    f"config.{field} holds something else than when this run began: "
                    "put that back, or give another --workdir"
                )
        accepted = changes.check(self._folder.parent, fields, self._began_with, self._rows, step, notes)
        self._began_with = before | self._began_with
        return step, accepted

    def go_back(self, step: int) -> None:
        """Deletes the checkpoints after `step`: the run will make them again. Raises: UserError, if a save failed."""
        self.wait()  # a running save may be one of those to delete
        self._drop([saved for saved in self._manager.all_steps() if saved > step])

    def tidy(self) -> None:
        """Deletes the checkpoints that are not kept. Only an evaluation after the last save leaves one.

        Raises: UserError, if a save failed.
        """
        self.wait()
        steps = self._manager.all_steps()
        self._drop([step for step in steps if step not in self._select(steps)])

    def tidy_bucket(self) -> None:
        """Deletes, in a bucket, the checkpoints that are not kept: a killed run may have deleted a part of one.

        Raises: UserError, if a save failed.
        """
        if self._in_bucket:
            self.tidy()

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            if self._in_bucket and distributed.first():
                # Without this file a checkpoint does not count. Orbax would delete it in any order with the others.
                (self._folder / str(step) / COMMITTED).unlink(missing_ok=True)
            self._manager.delete(step)
        self._delete()

    def resume(self, models: PyTree) -> tuple[int, dict[str, PartState]]:
        """Restores the newest checkpoint: its step, and the state of each part; (0, {}): there is none.

        models: the arrays of MODELS, as shapes with shardings. Raises: UserError, if the checkpoint cannot be read.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0, {}
        notes = read_notes(self._manager, step)
        shapes = {MODELS: jax.tree.map(ocp.utils.to_shape_dtype_struct, models)}
        # Batches that wait for their update keep their saved shapes, and are placed on this run's devices.
        with reading(self._manager, step):
            stored = self._manager.item_metadata(step)
        if stored.get(SAMPLES):
            place = NamedSharding(self._mesh, BATCH)

            def placed(x: Any) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

            shapes[SAMPLES] = jax.tree.map(placed, stored[SAMPLES].tree)
        arrays = read(self._manager, step, {name: ocp.args.StandardRestore(x) for name, x in shapes.items()})
        for name, restored in arrays.items():
            check_unchanged(self._manager, step, restored, notes["checksums"][name])
        parts = {name: PartState(kept, arrays.get(name)) for name, kept in notes["parts"].items()}
        return step, self._of_these_rows(notes, parts)

    def _of_these_rows(self, notes: dict[str, Any], parts: dict[str, PartState]) -> dict[str, PartState]:
        """Returns the parts without what does not hold for the rows of today.

        With another number of rows, a position stands for other rows: the order begins anew. With other prompts,
        completions that wait are those of other prompts, and are dropped.
        """
        field, saved = "data.source", Rows(**notes["rows"])
        if notes["began_with"].get(field) == self._began_with.get(field):
            return parts
        if saved.counts.get(field) != self._rows.counts.get(field):
            return {name: part for name, part in parts.items() if name != SAMPLES}
        samples = parts[SAMPLES] if saved.prompts == self._rows.prompts else parts[SAMPLES]._replace(arrays=None)
        return parts | {SAMPLES: samples}

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
            if self._in_bucket:
                # The config was written there, so another try may succeed.
                raise PeerLost(
                    f"{self._folder} cannot be written ({reason}): check the network and your access; the same command "
                    "resumes from the last checkpoint"
                ) from error
            raise UserError(disk.cannot_write(self._folder.parent, reason)) from error

    def close(self) -> None:
        """Waits until all saves are on the disk, and closes Orbax. Raises: UserError, if a save failed."""
        with self._saving(), closing(self._manager):
            self.wait()
        if self._removal:
            self._removal.join()
        with suppress(OSError):  # not there, or not empty
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
    """Returns the `count` steps with the highest accuracies, the best first, and of equal ones the older first."""
    return sorted((step for step in steps if step in accuracies), key=lambda step: (-accuracies[step], step))[:count]


def kept_steps(
    steps: Sequence[int], accuracies: Mapping[int, float], settings: CheckpointSettings, *, goes_back: bool
) -> set[int]:
    """Returns the steps of the newest checkpoint, of the due checkpoints and of the best checkpoints, which all stay.

    In a run that may go back, two multiples of `every`, of twice `every`, and so on stay too: their ages double.
    A checkpoint that a signal made between two multiples of `every` takes no place.
    """
    due = [step for step in steps if step % settings.every == 0]
    selected = {*steps[-1:], *due[-settings.keep :], *best_steps(steps, accuracies, settings.keep_best)}
    distance = settings.every
    while goes_back and due and distance <= due[-1]:
        selected |= {*[step for step in due if step % distance == 0][-2:]}
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
            f"checkpoint {_folder(manager, step)} has format {notes['format']}, and this version of "
            f"jaxrl_llm reads format {FORMAT}: go on with the version that began the run, or begin a new one with "
            "model.path = WORKDIR/hf"
        )
    return notes


def read(manager: ocp.CheckpointManager, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
    """Reads items of a checkpoint: {name: arguments of its restore}. Raises: UserError, if a file cannot be read."""
    with reading(manager, step):
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    return dict(restored)


@contextmanager
def reading(manager: ocp.CheckpointManager, step: int) -> Iterator[None]:
    """Turns the errors of files of a checkpoint into a UserError."""
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
    """Raises: UserError, if arrays of a checkpoint have other checksums than when they were saved."""
    if others := changed(arrays, saved):
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise UserError(
            f"checkpoint {_folder(manager, step)} has other numbers than were saved, in {others[0]}{more}: files have "
            f"changed; {_remedy(manager, step)}"
        )


def _folder(manager: ocp.CheckpointManager, step: int) -> str:
    return f"{manager.directory}/{step}"


def _remedy(manager: ocp.CheckpointManager, step: int) -> str:
    before = max((saved for saved in manager.all_steps() if saved < step), default=0)
    return f"restore it from a copy, or move it away to go on from {f'step {before}' if before else 'the start'}"


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
