"""Checks a config as a whole, and derives batch sizes and step counts from it."""

from __future__ import annotations

from datetime import date

from ml_collections import ConfigDict

from jaxrl_llm import loggers, tasks
from jaxrl_llm.algorithms import advantages, losses
from jaxrl_llm.config.load import flatten
from jaxrl_llm.config.names import Place, required_inputs, resolve
from jaxrl_llm.config.schema import Field, check_call, check_fields, names_that_may_change
from jaxrl_llm.data import formats
from jaxrl_llm.data.rows import check_source
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import optim
from jaxrl_llm.recipe.combinations import check_algorithm, check_health, check_lora, check_rollout, check_turns
from jaxrl_llm.recipe.fields import CRITIC, FROZEN, LORA, ROUTER, SFT, SOURCE, TRAIN, TURNS
from jaxrl_llm.recipe.no_effect import check_no_effect_shared
from jaxrl_llm.rollout import engines
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.structs import Config, Totals

NAMED = {"advantage": advantages, "loss": losses, "engine": engines}  # section -> module that its `name` is in


def named(config: Config) -> dict[str, Place]:
    """Returns the sections that name a function or a class, with the module that it is in."""
    return NAMED | ({"env": tasks.ENVIRONMENTS} if "env" in config else {})


def train_fields(config: Config) -> dict[str, Field]:
    """Returns the fields of a `train` config, including those of its optional sections."""
    fields = TRAIN | (CRITIC if "critic" in config else {}) | (TURNS if "env" in config else {})
    for name in mixture_of(config):
        fields = fields | {f"data.mixture.{name}.{field}": of_source for field, of_source in SOURCE.items()}
    for section, more in (FROZEN | {"router": ROUTER, "lora": LORA}).items():
        fields = fields | (more if section in config else {})
    return fields


def mixture_of(config: Config) -> Config:
    """Returns the section of the sources of a mixture; {}: there is no mixture."""
    found = config.data.mixture if "data" in config and "mixture" in config.data else {}
    return found if isinstance(found, ConfigDict) else ConfigDict()


def sft_fields(config: Config) -> dict[str, Field]:
    """Returns the fields of an `sft` config, including those of its optional sections."""
    return SFT | (ROUTER if "router" in config else {}) | (LORA if "lora" in config else {})


def may_change(config: Config) -> set[str]:
    """Returns the fields of a checked config that a resumed run may change."""
    if "loss" not in config:
        return names_that_may_change(config, sft_fields(config), {})
    return names_that_may_change(config, train_fields(config), named(config))


def check_train(config: Config) -> Totals:
    """Checks a `train` config as a whole and returns its totals. Uses no device, and reads no data and no weights.

    Raises: UserError, naming the field.
    """
    critic = "critic" in config
    if "data.completion_column" in flatten(config):
        raise UserError("this is a config of supervised fine-tuning: run it with jaxrl sft (in a script, sft.steps)")
    check_fields(config, train_fields(config), named(config))
    check_shared(config, config.prompts_per_update)
    if config.prompts_per_step % config.prompts_per_update:
        raise UserError(
            f"config.prompts_per_step = {config.prompts_per_step} is no multiple of "
            f"config.prompts_per_update = {config.prompts_per_update}: make it one"
        )
    updates = config.prompts_per_step // config.prompts_per_update * config.epochs
    check_algorithm(config, updates)
    check_rollout(config)
    if "env" in config:
        check_turns(config)
    waited = config.critic.warmup_steps if critic else 0
    critic_updates = updates * scheduled_steps(config)  # with those of the warm-up, in which only the critic learns
    if waited >= min(config.num_steps, scheduled_steps(config)):
        raise UserError(f"config.critic.warmup_steps = {waited} but num_steps is {config.num_steps}: lower it")
    if critic:
        _warmup(config.critic.optim, critic_updates, "critic.optim")
        check_schedule(config, config.critic.optim, "critic.optim")
    check_schedule(config, config.optim, "optim")
    # The policy learns nothing during the critic's warm-up, so its schedules leave those steps out.
    scheduled = updates * (scheduled_steps(config) - waited)
    greedy = "greedy_rewards" in required_inputs(resolve(config.advantage.name, advantages))
    completions = config.group_size * (1 + config.rollout.resample_rounds) + greedy  # per prompt
    return Totals(
        prompts_per_update=config.prompts_per_update,
        sequences_per_step=config.prompts_per_step * config.group_size,
        sequences_per_update=config.prompts_per_update * config.group_size,
        updates_per_rollout=updates,
        updates=updates * (config.num_steps - waited),
        scheduled_updates=scheduled,
        warmup_steps=_warmup(config.optim, scheduled),
        completion_tokens=config.num_steps
        * config.prompts_per_step
        * completions
        * config.rollout.max_completion_tokens,
        critic_updates=critic_updates,
    )


def scheduled_steps(config: Config) -> int:
    """Returns the number of steps that the schedules cover."""
    return config.schedule_steps or config.num_steps


def check_schedule(config: Config, section: Config, name: str) -> None:
    """Raises: UserError, if steps after the end of the schedule would have learning rate 0."""
    if config.num_steps > scheduled_steps(config) and section.decay != "constant" and not section.end:
        raise UserError(
            f"config.num_steps = {config.num_steps}: the schedule of {name} ends at rate 0 after "
            f"{config.schedule_steps} steps, and later ones would learn nothing: lower num_steps, or begin a new run "
            "with model.path = WORKDIR/hf"
        )


def check_sft(config: Config) -> Totals:
    """Checks an `sft` config as a whole and returns its totals. Raises: UserError, naming the field."""
    if "loss" in config:
        raise UserError(
            "this is a config of reinforcement learning: run it with jaxrl train (in a script, train.steps)"
        )
    check_fields(config, sft_fields(config), {})
    check_shared(config, config.prompts_per_step)
    width, heads, kv_heads = (config.model[f] for f in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    new = not config.model.path
    if new and width % (2 * heads):  # rotary embeddings need an even head size
        raise UserError(
            f"config.model.hidden_size = {width} does not make {heads} heads of an even size: "
            f"give a multiple of {2 * heads}"
        )
    if new and heads % kv_heads:
        raise UserError(f"config.model.num_key_value_heads = {kv_heads} does not divide {heads} heads: give a divisor")
    tokens = config.num_steps * config.prompts_per_step * config.rollout.max_completion_tokens
    check_schedule(config, config.optim, "optim")
    scheduled, sequences = scheduled_steps(config), config.prompts_per_step
    warmup = _warmup(config.optim, scheduled)
    return Totals(sequences, sequences, sequences, 1, config.num_steps, scheduled, warmup, tokens)


def check_shared(config: Config, prompts_per_update: int) -> None:
    """Checks the fields that every trainer's config has. Raises: UserError, naming the field."""
    sandbox.allow_unconfined(config.reward.unconfined)  # before the functions that run programs are checked
    if config.microbatch and prompts_per_update % config.microbatch:
        raise UserError(
            f"config.microbatch = {config.microbatch} does not divide the {prompts_per_update} prompts of an "
            "update: give a divisor, or 0 for all at once"
        )
    if config.aggregate.mode == "constant" and not config.aggregate.constant_length:
        raise UserError("config.aggregate.constant_length = 0: mode 'constant' divides by it; give a length in tokens")
    if config.aggregate.mode != "constant" and config.aggregate.constant_length:
        raise UserError(f"config.aggregate.constant_length is not used by mode {config.aggregate.mode!r}: set it to 0")
    check_data(config)
    check_no_effect_shared(config)
    check_health(config)
    if "lora" in config:
        check_lora(config)
    if config.eval.every:
        check_call(config.eval.function, tasks.REWARDS, "config.eval.function")
    for name in config.log.to:
        resolve(name, loggers, "config.log.to")
    loggers.check_named(config.log.to, config.log.project)
    for axis in ("data", "fsdp", "tensor"):
        if config.mesh[axis] == 0:
            raise UserError(f"config.mesh.{axis} = 0: give a size of 1 or more, or -1 for all devices left")


def check_data(config: Config) -> None:
    """Checks the sources of prompts and how they are read. Raises: UserError, naming the field."""
    mixture, d = mixture_of(config), config.data
    if mixture and len(mixture) < 2:
        raise UserError("config.data.mixture has one source: give it in data.source, or give more of them")
    if mixture and d.source:
        raise UserError(f"config.data.source = {d.source!r} does nothing: data.mixture has the sources; set it to ''")
    sections = {f"data.mixture.{name}": part for name, part in mixture.items()} or {"data": d}
    convert = [part.convert for part in sections.values()]
    for field in ("prompt_column", "answer_column", "format_prompt"):
        if d[field] and all(convert):
            raise UserError(f"config.data.{field} = {d[field]!r} does nothing: a convert function makes the rows")
    if d.today:
        try:
            date.fromisoformat(d.today)
        except ValueError:
            raise UserError(
                f"config.data.today is {d.today!r}: give a date such as 2026-11-25, or '' for today"
            ) from None
    if d.format_prompt:
        formats.template(d.format_prompt)
    sections |= {"eval": config.eval} if config.eval.every else {}
    for field, section in sections.items():
        check_source(f"config.{field}.source", section.source)
        if section.convert:
            resolve(section.convert, tasks.CONVERTERS, f"config.{field}.convert")


def _warmup(section: Config, total: int, name: str = "optim") -> int:
    return optim.count_warmup(total, warmup_steps=section.warmup_steps, warmup_ratio=section.warmup_ratio, section=name)
