"""The inputs of a run: its models, its rows, and its tokenizer."""

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
from jaxrl_llm.rollout.agents.pool import AgentPool
from jaxrl_llm.rollout.named_environments import Environments
from jaxrl_llm.session import model_card
from jaxrl_llm.session.opening import WorkDirectory
from jaxrl_llm.structs import ImageLimits, PyTree


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The models and rows of a run, which are loaded and checked before any file is written."""

    models: Models
    tokenizer: Any
    dataset: Dataset
    held_out: dict[str, Dataset]  # evaluation sets by config section
    environments: Environments | None  # None if no environment answers turns
    agents: AgentPool | None  # None if no agents call the policy
    tools: list[dict[str, Any]]  # schemas of the tools that the chat template describes
    stop_ids: tuple[int, ...]  # token ids that end a completion
    shape_cache: ShapeCache
    first_params: list[PyTree]  # the model's parameters until `params` returns them, then []
    base: PyTree  # frozen parameters under the adapters; None if all parameters learn
    sampler_mesh: Mesh  # mesh of the in-JAX engine: the trainer's mesh, unless the engine has devices of its own

    @property
    def width(self) -> int:
        """Tokens of the longest prompt of the training rows and all evaluation sets."""
        return max(rows.width for rows in (self.dataset, *self.held_out.values()))

    @property
    def image_limits(self) -> ImageLimits | None:
        """The limits of the images of all training and evaluation prompts; None if no prompt has an image."""
        return image_rows.limits(*(rows.images for rows in (self.dataset, *self.held_out.values())))

    @property
    def eval_counts(self) -> dict[str, list[int]]:
        """Numbers of rows of the evaluation sets by config field, such as eval.source."""
        return {f"{section}.source": problems.counts() for section, problems in self.held_out.items()}

    @property
    def sampler_device(self) -> Any:
        """The first device of this process that only the sampler uses; None if it shares the trainer's devices."""
        shared = self.sampler_mesh is self.models.mesh
        return None if shared else self.sampler_mesh.local_devices[0]

    def params(self) -> PyTree:
        """Returns the parameters of the model's folder. Each call returns new arrays, because updates donate them."""
        if self.first_params:
            return self.first_params.pop()
        return hf.load_params(self.models.folder, self.models.model, self.models.mesh)

    @cached_property
    def input_hashes(self) -> dict[str, str]:
        """Hashes of the models and data that must not change in a resumed run, by config field."""
        digests = {"model.path": hf.fingerprint(self.models.folder), "data.source": self.dataset.fingerprint()}
        digests |= {f"{section}.source": problems.fingerprint() for section, problems in self.held_out.items()}
        if (adapters := self.models.adapters) and adapters.kind.path:
            digests["adapters.path"] = peft.fingerprint(adapters.kind.path)
        other_folders = {name: folder for name, folder in self.models.other_folders.items() if name != "critic"}
        return digests | {f"{name}.path": hf.fingerprint(folder) for name, folder in other_folders.items()}

    def export(self, work_directory: WorkDirectory, policy: Learner, states: States) -> None:
        """Writes the policy as a Hugging Face folder with its model card, and adapters as a PEFT folder."""
        workdir, models = work_directory.workdir, self.models
        params, family = policy.all_parameters(states["policy"]), models.model.cfg.family
        hf_export.save(workdir / "hf", params, models.folder, family=family)
        if distributed.first():
            model_card.write(
                workdir / "hf",
                model_card.card(workdir, work_directory.config, self.input_hashes | work_directory.code_hashes),
            )
            work_directory.store.publish("hf")
        if (adapters := models.adapters) and adapters.kind.peft:
            peft.save(workdir / "adapter", states["policy"].params, adapters, work_directory.config["model"]["path"])
            if distributed.first():
                work_directory.store.publish("adapter")
