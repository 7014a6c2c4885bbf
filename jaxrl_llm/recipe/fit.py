"""Checks that config, mesh, models and data fit each other, after models and data are loaded."""

from __future__ import annotations

import warnings
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
    shards = sharding.prompt_shards(mesh)
    update_field = "microbatch" if sizes.microbatch else "prompts_per_update"
    for field, prompts in {update_field: sizes.at_once, "prompts_per_step": sizes.prompts_per_step}.items():
        if prompts % shards:
            raise UserError(
                f"config.{field} = {prompts} must be a multiple of the {shards} devices of mesh.data x mesh.fsdp: "
                f"change {field}, or use a smaller mesh"
            )


def check_one_at_a_time(recipe: Recipe, mesh: Mesh) -> None:
    """Raises: UserError, if sampling ahead (rollout.max_lag) could deadlock the programs of sampler and trainer.

    Two programs with collectives hang if some devices run the one first, and other devices the other one.
    """
    processes, max_lag = distributed.count(), recipe.rollout.max_lag
    if not recipe.chosen_engine.in_trainer or not max_lag:
        return
    if recipe.sampler_devices:
        # Several processes would hang on CPUs, because each process may order its programs with collectives
        # differently. Several processes are untested on GPUs and TPUs.
        if processes > 1:
            raise UserError(
                f"config.rollout.max_lag = {max_lag} with engine.devices = {recipe.sampler_devices}: {processes} "
                "processes may run the programs of sampler and trainer in different orders and wait for each other "
                "forever; set max_lag to 0, run one process, or sample with vLLM (docs/vllm.md)"
            )
    elif mesh.size > 1 and (mesh.devices.flat[0].platform != "cpu" or processes > 1):
        raise UserError(
            f"config.rollout.max_lag = {max_lag}: the in-JAX engine cannot sample on the {mesh.size} devices that "
            "learn at the same time; reserve devices with engine.devices, set max_lag to 0, or sample with vLLM "
            "(docs/vllm.md)"
        )


def check_agents(recipe: Recipe, dataset: Dataset) -> None:
    """Raises: UserError, if agents cannot call the policy of this run."""
    name, processes = recipe.env.name if recipe.env else "", distributed.count()
    if processes > 1:
        raise UserError(
            f"config.env.name = {name!r}: agents call one process, but this run has {processes}: run one process "
            "for all devices of the host"
        )
    if dataset.images:
        raise UserError(
            f"config.env.name = {name!r}: agents send text, but the model reads images: use a model of text, or an "
            "environment"
        )


def warn_of_later_programs(recipe: Recipe) -> None:
    """Warns that `--compile-only` leaves out the programs for requests of agents, if the run has agents."""
    if recipe.agents:
        warnings.warn("the first step compiles the programs for requests of agents (docs/agents.md)", stacklevel=3)


def check_partial(recipe: Recipe) -> None:
    """Checks that all processes can have equally many open groups. Raises: UserError, naming the field."""
    count, processes = recipe.rollout.partial, distributed.count()
    if count % processes:
        raise UserError(
            f"config.rollout.partial = {count} must be a multiple of the {processes} processes of the run, because "
            "each process continues its own groups: change partial"
        )


def check_vocabulary(model: DecoderConfig, tokenizer: Any, *datasets: Dataset) -> None:
    """Checks that the tokenizer fits the model. Raises: UserError, for a token that the model does not have."""
    largest = max(int(tokens.max()) for dataset in datasets for tokens in dataset.ids)
    largest = max(largest, tokenizer.pad_token_id, tokenizer.eos_token_id or 0)
    if largest >= model.vocab_size:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer returns token {largest}, but vocab_size in config.json is "
            f"{model.vocab_size}: tokenizer and config.json must be files of the same model"
        )


def check_router(recipe: Settings, model: DecoderConfig) -> None:
    """Raises: UserError, if the config has the section `router`, but the model has no experts."""
    if recipe.router and model.mixture is None:
        raise UserError(
            f"config.router needs a model with experts, but {recipe.model.path or 'the new model'} has none: remove "
            "the section, or change model.path"
        )


def check_vision(recipe: Settings, model: DecoderConfig) -> None:
    """Raises: UserError, if model.vision does not fit the vision tower of the model, or its absence."""
    if recipe.model.vision == "frozen" and not model.vision:
        raise UserError(
            "config.model.vision = 'frozen' has no effect, because the model reads no images: set vision to 'learns'"
        )
    if recipe.model.vision == "learns" and model.vision and recipe.adapters:
        raise UserError(
            "config.model.vision = 'learns' must be 'frozen' with config.adapters, because the vision tower has no "
            "adapters"
        )


def check_sampling(recipe: Recipe, model: DecoderConfig) -> None:
    """Raises: UserError, if top-k excludes no token."""
    if recipe.rollout.top_k >= model.vocab_size:
        raise UserError(
            f"config.rollout.top_k = {recipe.rollout.top_k} has no effect, because the model's vocabulary has "
            f"{model.vocab_size} tokens: set top_k to 0, or lower it"
        )


def check_other_model(
    field: str, other_model: DecoderConfig, policy: DecoderConfig, *, has_images: bool = False
) -> None:
    """Checks that a critic or teacher can read everything that the policy reads and samples.

    other_model: config of the critic or teacher; has_images: whether prompts have images.
    Raises: UserError, naming the field.
    """
    if has_images and not other_model.vision:
        raise UserError(f"config.{field}: prompts have images, but this model reads none; use a vision-language model")
    if other_model.vocab_size < policy.vocab_size:
        raise UserError(
            f"config.{field}: the vocabulary of this model ({other_model.vocab_size} tokens) must be at least as large "
            f"as that of the policy ({policy.vocab_size} tokens): use another model"
        )


def check_positions(recipe: Settings, model: DecoderConfig, *datasets: Dataset, whose: str = "the model's") -> None:
    """Checks that prompt and completion fit a model's positions. whose: possessive that names the model in the error.

    Raises: UserError, naming the field.
    """
    width, completion = max(dataset.width for dataset in datasets), recipe.rollout.max_completion_tokens
    if width + completion > model.max_positions:
        raise UserError(
            f"config.rollout.max_completion_tokens = {completion}: a completion after a prompt of {width} tokens would "
            f"exceed {whose} {model.max_positions} positions; lower max_completion_tokens or data.max_prompt_tokens"
        )
