"""Where completions come from. An engine knows token ids, not text."""

from __future__ import annotations

from typing import Protocol

import jax
import numpy as np

from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Prompts, PyTree, Rollouts


class Engine(Protocol):
    """What the training loop asks of a source of completions."""

    exact: bool  # its log-probabilities equal the trainer's to rounding

    def generate(
        self, prompts: Prompts, key: jax.Array, *, group_size: int, sampling: Sampling,
        max_tokens: np.ndarray | None = None,
    ) -> Rollouts:  # fmt: skip
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
