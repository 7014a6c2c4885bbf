"""Checks that config, mesh, models and data fit each other, once they are loaded."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.recipe.recipe import Recipe, Settings
from jaxrl_llm.structs import Sizes


def check_batch_fits_mesh(sizes: Sizes, mesh: Mesh) -> None:
    """Checks that every device gets the same number of prompts. Raises: UserError, naming the field."""
    devices = sharding.prompt_shards(mesh)
    update = "microbatch" if sizes.microbatch else "prompts_per_update"
    for field, prompts in {update: sizes.at_once, "prompts_per_step": sizes.prompts_per_step}.items():
        if prompts % devices:
            raise UserError(
                f"config.{field} = {prompts} prompts cannot be split evenly over mesh.data x mesh.fsdp = {devices} "
                "devices: give a multiple, or a smaller mesh"
            )


def check_one_at_a_time(recipe: Recipe, mesh: Mesh) -> None:
    """Raises: UserError, if programs of two threads may wait for each other for ever."""
    processes, max_lag = distributed.count(), recipe.rollout.max_lag
    if not recipe.chosen_engine.in_trainer or not max_lag:
        return
    if recipe.sampler_devices:
        # A CPU runs programs with collectives one after the other, in another order in each process: it hangs. Of GPUs
        # and TPUs nobody has tried it.
        if processes > 1:
            raise UserError(
                f"config.rollout.max_lag = {max_lag} with engine.devices = {recipe.sampler_devices}: {processes} "
                "processes may run the programs of sampler and trainer in another order, and wait for each other for "
                "ever: set max_lag to 0, run one process, or take vLLM (docs/vllm.md)"
            )
    elif mesh.size > 1 and (mesh.devices.flat[0].platform != "cpu" or processes > 1):
        raise UserError(
            f"config.rollout.max_lag = {max_lag}: the in-JAX engine cannot sample while the same {mesh.size} devices "
            "learn: give it some of its own with engine.devices, set max_lag to 0, or take vLLM (docs/vllm.md)"
        )


def check_vocabulary(model: DecoderConfig, tokenizer: Any, *datasets: Dataset) -> None:
    """Checks that the tokenizer fits the model. Raises: UserError, if it makes a token that the model does not have."""
    largest = max(int(tokens.max()) for dataset in datasets for tokens in dataset.ids)
    largest = max(largest, tokenizer.pad_token_id, tokenizer.eos_token_id or 0)
    if largest >= model.vocab_size:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer makes token {largest}, but config.json has a vocabulary of "
            f"{model.vocab_size}: use one checkpoint's files"
        )


def check_router(recipe: Settings, model: DecoderConfig) -> None:
    """Raises: UserError, if the config has settings of experts, and the model has none."""
    if recipe.router and model.mixture is None:
        raise UserError(
            f"config.router is for a model with experts, and {recipe.model.path or 'the new model'} has none: take the "
            "section out, or give another model.path"
        )


def check_vision(recipe: Settings, model: DecoderConfig) -> None:
    """Raises: UserError, if model.vision says of the tower what does not hold."""
    if recipe.model.vision == "frozen" and not model.vision:
        raise UserError("config.model.vision = 'frozen' does nothing: the model reads no images; set it to 'learns'")
    if recipe.model.vision == "learns" and model.vision and recipe.adapters:
        raise UserError(
            "config.model.vision = 'learns' with adapters, which only layers for text have: set it to 'frozen'"
        )


def check_sampling(recipe: Recipe, model: DecoderConfig) -> None:
    """Raises: UserError, if top-k excludes no token."""
    if recipe.rollout.top_k >= model.vocab_size:
        raise UserError(
            f"config.rollout.top_k = {recipe.rollout.top_k} does nothing: the model's vocabulary has "
            f"{model.vocab_size} tokens; set it to 0"
        )


def check_other_model(field: str, other: DecoderConfig, policy: DecoderConfig, *, reads: bool = False) -> None:
    """Checks that a critic or teacher covers the policy's tokens. reads: the prompts have images.

    Raises: UserError, naming the field.
    """
    if reads and not other.vision:
        raise UserError(f"config.{field}: that model reads no images, and the prompts have some: give one that does")
    if other.vocab_size < policy.vocab_size:
        raise UserError(
            f"config.{field}: that model has a vocabulary of {other.vocab_size}, the policy, which may sample all of "
            f"its own, {policy.vocab_size}: give one with as many"
        )


def check_positions(recipe: Settings, model: DecoderConfig, *datasets: Dataset, whose: str = "the model's") -> None:
    """Checks that prompt and completion fit a model's positions. Raises: UserError, naming the field."""
    width = max(dataset.width for dataset in datasets)
    if width + recipe.rollout.max_completion_tokens > model.max_positions:
        raise UserError(
            f"config.rollout.max_completion_tokens = {recipe.rollout.max_completion_tokens} after prompts of up to "
            f"{width} tokens is more than {whose} {model.max_positions} positions: lower it"
        )
