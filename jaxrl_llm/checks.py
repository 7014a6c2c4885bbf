"""What the configs may say: every field with its range, the combinations refused, and the batch table derived."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm import advantages, losses, optim, rewards, tasks
from jaxrl_llm.config import Field, check_fields, resolve
from jaxrl_llm.data import FILES, Dataset
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.blocks import DecoderConfig
from jaxrl_llm.structs import Config

DECAYS = ("constant", "linear", "cosine")

SHARED = {
    "seed": Field(int, low=0, high=2**31 - 1),
    "num_steps": Field(int, low=1),
    "prompts_per_step": Field(int, low=1),
    "microbatch": Field(int, low=0),
    "model.path": Field(str),
    "model.dtype": Field(str, choices=("float32", "bfloat16")),
    "model.remat": Field(str, choices=("none", "dots", "full")),
    "data.source": Field(str),
    "data.convert": Field(str),
    "data.max_prompt_tokens": Field(int, low=1),
    "data.overlong": Field(str, choices=("drop", "error")),
    "rollout.max_completion_tokens": Field(int, low=1),
    "eval.every": Field(int, low=0),
    "eval.source": Field(str),
    "eval.function": Field(str),
    "eval.problems": Field(int, low=1),
    "aggregate.mode": Field(str, choices=("token_mean", "sequence_mean", "constant")),
    "aggregate.constant_length": Field(int, low=0),
    "optim.learning_rate": Field(float, low=0, above=True),
    "optim.warmup_steps": Field(int, low=0),
    "optim.warmup_ratio": Field(float, low=0, high=1),
    "optim.decay": Field(str, choices=DECAYS),
    "optim.end": Field(float, low=0),
    "optim.clip_norm": Field(float, low=0),
    "optim.weight_decay": Field(float, low=0),
    "optim.b1": Field(float, low=0, high=0.9999),
    "optim.b2": Field(float, low=0, high=0.9999),
    "optim.eps": Field(float, low=0, above=True),
    "mesh.data": Field(int, low=-1),
    "mesh.fsdp": Field(int, low=-1),
    "mesh.tensor": Field(int, low=-1),
    "checkpoint.every": Field(int, low=1),
    "checkpoint.keep": Field(int, low=1),
    "checkpoint.keep_best": Field(int, low=0),
    "log.tensorboard": Field(bool),
    "log.wandb_project": Field(str),
}
TRAIN = SHARED | {
    "log.completions_every": Field(int, low=0),
    "group_size": Field(int, low=1),
    "prompts_per_update": Field(int, low=1),
    "epochs": Field(int, low=1),
    "reward.functions": Field(tuple),
    "reward.weights": Field(tuple),
    "kl.placement": Field(str, choices=("none", "reward", "loss")),
    "kl.estimator": Field(str, choices=("k1", "k2", "k3")),
    "kl.coef": Field(float, low=0),
    "kl.decay": Field(str, choices=DECAYS),
    "kl.end": Field(float, low=0),
    "rollout.temperature": Field(float, low=0, above=True),
    "rollout.top_k": Field(int, low=0),
    "rollout.top_p": Field(float, low=0, high=1, above=True),
}
SFT = SHARED | {
    "data.completion_column": Field(str),
    "model.hidden_size": Field(int, low=1),
    "model.num_hidden_layers": Field(int, low=1),
    "model.num_attention_heads": Field(int, low=1),
    "model.num_key_value_heads": Field(int, low=1),
    "model.intermediate_size": Field(int, low=1),
}


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
    check_fields(config, TRAIN, {"advantage": advantages, "loss": losses})
    check_shared(config, config.prompts_per_update)
    if config.prompts_per_step % config.prompts_per_update:
        raise UserError(
            f"config.prompts_per_step = {config.prompts_per_step} is no multiple of "
            f"config.prompts_per_update = {config.prompts_per_update}: make it one"
        )
    if config.group_size < 2 and config.advantage.name == "grpo":
        raise UserError("config.group_size = 1: advantage 'grpo' compares the members of a group; give 2 or more")
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
    if config.kl.placement == "loss" and config.kl.estimator == "k1":
        raise UserError(
            "config.kl: k1 in the loss does nothing (its on-policy gradient has mean zero): "
            "use k2 or k3 there, or placement = 'reward'"
        )
    if config.kl.placement == "none" and config.kl.coef:
        raise UserError(f"config.kl.coef = {config.kl.coef} but placement is 'none': set coef to 0, or a placement")
    updates = config.prompts_per_step // config.prompts_per_update * config.epochs
    return Totals(
        sequences_per_step=config.prompts_per_step * config.group_size,
        sequences_per_update=config.prompts_per_update * config.group_size,
        updates_per_rollout=updates,
        updates=updates * config.num_steps,
        warmup_steps=_warmup(config, updates * config.num_steps),
        completion_tokens=config.num_steps * config.prompts_per_step * config.group_size
        * config.rollout.max_completion_tokens,
    )  # fmt: skip


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
    return Totals(config.prompts_per_step, config.prompts_per_step, 1, steps, _warmup(config, steps), tokens)


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


def _warmup(config: Config, total: int) -> int:
    o = config.optim
    return optim.count_warmup(total, warmup_steps=o.warmup_steps, warmup_ratio=o.warmup_ratio)
