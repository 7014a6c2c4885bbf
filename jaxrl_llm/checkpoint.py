"""The workdir and what survives a kill -9: Orbax checkpoints, log files cut back to the step resumed from."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxrl_llm.config import flatten
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Config, PyTree

# Fields that a resumed run may change: they do not change the run's numbers beyond rounding,
# are there to be changed (num_steps), or are checked by what they hold (model.path).
FREE = (
    "num_steps",
    "deterministic",
    "health.",
    "microbatch",
    "mesh.",
    "model.path",
    "teacher.path",
    "model.remat",
    "checkpoint.",
    "log.",
    "eval.every",
    "reward.timeout",
    "rollout.managed",
    "rollout.python",
    "rollout.server",
    "rollout.push",
    "rollout.weights_dir",
    "rollout.concurrency",
    "rollout.timeout",
    "rollout.patience",
    "rollout.canary_gap",
)


def check_workdir(workdir: Path, config: Config) -> None:
    """Raises: UserError, if the workdir cannot be made, is foreign, or holds a run of another config."""
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
    for name in sorted(set(before) | set(now)):
        if before.get(name) != now.get(name) and not name.startswith(FREE):
            raise UserError(
                f"config.{name} is {now.get(name)!r}, but the run in {workdir} has {before.get(name)!r}: "
                "give another --workdir, or the run's own config"
            )


def _is_ours(file: Path) -> bool:
    """What launch/tpu_vm.sh keeps in a workdir, and what a run killed before its config.json leaves there."""
    if file.name == "checkpoints":
        return file.is_dir() and not any(file.iterdir())
    return file.name.startswith(("launch.", "config.json.partial"))


def open_workdir(workdir: Path, config: Config) -> None:
    """Makes the workdir and writes the resolved config.json into it."""
    workdir.mkdir(parents=True, exist_ok=True)
    partial = workdir / "config.json.partial"
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


class Checkpoints:
    """Policy, optimiser, data iterator and step, saved in the background; a torn save never counts."""

    def __init__(self, folder: Path, began_with: dict[str, str], config: Config):
        """config: the `checkpoint` section; began_with: hashes by field of what the run must find as it was."""
        self._began_with = began_with
        policies: list[Any] = [LatestN(config.keep)]
        if config.keep_best:
            by = itemgetter("accuracy")
            policies.append(BestN(get_metric_fn=by, n=config.keep_best, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(policies), cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(
        self, step: int, state: PyTree, iterator: grain.DatasetIterator, accuracy: float | None,
        waiting: Sequence[tuple[dict[str, Any], dict[str, Any]]] = (),
    ) -> None:  # fmt: skip
        """Saves a step; returns as soon as the arrays are copied, and they may be donated.

        waiting: arrays and metrics of each batch that was sampled and is not yet learned from.
        """
        metrics = [{name: float(x) for name, x in of_batch.items()} for _, of_batch in waiting]
        host = {"iterator": iterator.get_state(), "began_with": self._began_with, "waiting": metrics}
        items = {"state": ocp.args.StandardSave(state), "host": ocp.args.JsonSave(host)}
        if waiting:
            items["waiting"] = ocp.args.StandardSave([arrays for arrays, _ in waiting])
        accuracies = None if accuracy is None else {"accuracy": accuracy}
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=accuracies)

    def latest(self) -> Path | None:
        """The newest checkpoint, which may still be on its way to the disk."""
        step = self._manager.latest_step()
        return None if step is None else Path(self._manager.directory) / str(step)

    def resume(self, state: PyTree, iterator: grain.DatasetIterator) -> tuple[int, PyTree, list[tuple[dict, dict]]]:
        """The newest complete step, its state, placed as `state` is, and what was `waiting`; the iterator is set.

        (0, state, []) if there is none.
        Raises: UserError, if the run began from another model or the files cannot be read.
        """
        step = self._manager.latest_step()
        if step is None:
            return 0, state, []
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(target), host=ocp.args.JsonRestore())
        host = self._read(step, ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        for field, found in self._began_with.items():
            if host["began_with"].get(field, found) != found:  # what it did not have then, it may have now
                raise UserError(
                    f"config.{field} holds something else than when this run began: "
                    "put that back, or give another --workdir"
                )
        self._began_with = host["began_with"] | self._began_with
        restored = self._read(step, wanted)
        iterator.set_state(restored["host"]["iterator"])
        metrics, arrays = host["waiting"], []
        if metrics:
            arrays = self._read(step, ocp.args.Composite(waiting=ocp.args.StandardRestore()))["waiting"]
        return step, restored["state"], list(zip(arrays, metrics, strict=True))

    def _read(self, step: int, wanted: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=wanted)
        except jax.errors.JaxRuntimeError:  # of the devices, such as their memory
            raise
        except Exception as error:  # of the files: Orbax raises many kinds
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"checkpoint {self._manager.directory / str(step)} cannot be read ({reason[:200]}): "
                "restore it, or move it away to go on from the one before it"
            ) from error

    def close(self) -> None:
        """Waits until all that was saved is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


class StopSignal:
    """SIGTERM, from here on, asks for a checkpoint and a clean end after the step in hand."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True
