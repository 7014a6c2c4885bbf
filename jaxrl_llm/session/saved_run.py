"""Reads a run from outside: its config, its checkpoints, and the policy's parameters in a checkpoint."""

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
from jaxrl_llm.data.images import ImageFormat
from jaxrl_llm.data.rows import load_rows
from jaxrl_llm.data.settings import DataSettings, EvalSettings
from jaxrl_llm.errors import UserError, check_local
from jaxrl_llm.machine import bucket, sharding
from jaxrl_llm.models import adapter_kinds, hf, new_model
from jaxrl_llm.models.adapters import AdapterKind
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.settings import NewModelSettings
from jaxrl_llm.session import checkpoint, json_lines
from jaxrl_llm.structs import PyTree

T = TypeVar("T")


def config_of(workdir: Path) -> dict[str, Any]:
    """Returns the config of the run of a workdir. Raises: UserError, if there is no run."""
    try:
        return json.loads((workdir / "config.json").read_text())
    except (OSError, ValueError):
        raise UserError(f"{workdir} is no run (it has no config.json of one): give a run's --workdir") from None


class SavedRun:
    """Read-only access to the run of a workdir, also while it runs. Raises: UserError, if there is no run."""

    def __init__(self, workdir: Path):
        check_local("--run", str(workdir))
        path = bucket.address(workdir)
        self._folder = (bucket.as_path(path) if path else workdir) / "checkpoints"
        self.workdir = bucket.fetch_run(workdir)  # with the log; local
        self._log, self.config = self.workdir / "metrics.jsonl", config_of(self.workdir)
        if not checkpoint.has_checkpoint(self._folder):
            raise UserError(f"{path or workdir} has no checkpoint yet: wait for the first one, or give another run")
        checkpoint.quieten_orbax()
        options, folder = (
            ocp.CheckpointManagerOptions(read_only=True),
            self._folder if path else self._folder.absolute(),
        )
        handlers = {checkpoint.MODELS: ocp.PyTreeCheckpointHandler(), checkpoint.NOTES: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)

    def find(self, which: str) -> int:
        """Finds a step with a checkpoint: a number, "last", or "best" by the accuracy that the run measured.

        Raises: UserError, listing the steps, if there is no such checkpoint.
        """
        steps, accuracies = self._manager.all_steps(), json_lines.accuracies(json_lines.read(self._log))
        best = checkpoint.best_steps(steps, accuracies, 1)
        names = [f"{step} ({accuracies[step]:.1%})" if step in accuracies else f"{step}" for step in steps]
        there = ", ".join([*names, *(["best"] if best else []), "last"])
        if which == "last":
            return max(steps)
        if which == "best":
            if not best:
                raise UserError(f"--step best: no checkpoint of {self._folder} has an evaluation; there is {there}")
            return best[0]
        if not which.isdecimal() or int(which) not in steps:
            raise UserError(f"--step {which}: {self._folder} has no such checkpoint; there is {there}")
        return int(which)

    def params(self, step: int, place: Callable[[PyTree], PyTree] | None = None) -> PyTree:
        """Reads only the parameters that the policy learns, float32.

        place(shapes) -> shardings; without it, returns NumPy arrays.
        """
        with checkpoint.reading(self._manager, step):
            states = self._manager.item_metadata(step)[checkpoint.MODELS].tree
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), states["policy"]["params"])
        whole = jax.tree.map(lambda _: ocp.PLACEHOLDER, states)  # Orbax skips placeholders
        if place:
            how = jax.tree.map(lambda x, at: ocp.ArrayRestoreArgs(sharding=at, dtype=x.dtype), shapes, place(shapes))
        else:
            how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        args = jax.tree.map(lambda _: ocp.RestoreArgs(), whole)
        whole["policy"]["params"], args["policy"]["params"] = shapes, how
        wanted = {checkpoint.MODELS: ocp.args.PyTreeRestore(whole, restore_args=args)}
        params = checkpoint.read(self._manager, step, wanted)[checkpoint.MODELS]["policy"]["params"]
        saved, inside = checkpoint.read_notes(self._manager, step)["checksums"][checkpoint.MODELS], "policy/params/"
        sums = {path.removeprefix(inside): value for path, value in saved.items() if path.startswith(inside)}
        checkpoint.check_unchanged(self._manager, step, params, sums)
        return params

    def policy(self, step: int, folder: Path, model: Decoder, mesh: Mesh) -> PyTree:
        """Reads all parameters of the policy onto a mesh, as its model takes them; folder: the run's `model_folder`."""
        params = self.params(step, partial(sharding.shardings, mesh=mesh))
        if not self.adapters:
            missing = model.shapes.keys() - params.keys()
            beside = hf.load_params(folder, model, mesh, learns=False, parts=missing) if missing else {}
            return {**params, **beside}
        adapters = model.adapters(self.adapters)
        return adapters.combine(hf.load_base(folder, model, mesh, adapters), params)

    @property
    def leaves_out(self) -> bool:
        """Whether checkpoints have only some of the policy's parameters, because the others do not learn."""
        return self.adapters is not None or self.config["model"].get("vision") == "frozen"

    @property
    def adapters(self) -> AdapterKind | None:
        """The kind of the run's adapters; None: all parameters learned."""
        section = self.get("adapters")
        return records.read_call(section, adapter_kinds, "config.adapters.name")() if section else None

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the run's mesh. If the sampler had its own devices, the mesh is one over all devices."""
        sizes, engine = self.config["mesh"], self.get("engine") or {}
        return sizes | dict(data=1, fsdp=-1) if engine.get("devices") else sizes

    @property
    def family(self) -> str:
        """The function of the user's that reads the model's config.json; "": this package reads it."""
        return self.config["model"].get("family", "")

    @property
    def evaluation(self) -> EvalSettings | None:
        """The run's own evaluation; None: it has none."""
        return self.section(EvalSettings, "eval") if self.get("eval") else None

    def get(self, name: str) -> Any:
        """Returns a field or a section of the run's config; None: it has none."""
        values = self.config
        return values.get(name)

    def section(self, record: type[T], name: str) -> T:
        """Returns a section of the run's config as a record, without the fields that the record does not have."""
        return records.read(record, self.config[name])

    def began_with(self, step: int) -> dict[str, str]:
        """Returns the hashes of the models and the data that the run began with, by config field."""
        return checkpoint.read_notes(self._manager, step)["began_with"]

    @contextmanager
    def model_folder(self, step: int) -> Iterator[Path]:
        """The model folder that the run began with. Raises: UserError, if its model has changed since."""
        data, path = self.section(DataSettings, "data"), self.config["model"]["path"]
        with ExitStack() as opened:
            if path:
                folder = hf.find(path)
            else:
                new, column = self.section(NewModelSettings, "model"), self.config["data"]["completion_column"]
                folder = opened.enter_context(new_model_folder(new, data, column))
            if hf.fingerprint(folder) != self.began_with(step)["model.path"]:
                raise UserError(f"model.path = {folder} holds another model than when the run began: put that back")
            yield folder


@contextmanager
def new_model_folder(model: NewModelSettings, data: DataSettings, column: str) -> Iterator[Path]:
    """Makes the temporary folder of a new model. column: column of the rows that holds the text to learn.

    Raises: UserError, if the rows cannot be read, or have no picture for the tower that the model is to have.
    """
    tower = model.vision_config
    form = None
    if tower:
        shape = new_model.VISION_ARCHITECTURE
        # The image token is 0, because the new model has no tokenizer yet and these rows need no token.
        form = ImageFormat(0, shape["patch_size"], shape["spatial_merge_size"], *new_model.PIXELS)
    rows = load_rows(data.source, data.convert, columns=replace(data.columns, images=form))
    if tower and not (rows.images and rows.images.count):
        raise UserError(
            f"config.model.vision_config does nothing: no row of {data.source} has a picture; take the section out"
        )
    sizes = vars(model) | {"vision_config": vars(tower) if tower else None}
    with TemporaryDirectory() as folder:
        new_model.write_folder(Path(folder), sizes, rows.rows, column)
        yield Path(folder)
