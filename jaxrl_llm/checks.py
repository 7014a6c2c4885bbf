"""The combinations that configs, models, data and meshes may not have, and the batch table derived."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm import advantages, losses, optim, rewards, tasks
from jaxrl_llm.config import Field, arguments, check_fields, needs, resolve
from jaxrl_llm.data import FILES, Dataset
from jaxrl_llm.errors import UserError
from jaxrl_llm.fields import CRITIC, SFT, TEACHER, TRAIN
from jaxrl_llm.models.blocks import DecoderConfig
from jaxrl_llm.structs import Config


@dataclass(frozen=True)
class Totals:
    """What the batch words come to."""

    sequences_per_step: int
    sequences_per_update: int
    updates_per_rollout: int
    updates: int
    warmup_steps: int
    completion_tokens: int  # of the whole run, at most


def check_train(config: Config) -> Totals:
    """Checks a config of `train` as a whole, touching no device and no file.

    Raises: UserError, naming the field.
    """
    critic, teacher = "critic" in config, "teacher" in config
    fields = TRAIN | (CRITIC if critic else {}) | (TEACHER if teacher else {})
    check_fields(config, fields, {"advantage": advantages, "loss": losses})
    check_shared(config, config.prompts_per_update)
    if config.prompts_per_step % config.prompts_per_update:
        raise UserError(
            f"config.prompts_per_step = {config.prompts_per_step} is no multiple of "
            f"config.prompts_per_update = {config.prompts_per_update}: make it one"
        )
    updates = config.prompts_per_step // config.prompts_per_update * config.epochs
    check_rewards(config)
    check_advantage(config, critic, teacher)
    check_loss(config, updates)
    check_kl(config)
    waited = config.critic.warmup_steps if critic else 0
    if waited >= config.num_steps:
        raise UserError(f"config.critic.warmup_steps = {waited} but num_steps is {config.num_steps}: lower it")
    if critic:
        _warmup(config.critic.optim, critic_updates(config), "critic.optim")
    of_policy = updates * (config.num_steps - waited)
    return Totals(
        sequences_per_step=config.prompts_per_step * config.group_size,
        sequences_per_update=config.prompts_per_update * config.group_size,
        updates_per_rollout=updates,
        updates=of_policy,
        warmup_steps=_warmup(config.optim, of_policy),
        completion_tokens=config.num_steps * config.prompts_per_step * config.group_size
        * config.rollout.max_completion_tokens,
    )  # fmt: skip


def check_rewards(config: Config) -> None:
    """Every reward function exists and has a weight."""
    names, weights = config.reward.functions, config.reward.weights
    if not names or len(names) != len(weights):
        raise UserError(f"config.reward has {len(names)} functions and {len(weights)} weights: give each function one")
    for name, weight in zip(names, weights, strict=True):
        if problem := Field(float).problem(weight):
            raise UserError(f"config.reward.weights: {name}'s {problem}")
        if problem := Field(str).problem(name):
            raise UserError(f"config.reward.functions: one {problem}")
        if names.count(name) > 1:
            raise UserError(f"config.reward.functions has {name!r} {names.count(name)} times: give it once")
        resolve(name, rewards, "config.reward.functions")
    tokens, limit = config.reward.overlong_tokens, config.rollout.max_completion_tokens
    if tokens > limit:
        raise UserError(f"config.reward.overlong_tokens = {tokens} is more than a completion's {limit}: lower it")
    if config.rollout.resample_rounds and config.group_size < 2:
        raise UserError("config.rollout.resample_rounds: a group of 1 never has a signal; set it to 0")


def check_advantage(config: Config, critic: bool, teacher: bool) -> None:
    """An estimator gets what it asks for, and nothing is made that it does not ask for."""
    name = config.advantage.name
    asked = needs(resolve(name, advantages, "config.advantage.name"))
    for signal in asked:
        if signal not in advantages.SIGNALS:
            raise UserError(
                f"config.advantage.name = {name!r} asks for {signal!r}: there is {', '.join(advantages.SIGNALS)}"
            )
    if config.group_size < 2 and name in advantages.OF_A_GROUP:
        raise UserError(f"config.group_size = 1: advantage {name!r} compares the members of a group; give 2 or more")
    if name == "pass_at_k" and not 1 <= config.advantage.k <= config.group_size:
        raise UserError(f"config.advantage.k = {config.advantage.k}: give 1 to group_size = {config.group_size}")
    for signal, section, there in (("values", "critic", critic), ("teacher_logprobs", "teacher", teacher)):
        if signal in asked and not there:
            example = {"critic": "configs/ppo.py", "teacher": "configs/distillation.py"}[section]
            raise UserError(f"config.{section} is missing: advantage {name!r} asks for {signal}; see {example}")
        if there and signal not in asked:
            raise UserError(f"config.{section} would be of no use: advantage {name!r} does not ask for its {signal}")
    if teacher and not config.teacher.path:
        raise UserError("config.teacher.path = '': give the teacher's folder or hub id")
    if config.kl.placement == "reward" and not {"rewards", "token_rewards"} & set(asked):
        raise UserError(f"config.kl.placement = 'reward': advantage {name!r} does not look at it; set 'loss' or 'none'")


def check_loss(config: Config, updates: int) -> None:
    """The loss fits the advantages and the number of updates on a rollout."""
    loss, advantage = config.loss.name, config.advantage.name
    if loss in losses.WITHOUT_RATIO and updates > 1:
        raise UserError(
            f"config.loss.name = {loss!r} has no ratio to the policy that sampled, but {updates} updates on a rollout: "
            "set epochs = 1 and prompts_per_update = prompts_per_step, or another loss"
        )
    if loss in losses.OF_A_SEQUENCE and advantage in advantages.OF_A_TOKEN:
        raise UserError(f"config.loss.name = {loss!r} wants an advantage a completion, {advantage!r} gives one a token")
    if config.mask.off_policy and updates == 1:
        raise UserError("config.mask.off_policy: with one update on a rollout nothing is off-policy; set it to 0")
    if config.entropy.target and not config.entropy.step:
        raise UserError("config.entropy.step = 0: the coefficient would never move towards entropy.target; give a step")
    resolve(loss, losses, "config.loss.name")(**arguments(config.loss))  # which may raise
    c = config.correction
    if c.action == "mask" and c.low >= c.high:
        raise UserError(f"config.correction.low = {c.low} is not below high = {c.high}: no weight would be kept")


def check_kl(config: Config) -> None:
    """One place for the penalty, and an estimator that does something there."""
    k = config.kl
    if k.placement == "loss" and k.estimator == "k1":
        raise UserError(
            "config.kl: k1 in the loss does nothing (its on-policy gradient has mean zero): "
            "use k2 or k3 there, or placement = 'reward'"
        )
    if k.placement == "none":
        for name, unset in (("coef", 0.0), ("target", 0.0), ("refresh_every", 0)):
            if k[name] != unset:
                raise UserError(
                    f"config.kl.{name} = {k[name]} but placement is 'none': set {name} to 0, or a placement"
                )
    if k.weighted and (k.placement, k.estimator) != ("loss", "k3"):
        raise UserError("config.kl.weighted is for k3 in the loss: set it to False, or placement and estimator so")
    if k.target and (k.decay != "constant" or not k.coef):
        raise UserError(
            "config.kl.target moves the coefficient by itself: set kl.decay to 'constant' and kl.coef above 0"
        )
    if config.hold.kl_to_reward and k.placement == "none":
        raise UserError("config.hold.kl_to_reward looks at the KL penalty, but kl.placement is 'none': set it to 0")


def critic_updates(config: Config) -> int:
    """Optimiser steps of the critic, which also learns while the policy waits for it."""
    return config.prompts_per_step // config.prompts_per_update * config.epochs * config.num_steps


def check_sft(config: Config) -> Totals:
    """Checks a config of `sft` as a whole. Raises: UserError, naming the field."""
    check_fields(config, SFT, {})
    check_shared(config, config.prompts_per_step)
    width, heads, kv_heads = (config.model[f] for f in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    new = not config.model.path
    if new and width % (2 * heads):
        raise UserError(
            f"config.model.hidden_size = {width} does not make {heads} heads of an even size: "
            f"give a multiple of {2 * heads}"
        )
    if new and heads % kv_heads:
        raise UserError(f"config.model.num_key_value_heads = {kv_heads} does not divide {heads} heads: give a divisor")
    tokens = config.num_steps * config.prompts_per_step * config.rollout.max_completion_tokens
    steps = config.num_steps
    return Totals(config.prompts_per_step, config.prompts_per_step, 1, steps, _warmup(config.optim, steps), tokens)


def check_shared(config: Config, prompts_per_update: int) -> None:
    """What every trainer's config must hold."""
    if config.microbatch and prompts_per_update % config.microbatch:
        raise UserError(
            f"config.microbatch = {config.microbatch} does not divide the {prompts_per_update} prompts of an "
            "update: give a divisor, or 0 for all at once"
        )
    if config.aggregate.mode == "constant" and not config.aggregate.constant_length:
        raise UserError("config.aggregate.constant_length = 0: mode 'constant' divides by it; give a length in tokens")
    if config.aggregate.mode != "constant" and config.aggregate.constant_length:
        raise UserError(f"config.aggregate.constant_length is not used by mode {config.aggregate.mode!r}: set it to 0")
    sources = {"data": config.data.source} | ({"eval": config.eval.source} if config.eval.every else {})
    for field, source in sources.items():
        if "/" in source and not source.endswith(FILES):
            raise UserError(f"config.{field}.source = {source!r}: a file must be {' or '.join(FILES)}")
        if not source.endswith(FILES):
            resolve(source, tasks, f"config.{field}.source")
    if config.data.convert:
        resolve(config.data.convert, tasks, "config.data.convert")
    if config.eval.every:
        resolve(config.eval.function, rewards, "config.eval.function")
    if config.log.wandb_project and not find_spec("wandb"):
        raise UserError("config.log.wandb_project needs wandb, which is not installed: pip install wandb, or set ''")
    for axis in ("data", "fsdp", "tensor"):
        if config.mesh[axis] == 0:
            raise UserError(f"config.mesh.{axis} = 0: give a size of 1 or more, or -1 for all devices left")


def check_batch_fits_mesh(config: Config, mesh: Mesh, prompts_per_update: int) -> None:
    """Every device gets the same number of prompts. Raises: UserError, naming the field."""
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    sizes = {"microbatch": config.microbatch} if config.microbatch else {"prompts_per_update": prompts_per_update}
    for field, prompts in (sizes | {"prompts_per_step": config.prompts_per_step}).items():
        if prompts % devices:
            raise UserError(
                f"config.{field} = {prompts} prompts cannot be split evenly over mesh.data x mesh.fsdp = {devices} "
                "devices: give a multiple, or a smaller mesh"
            )


def check_vocabulary(model: DecoderConfig, tokenizer: Any, *datasets: Dataset) -> None:
    """The tokenizer belongs to the model. Raises: UserError, if it makes a token that the model does not have."""
    largest = max(max(tokens) for dataset in datasets for tokens in dataset.ids)
    largest = max(largest, tokenizer.pad_token_id, tokenizer.eos_token_id or 0)
    if largest >= model.vocab_size:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer makes token {largest}, but config.json has a vocabulary of "
            f"{model.vocab_size}: use one checkpoint's files"
        )


def check_positions(config: Config, model: DecoderConfig, *datasets: Dataset) -> None:
    """Prompt and completion fit the model's positions. Raises: UserError, naming the field."""
    width = max(dataset.width for dataset in datasets)
    if width + config.rollout.max_completion_tokens > model.max_positions:
        raise UserError(
            f"config.rollout.max_completion_tokens = {config.rollout.max_completion_tokens} after prompts of up to "
            f"{width} tokens is more than the model's {model.max_positions} positions: lower it"
        )


def table(
    config: Config, totals: Totals, mesh: Mesh, model: DecoderConfig, dataset: Dataset, start: int
) -> list[tuple[str, Any]]:
    """The start-up banner's rows: what the batch words come to, and where the run stands."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    shape = f"{model.layers} layers of {model.width}, vocabulary {model.vocab_size:,}, {model.dtype}"
    path = config.model.path.removeprefix(f"{Path.cwd()}/") or "new"
    return [
        ("model", f"{path} ({shape})"),
        ("mesh", f"{axes} on {mesh.devices.flat[0].device_kind}"),
        ("prompts", f"{len(dataset.rows):,} of at most {dataset.width} tokens, {dataset.dropped:,} over-long dropped"),
        ("sequences per step", totals.sequences_per_step),
        ("sequences per optimiser step", totals.sequences_per_update),
        ("optimiser steps per rollout", totals.updates_per_rollout),
        ("optimiser steps", totals.updates),
        ("warm-up steps", totals.warmup_steps),
        ("completion tokens, at most", totals.completion_tokens),
        ("begins", f"after step {start} of {config.num_steps}, resumed" if start else "anew"),
    ]


def _warmup(section: Config, total: int, name: str = "optim") -> int:
    return optim.count_warmup(total, warmup_steps=section.warmup_steps, warmup_ratio=section.warmup_ratio, section=name)
