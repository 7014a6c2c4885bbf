"""Checks a recipe as a whole: how its sections fit together, before data, weights or devices are touched."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from jaxrl_llm import loggers, tasks
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.config.names import resolve
from jaxrl_llm.config.schema import check_call
from jaxrl_llm.data import formats
from jaxrl_llm.data.rows import check_source
from jaxrl_llm.data.settings import EVAL, set_name
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.names import FAMILIES
from jaxrl_llm.models.settings import NewModelSettings
from jaxrl_llm.recipe.agents import check_agents
from jaxrl_llm.recipe.combinations import (
    check_adapters,
    check_algorithm,
    check_health,
    check_rollout,
    check_supervised_loss,
    check_turns,
)
from jaxrl_llm.recipe.missing import tried
from jaxrl_llm.recipe.no_effect import refuse
from jaxrl_llm.recipe.recipe import Recipe, Settings, SftRecipe
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.session.profile import steps_of


def check_train(recipe: Recipe, fields: Mapping[str, Any]) -> None:
    """Checks the recipe of a run of `train`. Uses no device, and reads no data and no weights.

    fields: values of the config by their paths, with the defaults. Raises: UserError, naming the field.
    """
    check_shared(recipe, fields, recipe.prompts_per_update)
    if recipe.prompts_per_step % recipe.prompts_per_update:
        raise UserError(
            f"config.prompts_per_step = {recipe.prompts_per_step} must be a multiple of "
            f"config.prompts_per_update = {recipe.prompts_per_update}"
        )
    for section, problems in recipe.eval_sets.items():
        if not problems.functions:  # the set compares preference pairs, and has no reward function
            raise UserError(
                f"config.{section}.function = {problems.function!r} judges preference pairs, which only sft has: name "
                "a reward function"
            )
    check_algorithm(recipe, fields)
    check_agents(recipe)
    check_rollout(recipe)
    check_turns(recipe)
    if critic := recipe.critic:
        if recipe.sizes.critic_steps >= recipe.num_steps:
            raise UserError(
                f"config.critic.warmup_steps = {critic.warmup_steps} must be below config.num_steps = "
                f"{recipe.num_steps}, because the policy learns only after the warm-up of the critic"
            )
        check_schedule(recipe, critic.optim, "critic.optim")
    # These two calls raise a UserError if a warm-up is set both in steps and as a ratio.
    recipe.sizes.totals()
    recipe.warmups()


def check_schedule(recipe: Settings, optim: Any, section: str) -> None:
    """Raises: UserError, if steps after the end of the schedule would have learning rate 0.

    optim: settings of an optimizer; section: its name in the config, for the error.
    """
    if recipe.num_steps > recipe.scheduled_steps and optim.decay != "constant" and not optim.end:
        raise UserError(
            f"config.num_steps = {recipe.num_steps}: the learning rate of {section} is 0 after "
            f"{recipe.schedule_steps} steps (config.schedule_steps), so later steps would learn nothing; lower "
            "num_steps, or start a new run with model.path = WORKDIR/hf"
        )


def check_sft(recipe: SftRecipe, fields: Mapping[str, Any]) -> None:
    """Checks the recipe of a run of `sft`.

    fields: values of the config by their paths, with the defaults. Raises: UserError, naming the field.
    """
    check_shared(recipe, fields, recipe.prompts_per_step)
    check_supervised_loss(recipe)
    if recipe.model.path:
        # The sizes of a new model have no effect here, but the values of configs/sft.py are always allowed.
        shipped = flatten(load("sft"))
        allowed = {name: shipped[name] for name in (f"model.{size}" for size in NewModelSettings.__annotations__)}
        refuse(fields, allowed | {"model.vision_config.depth": None}, "model.path names a trained model")
    model = recipe.model
    width, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    is_new = not model.path
    if is_new and width % (2 * heads):
        raise UserError(
            f"config.model.hidden_size = {width} must be a multiple of {2 * heads}, twice num_attention_heads, because "
            "rotary embeddings need heads of an even size"
        )
    if is_new and heads % kv_heads:
        raise UserError(
            f"config.model.num_key_value_heads = {kv_heads} must divide config.model.num_attention_heads = {heads}"
        )
    tower = model.vision_config
    if tower and tower.hidden_size % (4 * tower.num_heads):
        raise UserError(
            f"config.model.vision_config.hidden_size = {tower.hidden_size} must be a multiple of "
            f"{4 * tower.num_heads}, four times num_heads, because rows and columns each rotate pairs of a head's "
            "numbers"
        )
    # These two calls raise a UserError if a warm-up is set both in steps and as a ratio.
    recipe.sizes.totals()
    recipe.warmups()


def check_shared(recipe: Settings, fields: Mapping[str, Any], prompts_per_update: int) -> None:
    """Checks the fields that the configs of `train` and `sft` share.

    fields: values of the config by their paths, with the defaults; prompts_per_update: prompts of an optimizer step.
    Raises: UserError, naming the field.
    """
    # This call comes first, because the checks of functions that run programs look for the sandbox.
    sandbox.allow_unconfined(recipe.reward.unconfined)
    if recipe.microbatch and prompts_per_update % recipe.microbatch:
        raise UserError(
            f"config.microbatch = {recipe.microbatch} must divide the {prompts_per_update} prompts of an optimizer "
            "step, or be 0 for all of them at once"
        )
    # The loss is summed over tokens, and divided by a length that only mode "constant" takes from the config.
    mode, constant_length = recipe.aggregate.mode, recipe.aggregate.constant_length
    if mode == "constant" and not constant_length:
        raise UserError(
            "config.aggregate.constant_length = 0 must be a length in tokens above 0, because config.aggregate.mode = "
            "'constant' divides by it"
        )
    if mode != "constant" and constant_length:
        raise UserError(
            f"config.aggregate.constant_length = {constant_length} has no effect with config.aggregate.mode = "
            f"{mode!r}: set constant_length to 0"
        )
    check_data(recipe)
    if recipe.model.family:
        with tried():
            resolve(recipe.model.family, FAMILIES, "config.model.family")
    for section in ("optim", "critic.optim", "kl"):
        if fields.get(f"{section}.decay") == "constant":
            refuse(fields, {f"{section}.end": 0.0}, f"{section}.decay is 'constant'")
    check_schedule(recipe, recipe.optim, "optim")
    check_health(recipe, fields)
    check_adapters(recipe)
    for section, problems in recipe.eval_sets.items():
        # A set without a name would log its accuracy as eval/accuracy, the metric of eval.source.
        if not set_name(section) and section != EVAL:
            raise UserError(
                "config.eval.extra_sets has a set with the name '': every set needs a name, for example "
                "eval.extra_sets.code"
            )
        for function in problems.functions:
            with tried():
                check_call(function, tasks.REWARDS, f"config.{section}.function")
    for name in recipe.log.to:
        with tried():
            resolve(name, loggers, "config.log.to")
    steps_of(recipe.log.profile, recipe.num_steps)
    with tried():
        loggers.check_named(recipe.log.to, recipe.log.project)
    for axis in ("data", "fsdp", "tensor"):
        if recipe.mesh[axis] == 0:
            raise UserError(f"config.mesh.{axis} = 0 must be 1 or more, or -1 for all remaining devices")


def check_data(recipe: Settings) -> None:
    """Checks the sources of prompts and how they are read. Raises: UserError, naming the field."""
    data = recipe.data
    mixture = data.mixture
    if mixture and len(mixture) < 2:
        raise UserError("config.data.mixture has one source, but needs two or more: name a single one in data.source")
    if mixture and data.source:
        raise UserError(
            f"config.data.source = {data.source!r} has no effect, because config.data.mixture names the sources: set "
            "data.source to ''"
        )
    sections: dict[str, Any] = {f"data.mixture.{name}": part for name, part in mixture.items()} or {"data": data}
    converters = [part.convert for part in sections.values()]
    for field in ("prompt_column", "answer_column", "format_prompt"):
        if getattr(data, field) and all(converters):
            raise UserError(
                f"config.data.{field} = {getattr(data, field)!r} has no effect, because a convert function makes the "
                f"rows: set {field} to '', or convert to ''"
            )
    if data.today:
        try:
            date.fromisoformat(data.today)
        except ValueError:
            raise UserError(
                f"config.data.today = {data.today!r} must be a date such as 2026-11-25, or '' for the current date"
            ) from None
    if data.format_prompt:
        formats.template(data.format_prompt)
    sections |= recipe.eval_sets
    for field, section in sections.items():
        with tried():
            check_source(f"config.{field}.source", section.source)
        with tried():
            if section.convert:
                resolve(section.convert, tasks.CONVERTERS, f"config.{field}.convert")
