"""An actor that reads the samples of a run from its files, and therefore needs no engine and no reward function."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from jaxrl_llm.recipe.recipe import Recipe
from jaxrl_llm.rollout.actor import Actor, WeightLease
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.session.inputs import Inputs
from jaxrl_llm.session.sample_files import SampledTask, SampleFiles
from jaxrl_llm.structs import PartState, PyTree


class StoredActor(Actor):
    """Returns the samples of each step as the run has kept them."""

    engine: Any = None

    def __init__(self, files: SampleFiles, work_directory: object, recipe: Recipe, inputs: Inputs, cache_limit: int):
        """files: files of the run. The other arguments are those of `build.make_actor`."""
        masks_truncated = recipe.sampling_plan.masks_truncated
        self._task = SampledTask(inputs.dataset, inputs.tokenizer, inputs.environments, masks_truncated)
        self._files = files

    def load(self, state: PartState | None) -> None:
        """Ignores the batches of a checkpoint, because the files have them too."""

    def start(self, states: PyTree, params: PyTree, step: int, attempt: int = 0) -> WeightLease:
        """Starts after `step`."""
        return self.push(states, params, step)

    def next(self) -> Samples:
        """Reads the samples of the next step."""
        return self._files.read(self._next_step, self._task)

    def push(self, states: PyTree, params: PyTree, step: int) -> WeightLease:
        """Returns a lease of the states, which no engine reads."""
        self._next_step, nothing_to_wait_for = step + 1, Future[Any]()
        nothing_to_wait_for.set_result(None)
        self.lease = WeightLease(states, params, nothing_to_wait_for, None)
        return self.lease
