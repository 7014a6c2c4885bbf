"""Rules that translate TRL's keys of the model, adapters and optimizer, and what a script does to these objects.

Each rule gets the value of its key and all `Keys` of the user's file, and returns the `Outcome` in jaxrl_llm.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate import conversions, images
from jaxrl_llm.tools.translate.family import model as model_path
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, Rule, unsupported
from jaxrl_llm.tools.translate.table import Row, read_names

# {lr_scheduler_type of TRL: optim.decay of jaxrl_llm}
SCHEDULES = read_names("trl_schedules")
# Names of callbacks that only log or show progress.
QUIET_CALLBACKS = re.compile(r"\w*(Wandb|TensorBoard|Trackio|MLflow|Comet|Printer|Progress|LogCompletions|Profil)\w*")


def model(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `model_name_or_path`, or the model that a script makes, to `model.path`."""
    # A name without a slash is no hub id, and may be a variable of the script.
    return model_path(value if "/" in str(value) else "", keys)


def own_model(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates a tokenizer or reference model of TRL, which jaxrl_llm only supports if it is the policy's."""
    if value in (None, keys.get("model_name_or_path"), keys.get("sft_model_path")):
        return Outcome("no effect", reason="it is that of the model")
    return unsupported("model.path", f"{row.why}, not {value}")


def dtype(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `dtype` or `bf16` to `model.dtype`, of activations: jaxrl_llm's parameters are float32."""
    # float16 becomes bfloat16, which takes the same memory and whose gradients need no scaling.
    is_half = value in ("bfloat16", "float16")
    is_low = is_half or value == "auto" or keys["bf16"] in (None, True) or keys.get("fp16")
    reason = "of activations; parameters are float32" * isinstance(value, str)
    if is_half:
        reason = f"TRL has {value} parameters; jaxrl_llm has float32 parameters, and activations of this dtype"
    return Outcome("changed" if is_half else "mapped", {"model.dtype": "bfloat16" if is_low else "float32"}, reason)


def init_kwargs(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `model_init_kwargs`, the arguments of from_pretrained, of which only the dtype has a field."""
    value = dict(value)
    dtype_name = value.pop("torch_dtype", None) or value.pop("dtype", None)
    known_arguments = {"attn_implementation", "use_cache", "device_map", "trust_remote_code"}
    unknown_arguments = {name for name, x in value.items() if x not in (None, "main")} - known_arguments
    if unknown_arguments:
        return unsupported("model.path", f"no counterpart: {', '.join(sorted(unknown_arguments))}")
    return dtype(dtype_name, keys) if dtype_name else Outcome("no effect", reason="how the model is loaded")


def adapted(keys: Keys) -> bool:
    """Whether only adapters learn, by the keys of ModelConfig or by a LoraConfig of the script."""
    return bool(keys["use_peft"] or keys.get("trainer.peft_config"))


# Condition of keys of adapters, and the reason if they have no effect.
ADAPTED = (adapted, "this run has no adapters")


def adapter(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `use_peft` or the trainer's `peft_config` to `adapters`: new ones, or those of a folder."""
    config = keys.get("trainer.peft_config")
    if config in (None, "LoraConfig"):
        return Outcome("mapped", {"adapters.name": "lora"})
    unknown = {f"adapters.{name}": f"as in {config}" for name in ("rank", "alpha", "targets", "rs")}
    fields = {"adapters.name": "lora", "adapters.path": str(config)}
    return Outcome("changed", fields, "continues from these adapters", unknown=unknown)


def adapter_size(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `lora_r` or `lora_alpha`, which a script's LoraConfig sets to 8 by default, to `adapters`."""
    number = keys.get(row.key, 8) if keys.get("trainer.peft_config") else value
    return Outcome("mapped", {row.field: int(number) if row.name == "lora_r" else float(number)})


def adapter_targets(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `lora_target_modules` to `adapters.targets`, a pattern of the kernels with an adapter."""
    outcome = conversions.adapter_targets(value)
    excluded = keys.get("trainer.peft_config.exclude_modules")
    # Only a sentence depends on whether the rows have images, so unknown rows make no field unknown.
    return (
        images.adapters_beside_tower(outcome, value, excluded, keys) if images.image_evidence(keys.values) else outcome
    )


def quantized(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `load_in_8bit` and `load_in_4bit` to `adapters.base_dtype`, which in jaxrl_llm is only int8."""
    if not adapted(keys):
        return Outcome("unsupported", reason="only the base of adapters is quantized: set use_peft")
    reason = "8 bits with a scale for each output of a kernel; embedding and head stay as they are"
    return Outcome("changed", {"adapters.base_dtype": "int8"}, reason)


def schedule(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `lr_scheduler_type` to `optim.decay` and `optim.end`."""
    if value not in SCHEDULES:
        return unsupported("optim.decay", f"optim.decay is constant, linear or cosine, not {value}")
    return Outcome("mapped", {"optim.decay": SCHEDULES[value], "optim.end": _lowest_rate(keys)})


def _lowest_rate(keys: Keys) -> float:
    """Returns the learning rate at the end of TRL's schedule, which only `cosine_with_min_lr` sets above 0."""
    if keys["lr_scheduler_type"] != "cosine_with_min_lr":
        return 0.0
    arguments = keys.get("lr_scheduler_kwargs") or {}
    # transformers accepts the lowest rate itself, or its share of the highest rate.
    return float(arguments.get("min_lr", float(keys["learning_rate"]) * arguments.get("min_lr_rate", 0.0)))


def schedule_arguments(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `lr_scheduler_kwargs`, of which jaxrl_llm has the lowest rate of a cosine: `optim.end`."""
    unknown_arguments = sorted(dict(value or {}).keys() - {"min_lr", "min_lr_rate"})
    if unknown_arguments:
        return unsupported("optim.decay", f"no schedule of jaxrl_llm has {', '.join(unknown_arguments)}")
    return Outcome("mapped", {"optim.end": _lowest_rate(keys)})


def optimizer(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `optim`, whose variants of AdamW all compute the update of jaxrl_llm's optimizer."""
    if value in (None, "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit"):
        return Outcome("no effect", reason="AdamW, as in jaxrl_llm")
    if str(value).startswith(("adamw_", "paged_adamw_")):
        return Outcome("changed", {}, f"AdamW, whose moments are rounded in {value}, and float32 in jaxrl_llm")
    return unsupported("optim", f"AdamW is the one optimizer of jaxrl_llm, not {value}")


def with_critic(rule: Rule) -> Rule:
    """Makes a rule also set the critic's optimizer, because TRL's PPO has one optimizer for policy and critic."""

    def with_critic_fields(value: Any, keys: Keys) -> Outcome:
        outcome = rule(value, keys)
        critic_fields = {f"critic.{name}": x for name, x in outcome.fields.items() if name.startswith("optim.")}
        return replace(outcome, fields=outcome.fields | critic_fields)

    return with_critic_fields


def trackers(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `report_to` to `log.to` and `log.project`; the default project is that of transformers."""
    listed = [str(name) for name in (value if isinstance(value, list) else [value])]
    return conversions.loggers(listed, str(keys.get("wandb_project") or keys.get("project") or "huggingface"))


def launcher_file(value: Any, keys: Keys) -> Outcome:
    """Translates the config file of accelerate, which only matters for its number of processes."""
    if value:
        return Outcome("mapped", {}, "its num_processes is read, if it has one")
    if keys.get("accelerate.num_processes"):
        return Outcome("no effect", reason="the command says the number of processes itself")
    return Outcome("unsupported", reason="the file is not beside the script or above it: set --processes")


def not_followed(row: Row, value: Any, keys: Keys) -> Outcome:
    """Reports an unknown call of a script that may change an object, such as the model, or an unknown argument."""
    # The row of a pattern does not say which key of the file has this very value.
    key = next((key for key, x in keys.values.items() if x is value), "trainer")
    return unsupported(row.field or key, f"not read: {value}", *row.field_names)


def callbacks(value: Any, keys: Keys) -> Outcome:
    """Translates the callbacks of TRL's trainer, which have no effect on the run if they only log or show progress."""
    names = [str(name) for name in value or []]
    unknown_callbacks = [name for name in names if not QUIET_CALLBACKS.fullmatch(name.rpartition(".")[2])]
    if not unknown_callbacks:
        return Outcome("no effect", reason="they log")
    return unsupported("trainer.callbacks", f"what {', '.join(unknown_callbacks)} does is not read")
