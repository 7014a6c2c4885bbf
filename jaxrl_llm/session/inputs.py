"""What a run begins with: its models and its rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.data import image_rows
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.learner.learning import Models
from jaxrl_llm.learner.scorers import States
from jaxrl_llm.learner.update import Learner
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.shapes import ShapeCache
from jaxrl_llm.models import hf, hf_export, peft
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.session import model_card
from jaxrl_llm.session.opening import Workplace
from jaxrl_llm.structs import ImageLimits, PyTree


@dataclass(frozen=True)
class Inputs:
    """The models and the rows of a run, loaded and checked before anything is written."""

    models: Models
    tokenizer: Any
    dataset: Dataset
    held_out: dict[str, Dataset]  # evaluation sets, by their sections of the config
    environments: EnvironmentPool | None  # None: a completion is one turn
    tools: list[dict[str, Any]]  # that the chat template describes
    stop_ids: tuple[int, ...]
    shape_cache: ShapeCache  # the shapes of the run
    first_params: list[PyTree]  # the model's parameters, until `params` hands them out
    base: PyTree  # the parameters beside the adapters; None: all parameters learn
    sampler_mesh: Mesh  # of the in-JAX engine: that of the trainer, unless it has devices of its own

    @property
    def width(self) -> int:
        """Tokens of the longest prompt, of training and of all evaluation sets."""
        return max(rows.width for rows in (self.dataset, *self.held_out.values()))

    @property
    def image_limits(self) -> ImageLimits | None:
        """The limits of the images in all these prompts; None: they have none."""
        return image_rows.limits(*(rows.images for rows in (self.dataset, *self.held_out.values())))

    @property
    def eval_counts(self) -> dict[str, list[int]]:
        """Numbers of rows of the evaluation sets, by the config fields that name their rows."""
        return {f"{section}.source": problems.counts() for section, problems in self.held_out.items()}

    @property
    def sampler_device(self) -> Any:
        """A device that only the sampler of this process uses; None: it has none of its own."""
        shared = self.sampler_mesh is self.models.mesh
        return None if shared else self.sampler_mesh.local_devices[0]

    def params(self) -> PyTree:
        """Returns the model's parameters as its folder has them. Each call returns separate arrays."""
        if self.first_params:
            return self.first_params.pop()
        return hf.load_params(self.models.folder, self.models.model, self.models.mesh)

    @cached_property
    def began_with(self) -> dict[str, str]:
        """Returns the hashes of the models and the data that must not change in a resumed run, by config field."""
        digests = {"model.path": hf.fingerprint(self.models.folder), "data.source": self.dataset.fingerprint()}
        digests |= {f"{section}.source": problems.fingerprint() for section, problems in self.held_out.items()}
        if (adapters := self.models.adapters) and adapters.kind.path:
            digests["adapters.path"] = peft.fingerprint(adapters.kind.path)
        others = {name: folder for name, folder in self.models.other_folders.items() if name != "critic"}
        return digests | {f"{name}.path": hf.fingerprint(folder) for name, folder in others.items()}

    def export(self, place: Workplace, policy: Learner, states: States) -> None:
        """Writes the policy as a Hugging Face folder with its model card, and adapters as a folder of PEFT."""
        workdir, models = place.workdir, self.models
        params, family = policy.all_parameters(states["policy"]), models.model.cfg.family
        hf_export.save(workdir / "hf", params, models.folder, family=family)
        if distributed.first():
            model_card.write(workdir / "hf", model_card.card(workdir, place.config, self.began_with | place.code))
            place.store.publish("hf")
        if (adapters := models.adapters) and adapters.kind.peft:
            peft.save(workdir / "adapter", states["policy"].params, adapters, place.config["model"]["path"])
            if distributed.first():
                place.store.publish("adapter")
