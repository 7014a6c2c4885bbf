"""The engine interface. An engine samples completions. It works with token ids and never with text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.structs import ImageLimits, Prompts, PyTree, Rollouts

if TYPE_CHECKING:  # it takes a second, which a check of a config need not wait for
    from jaxrl_llm.models.decoder import Decoder


class EpisodeEnvironments(Protocol):
    """The environments of a batch's episodes, for token ids. Episode b * G + g is completion g of prompt b."""

    @property
    def turn_tokens(self) -> np.ndarray | int:
        """Most tokens of a turn of each episode [B * G], or of all."""
        ...

    def stops(self, episode: int) -> tuple[str, ...]:
        """Returns the strings that end a turn of an episode."""
        ...

    def possible_turn_ends(self, vocabulary_size: int) -> np.ndarray:
        """Returns True for tokens [V] after which the text may end a turn, so that an engine must check it.

        vocabulary_size: V of the model.
        """
        ...

    def find_turn_ends(self, episodes: Sequence[int], turns: Sequence[list[int]]) -> list[int]:
        """Returns, for each turn, the number of tokens at which its text ends the turn; 0 if it has no stop string.

        episodes: numbers of the episodes to which the turns belong.
        """
        ...

    def answer(self, episode: int, turn: list[int]) -> Future[list[int] | None]:
        """Starts a step of the environment. The future gives the observation's token ids, None if the episode ends."""
        ...


class Engine(Protocol):
    """Samples completions with the weights that the trainer pushes."""

    max_gap: float | None  # largest difference from the trainer's log-probabilities after a push; None = no check
    server_count: int = (
        1  # servers of this process, which sample the prompts of a call in turn; the weight check asks each
    )

    def sample(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        environments: EpisodeEnvironments | None = None,
        max_tokens: np.ndarray | None = None,
        report_ended: Callable[[int], None] = lambda count: None,
    ) -> Rollouts:
        """Samples group_size completions of each prompt, which include their stop tokens. Returns arrays on the host.

        environments: environments of the episodes, None for single turns. The completion of an episode has the tokens
        of all turns and observations, exactly as they were sampled and encoded. Its `loss_mask` leaves out
        observations. max_tokens [B, G]: limits of single-turn completions, None = the run's limit for all of them.
        report_ended(count): is called with the number of newly ended completions.
        """
        ...

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        """Uses these parameters from the next call on, and reports `version` for each token sampled with them."""
        ...

    def release(self) -> None:
        """Frees as much memory as possible until the next `update_weights`."""
        ...

    def close(self) -> None:
        """Stops the threads and servers that the engine has started."""
        ...


@dataclass(frozen=True)
class EngineInputs:
    """Properties of a run that an engine needs at its start."""

    model: Decoder
    mesh: Mesh
    folder: Path  # folder of the run's initial model
    workdir: Path
    max_prompt_tokens: int
    max_completion_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    sequences_per_step: int = 0  # most sequences of a call of an engine in the trainer; 0 = no bound
    cache_bytes: int = 0  # most bytes of a device for a key-value cache in the trainer; 0 = no known bound
    observation_tokens: int = 0  # most tokens of an environment's observation; 0 = no environment
    image_limits: ImageLimits | None = None  # limits of the prompts' images, None if prompts have no images
    sampler_mesh: Mesh | None = None  # mesh of the devices that only the engine uses, None if it shares the trainer's


class EngineChoice(NamedTuple):
    """An engine that a config chooses, with its properties: the return value of a function of `rollout.engines`."""

    start: Callable[[EngineInputs], Engine]  # starts the engine; raises UserError
    in_trainer: bool = False  # whether it runs in the trainer's process, with the trainer's arithmetic
    in_int8: bool = False  # whether its copy of the weights is int8
    cache_dtype: str = ""  # dtype of keys and values; "" = dtype of the model
    max_sequences: int = 0  # most completions that hold pages of a key-value cache in the trainer; 0 = all
    pages: int = 0  # pages of a device; 0 = as many as the completions may need
    devices: int = 0  # devices of all hosts that only the engine uses; 0 = none
    drafts: int = 0  # most drafts that a pass of an engine in the trainer verifies; 0 = none
    temperatures: tuple[float, float] = (0.0, math.inf)  # lowest and highest temperature at which it samples
    check: Callable[[], None] = lambda: None  # checks of the machine, such as an installation of vLLM; raises UserError

    @property
    def is_rounded(self) -> bool:
        """Whether the engine computes with fewer bits than the trainer."""
        return self.in_int8 or self.cache_dtype != ""
