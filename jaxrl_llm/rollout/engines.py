"""The engines that a config may name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxrl_llm.rollout import Engine, vllm
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.structs import Config

if TYPE_CHECKING:
    from jaxrl_llm.build import Given


def in_trainer(config: Config) -> bool:
    """Whether the engine computes in the trainer's own process, with the trainer's own arithmetic."""
    return config.rollout.engine == "jax"


def start(given: Given) -> Engine:
    """The engine of a config. Raises: UserError."""
    config = given.config
    stops: dict[str, Any] = dict(stop_ids=given.stop_ids, pad_id=given.tokenizer.pad_token_id)
    if in_trainer(config):
        return Sampler(given.model, given.mesh, max_completion_tokens=config.rollout.max_completion_tokens, **stops)
    width = max(given.dataset.width, given.held_out.width)
    return vllm.start(config, given.workdir, given.folder, given.model.cfg, width, **stops)
