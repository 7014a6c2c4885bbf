"""Where completions come from. An engine knows token ids, not text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Prompts, PyTree, Rollouts


class Engine(Protocol):
    """What a run asks of a source of completions."""

    max_gap: float | None  # allowed between its log-probabilities and the trainer's after a push; None: not checked

    def generate(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        max_tokens: np.ndarray | None = None,
    ) -> Rollouts:
        """group_size completions of each prompt, on the host; the stop token belongs to the completion.

        max_tokens [B, G]: of each completion at most, where that is less than the run's limit.
        """
        ...

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        """From here on, samples come from these parameters, and say that they are of this version."""
        ...

    def release(self) -> None:
        """Frees what memory it can until the next `update_weights`."""
        ...

    def close(self) -> None:
        """Ends what the engine has started."""
        ...


@dataclass(frozen=True)
class EngineInputs:
    """What a run gives an engine to start with."""

    model: Decoder
    mesh: Mesh
    folder: Path  # of the model that the run begins with
    workdir: Path
    max_prompt_tokens: int
    max_completion_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int


class EngineChoice(NamedTuple):
    """What the function that a config names as its engine returns."""

    start: Callable[[EngineInputs], Engine]  # raises UserError
    in_trainer: bool = False  # it computes in the trainer's process, with the trainer's own arithmetic
    check: Callable[[], None] = lambda: None  # what takes more than a look at the config; raises UserError
