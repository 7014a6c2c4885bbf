"""The engine interface. An engine samples completions; it knows token ids, not text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import ImageLimits, Prompts, PyTree, Rollouts


class Environments(Protocol):
    """The environments of a batch's episodes, behind token ids. Episode b * G + g is completion g of prompt b."""

    turn_tokens: int  # limit of a turn
    stops: tuple[str, ...]  # strings that end a turn

    def may_end(self, vocabulary: int) -> np.ndarray:
        """Returns True for tokens [V] after which the text may end a turn: an engine looks at it there."""
        ...

    def ends(self, turns: Sequence[list[int]]) -> list[int]:
        """Returns for each turn the number of its tokens with which its text ends it; 0: the text does not end it."""
        ...

    def answer(self, episode: int, turn: list[int]) -> Future[list[int] | None]:
        """Starts to answer a turn. The result is the observation's token ids; None: the episode ends."""
        ...


class Engine(Protocol):
    """Samples completions with the weights that the trainer pushes."""

    max_gap: float | None  # largest difference to the trainer's log-probabilities after a push; None: no check
    servers: int = 1  # of this process, which answer the prompts of a call in turn; the weight check asks each

    def sample(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        environments: Environments | None = None,
        max_tokens: np.ndarray | None = None,
        ended: Callable[[int], None] = lambda count: None,
    ) -> Rollouts:
        """Samples group_size completions of each prompt, on the host. The stop token belongs to the completion.

        environments: environments of the episodes, None for single turns. The completion of an episode has the tokens
        of all turns and observations, as they were sampled and encoded; observations are not in `loss_mask`.
        max_tokens [B, G]: limit of each single-turn completion, where it is below the run's limit. ended(count): is
        called with the number of further completions that have ended.
        """
        ...

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        """Samples from these parameters from now on, and reports `version` with each token."""
        ...

    def release(self) -> None:
        """Frees as much memory as possible until the next `update_weights`."""
        ...

    def close(self) -> None:
        """Stops everything that the engine has started."""
        ...


@dataclass(frozen=True)
class EngineInputs:
    """The inputs that a run gives to an engine at its start."""

    model: Decoder
    mesh: Mesh
    folder: Path  # of the run's initial model
    workdir: Path
    max_prompt_tokens: int
    max_completion_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    sequences_per_step: int = 0  # no call of an engine in the trainer holds more at once; 0: no bound
    cache_bytes: int = 0  # of a device that a KV cache in the trainer may take; 0: no bound is known
    observation_tokens: int = 0  # that an environment says at once, at most; 0: there is none
    image_limits: ImageLimits | None = None  # None: no prompt has one
    sampler_mesh: Mesh | None = None  # of the devices that the engine asks for; None: it has no mesh of its own


class EngineChoice(NamedTuple):
    """The return value of an engine function (`rollout.engines`)."""

    start: Callable[[EngineInputs], Engine]  # raises UserError
    in_trainer: bool = False  # it runs in the trainer's process, with the trainer's arithmetic
    in_int8: bool = False  # its copy of the weights
    cache_dtype: str = ""  # of keys and values; "": that of the model
    max_sequences: int = 0  # completions that hold pages of a KV cache in the trainer at once; 0: all
    pages: int = 0  # of a device; 0: as many as these may need
    devices: int = 0  # of the run's devices, on all hosts, that only the engine uses; 0: none
    temperatures: tuple[float, float] = (0.0, math.inf)  # the lowest and the highest at which it samples
    check: Callable[[], None] = lambda: None  # checks that need more than the config; raises UserError

    @property
    def rounds(self) -> bool:
        """Whether it computes with fewer bits than the trainer."""
        return self.in_int8 or self.cache_dtype != ""
