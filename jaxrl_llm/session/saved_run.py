"""Read-only access to a run for tools: its config, its log, and the policy's parameters in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxrl_llm.config import records
from jaxrl_llm.data.image_format import ImageFormat
from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.data.settings import DataSettings, EvalSettings
from jaxrl_llm.errors import UserError, check_local
from jaxrl_llm.health import json_lines
from jaxrl_llm.machine import bucket, sharding
from jaxrl_llm.models import adapter_kinds, hf, new_model
from jaxrl_llm.models.adapters import AdapterKind
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.settings import NewModelSettings
from jaxrl_llm.session import checkpoint
from jaxrl_llm.structs import PyTree

T = TypeVar("T")


def config_of(workdir: Path) -> dict[str, Any]:
    """Returns the config of the run in a work directory. Raises: UserError, if the directory holds no run."""
    try:
        return json.loads((workdir / "config.json").read_text())
    except (OSError, ValueError):
        raise UserError(
            f"{workdir} is not a jaxrl_llm run, because it has no readable config.json: use the --workdir of a run"
        ) from None


class SavedRun:
    """Read-only access to the run in a work directory, which may still be training.

    Raises: UserError, if the directory holds no run, or the run has no checkpoint yet.
    """

    def __init__(self, workdir: Path):
        check_local("--run", str(workdir))
        address = bucket.address(workdir)  # "" if the work directory is on a disk
        self._folder = (bucket.as_path(address) if address else workdir) / "checkpoints"
        self.workdir = bucket.fetch_run(workdir)  # local folder with config and log
        self._log, self.config = self.workdir / "metrics.jsonl", config_of(self.workdir)
        if not checkpoint.has_checkpoint(self._folder):
            raise UserError(f"{address or workdir} has no checkpoint yet: wait for the first one, or use another run")
        checkpoint.quieten_orbax()
        options = ocp.CheckpointManagerOptions(read_only=True)
        folder = self._folder if address else self._folder.absolute()
        handlers = {checkpoint.MODELS: ocp.PyTreeCheckpointHandler(), checkpoint.NOTES: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)

    def find(self, checkpoint_name: str) -> int:
        """Returns the step of a checkpoint. checkpoint_name: a number, "last", or "best" by the measured accuracy.

        Raises: UserError, listing the available steps, if the run has no such checkpoint.
        """
        steps, accuracies = self._manager.all_steps(), json_lines.accuracies(json_lines.read(self._log))
        best = checkpoint.best_steps(steps, accuracies, 1)
        names = [f"{step} ({accuracies[step]:.1%})" if step in accuracies else f"{step}" for step in steps]
        available = ", ".join([*names, *(["best"] if best else []), "last"])
        if checkpoint_name == "last":
            return max(steps)
        if checkpoint_name == "best":
            if not best:
                raise UserError(
                    f"--step best: no checkpoint of {self._folder} has an evaluation: choose one of {available}"
                )
            return best[0]
        if not checkpoint_name.isdecimal() or int(checkpoint_name) not in steps:
            raise UserError(
                f"--step {checkpoint_name}: {self._folder} has no such checkpoint: choose one of {available}"
            )
        return int(checkpoint_name)

    def params(self, step: int, make_shardings: Callable[[PyTree], PyTree] | None = None) -> PyTree:
        """Reads the trained parameters of the policy, in float32.

        make_shardings(shapes) -> shardings of the result; None to return NumPy arrays.
        """
        with checkpoint.reading(self._manager, step):
            saved_states = self._manager.item_metadata(step)[checkpoint.MODELS].tree
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved_states["policy"]["params"])
        if make_shardings:
            policy_args = jax.tree.map(
                lambda x, place: ocp.ArrayRestoreArgs(sharding=place, dtype=x.dtype), shapes, make_shardings(shapes)
            )
        else:
            policy_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        # Only the parameters of the policy are read. Orbax skips the placeholders of all other arrays.
        wanted = jax.tree.map(lambda _: ocp.PLACEHOLDER, saved_states)
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(), wanted)
        wanted["policy"]["params"], restore_args["policy"]["params"] = shapes, policy_args
        items = {checkpoint.MODELS: ocp.args.PyTreeRestore(wanted, restore_args=restore_args)}
        params = checkpoint.read(self._manager, step, items)[checkpoint.MODELS]["policy"]["params"]
        # The checksums of these parameters are compared with those that the checkpoint holds.
        saved, prefix = checkpoint.read_notes(self._manager, step)["checksums"][checkpoint.MODELS], "policy/params/"
        checksums = {path.removeprefix(prefix): value for path, value in saved.items() if path.startswith(prefix)}
        checkpoint.check_unchanged(self._manager, step, params, checksums)
        return params

    def policy(self, step: int, folder: Path, model: Decoder, mesh: Mesh) -> PyTree:
        """Reads all parameters of the policy onto a mesh, in the structure of `model`.

        folder: folder of the base model.
        """
        params = self.params(step, partial(sharding.shardings, mesh=mesh))
        if not self.adapters:
            # A checkpoint omits frozen parameters, such as a vision tower. They come from the base model.
            frozen_names = model.shapes.keys() - params.keys()
            frozen_params = (
                hf.load_params(folder, model, mesh, learns=False, parts=frozen_names) if frozen_names else {}
            )
            return {**params, **frozen_params}
        adapters = model.adapters(self.adapters)
        return adapters.combine(hf.load_base(folder, model, mesh, adapters), params)

    @property
    def has_partial_checkpoints(self) -> bool:
        """Whether checkpoints hold only the trained part of the policy's parameters, such as adapters."""
        return self.adapters is not None or self.config["model"].get("vision") == "frozen"

    @property
    def adapters(self) -> AdapterKind | None:
        """The kind of the run's adapters; None if the run trained all parameters."""
        section = self.get("adapters")
        return records.read_call(section, adapter_kinds, "config.adapters.name")() if section else None

    @property
    def mesh(self) -> dict[str, int]:
        """The axis sizes of the mesh on which to load the run.

        If the sampler had devices of its own, no sizes of the config cover all devices, so `fsdp` takes all of them.
        """
        sizes, engine = self.config["mesh"], self.get("engine") or {}
        return sizes | dict(data=1, fsdp=-1) if engine.get("devices") else sizes

    @property
    def family(self) -> str:
        """Name of the user's function that reads the model's config.json; "" if this package reads the file."""
        return self.config["model"].get("family", "")

    @property
    def evaluation(self) -> EvalSettings | None:
        """The evaluation settings of the run; None if the run evaluates nothing."""
        return self.section(EvalSettings, "eval") if self.get("eval") else None

    def get(self, name: str) -> Any:
        """Returns a field or a section of the run's config, or None if the config lacks it."""
        values = self.config
        return values.get(name)

    def section(self, record_class: type[T], name: str) -> T:
        """Returns a section of the run's config as a record. Fields that the record lacks are ignored."""
        return records.read(record_class, self.config[name])

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, the oldest first."""
        return sorted(self._manager.all_steps())

    def folder(self, step: int) -> Path:
        """Returns the folder of a checkpoint."""
        return self._folder / str(step)

    def notes(self, step: int) -> dict[str, Any]:
        """Returns the notes of a checkpoint. Raises: UserError, if another version made it, or it cannot be read."""
        return checkpoint.read_notes(self._manager, step)

    def input_hashes(self, step: int) -> dict[str, str]:
        """Returns the hashes of the models and data with which the run started, by config field."""
        return self.notes(step)["began_with"]

    @contextmanager
    def model_folder(self, step: int) -> Iterator[Path]:
        """Yields the folder of the run's initial model. Raises: UserError, if the model has changed since the start."""
        data, path = self.section(DataSettings, "data"), self.config["model"]["path"]
        with ExitStack() as resources:
            if path:
                folder = hf.find_checkpoint(path)
            else:
                new, column = self.section(NewModelSettings, "model"), self.config["data"]["completion_column"]
                folder = resources.enter_context(new_model_folder(new, data, column))
            if hf.fingerprint(folder) != self.input_hashes(step)["model.path"]:
                raise UserError(
                    f"config.model.path = {folder}: the model has changed since the run started: restore the old model"
                )
            yield folder


@contextmanager
def new_model_folder(model: NewModelSettings, data: DataSettings, column: str) -> Iterator[Path]:
    """Yields a temporary folder with a new, untrained model. column: column of the rows with the text to learn.

    Raises: UserError, if the rows cannot be read, or if config.model.vision_config is set but no row has an image.
    """
    tower = model.vision_config
    image_format = None
    if tower:
        shape = new_model.VISION_ARCHITECTURE
        # The image token is 0, because the new model has no tokenizer yet and these rows need no token.
        image_format = ImageFormat(0, shape["patch_size"], shape["spatial_merge_size"], *new_model.PIXEL_LIMITS)
    rows = load_rows(data.source, data.convert, columns=replace(data.columns, images=image_format))
    if tower and not (rows.images and rows.images.count):
        raise UserError(
            f"config.model.vision_config has no effect, because no row of {data.source} has an image: "
            "remove the section"
        )
    sizes = vars(model) | {"vision_config": vars(tower) if tower else None}
    with TemporaryDirectory() as folder:
        new_model.write_folder(Path(folder), sizes, rows.rows, column)
        yield Path(folder)
