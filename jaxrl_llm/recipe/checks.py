"""Checks a recipe as a whole."""

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
    """Checks what a run of `train` is asked to do. Uses no device, and reads no data and no weights.

    fields: the values of the config by their paths, with the defaults. Raises: UserError, naming the field.
    """
    check_shared(recipe, fields, recipe.prompts_per_update)
    if recipe.prompts_per_step % recipe.prompts_per_update:
        raise UserError(
            f"config.prompts_per_step = {recipe.prompts_per_step} is no multiple of "
            f"config.prompts_per_update = {recipe.prompts_per_update}: make it one"
        )
    for section, problems in recipe.eval_sets.items():
        if not problems.functions:
            name = f"config.{section}.function = {problems.function!r}"
            raise UserError(f"{name} is for pairs of sft: name a reward function")
    check_algorithm(recipe, fields)
    check_rollout(recipe)
    check_turns(recipe)
    if critic := recipe.critic:
        if recipe.sizes.critic_steps >= recipe.num_steps:
            raise UserError(
                f"config.critic.warmup_steps = {critic.warmup_steps} but num_steps is {recipe.num_steps}: lower it"
            )
        check_schedule(recipe, critic.optim, "critic.optim")
    # A warm-up that is given in two ways is found where the sizes are derived.
    recipe.sizes.totals()
    recipe.warmups()


def check_schedule(recipe: Settings, section: Any, name: str) -> None:
    """Raises: UserError, if steps after the end of the schedule would have learning rate 0."""
    if recipe.num_steps > recipe.scheduled_steps and section.decay != "constant" and not section.end:
        raise UserError(
            f"config.num_steps = {recipe.num_steps}: the schedule of {name} ends at rate 0 after "
            f"{recipe.schedule_steps} steps, and later ones would learn nothing: lower num_steps, or begin a new run "
            "with model.path = WORKDIR/hf"
        )


def check_sft(recipe: SftRecipe, fields: Mapping[str, Any]) -> None:
    """Checks the recipe of `sft`; fields: argument of `check_train`. Raises: UserError, naming the field."""
    check_shared(recipe, fields, recipe.prompts_per_step)
    check_supervised_loss(recipe)
    if recipe.model.path:
        # Sizes of a new model. The values of configs/sft.py are always allowed.
        shipped = flatten(load("sft"))
        unset = {name: shipped[name] for name in (f"model.{size}" for size in NewModelSettings.__annotations__)}
        refuse(fields, unset | {"model.vision_config.depth": None}, "model.path names a model")
    model = recipe.model
    width, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    new = not model.path
    if new and width % (2 * heads):  # rotary embeddings need an even head size
        raise UserError(
            f"config.model.hidden_size = {width} does not make {heads} heads of an even size: "
            f"give a multiple of {2 * heads}"
        )
    if new and heads % kv_heads:
        raise UserError(f"config.model.num_key_value_heads = {kv_heads} does not divide {heads} heads: give a divisor")
    tower = model.vision_config
    # Rows and columns each turn pairs of a head's numbers.
    if tower and tower.hidden_size % (4 * tower.num_heads):
        raise UserError(
            f"config.model.vision_config.hidden_size = {tower.hidden_size} does not make {tower.num_heads} heads of a "
            f"multiple of 4: give a multiple of {4 * tower.num_heads}"
        )
    # A warm-up that is given in two ways is found where the sizes are derived.
    recipe.sizes.totals()
    recipe.warmups()


def check_shared(recipe: Settings, fields: Mapping[str, Any], prompts_per_update: int) -> None:
    """Checks the fields that every trainer's config has. Raises: UserError, naming the field."""
    sandbox.allow_unconfined(recipe.reward.unconfined)  # before the functions that run programs are checked
    if recipe.microbatch and prompts_per_update % recipe.microbatch:
        raise UserError(
            f"config.microbatch = {recipe.microbatch} does not divide the {prompts_per_update} prompts of an "
            "update: give a divisor, or 0 for all at once"
        )
    if recipe.aggregate.mode == "constant" and not recipe.aggregate.constant_length:
        raise UserError("config.aggregate.constant_length = 0: mode 'constant' divides by it; give a length in tokens")
    if recipe.aggregate.mode != "constant" and recipe.aggregate.constant_length:
        raise UserError(f"config.aggregate.constant_length is not used by mode {recipe.aggregate.mode!r}: set it to 0")
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
        # Without a name, its accuracy would take the place of eval/accuracy.
        if not set_name(section) and section != EVAL:
            raise UserError("config.eval.extra_sets has a set with the name '': name it, as in eval.extra_sets.code")
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
            raise UserError(f"config.mesh.{axis} = 0: give a size of 1 or more, or -1 for all devices left")


def check_data(recipe: Settings) -> None:
    """Checks the sources of prompts and how they are read. Raises: UserError, naming the field."""
    d = recipe.data
    mixture = d.mixture
    if mixture and len(mixture) < 2:
        raise UserError("config.data.mixture has one source: give it in data.source, or give more of them")
    if mixture and d.source:
        raise UserError(f"config.data.source = {d.source!r} does nothing: data.mixture has the sources; set it to ''")
    sections: dict[str, Any] = {f"data.mixture.{name}": part for name, part in mixture.items()} or {"data": d}
    convert = [part.convert for part in sections.values()]
    for field in ("prompt_column", "answer_column", "format_prompt"):
        if getattr(d, field) and all(convert):
            raise UserError(
                f"config.data.{field} = {getattr(d, field)!r} does nothing: a convert function makes the rows"
            )
    if d.today:
        try:
            date.fromisoformat(d.today)
        except ValueError:
            raise UserError(
                f"config.data.today is {d.today!r}: give a date such as 2026-11-25, or '' for today"
            ) from None
    if d.format_prompt:
        formats.template(d.format_prompt)
    sections |= recipe.eval_sets
    for field, section in sections.items():
        with tried():
            check_source(f"config.{field}.source", section.source)
        with tried():
            if section.convert:
                resolve(section.convert, tasks.CONVERTERS, f"config.{field}.convert")
