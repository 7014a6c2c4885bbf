"""The rules of TRL's model, adapters and optimizer, and of what a script does to the objects of a trainer."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate import images, ours
from jaxrl_llm.tools.translate.family import model as model_path
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, Rule, not_here
from jaxrl_llm.tools.translate.table import Row

SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
SCHEDULES |= {"cosine_with_min_lr": "cosine"}
QUIET_CALLBACKS = re.compile(r"\w*(Wandb|TensorBoard|Trackio|MLflow|Comet|Printer|Progress|LogCompletions|Profil)\w*")


def model(value: Any, keys: Keys) -> Outcome:
    """The policy's model, which is a name or an object of the script."""
    if value and "/" in str(value):
        return model_path(value, keys)
    return Outcome("changed", {"model.path": "my_model"}, unknown={"model.path": "a folder or a hub id"})


def own_model(row: Row, value: Any, keys: Keys) -> Outcome:
    """A tokenizer or a reference model, which must be that of the policy."""
    if value in (None, keys.explicit.get("model_name_or_path"), keys.explicit.get("sft_model_path")):
        return Outcome("no effect", reason="it is that of the model")
    return not_here("model.path", f"{row.why}, not {value}")


def dtype(value: Any, keys: Keys) -> Outcome:
    """The dtype of activations, from dtype or bf16. In jaxrl_llm parameters are float32."""
    # float16 becomes bfloat16, which takes the same memory and whose gradients need no scaling.
    halves = value in ("bfloat16", "float16")
    low = halves or value == "auto" or keys["bf16"] in (None, True) or keys.explicit.get("fp16")
    cast_reason = f"{value} parameters there; here float32 ones, and activations of this dtype"
    reason = cast_reason if halves else "of activations; parameters are float32" * isinstance(value, str)
    return Outcome("changed" if halves else "mapped", {"model.dtype": "bfloat16" if low else "float32"}, reason)


def init_kwargs(value: Any, keys: Keys) -> Outcome:
    """Arguments of from_pretrained, with which a trainer loads its model."""
    value = dict(value or {})
    dtype_name = value.pop("torch_dtype", None) or value.pop("dtype", None)
    unknown_arguments = value.keys() - {"attn_implementation", "use_cache", "device_map"}
    if unknown_arguments:
        return not_here("model.path", f"no counterpart: {', '.join(sorted(unknown_arguments))}")
    return dtype(dtype_name, keys) if dtype_name else Outcome("no effect", reason="not set")


def adapted(keys: Keys) -> bool:
    """Whether only adapters learn, by the keys of ModelConfig or by a LoraConfig of the script."""
    return bool(keys["use_peft"] or keys.explicit.get("trainer.peft_config"))


def adapter(value: Any, keys: Keys) -> Outcome:
    """Whether only adapters learn: new ones, or those of a folder."""
    if not adapted(keys):
        return Outcome("no effect", reason="use_peft is False")
    config = keys.explicit.get("trainer.peft_config")
    if config in (None, "LoraConfig"):
        return Outcome("mapped", {"adapters.name": "lora"})
    unknown = {f"adapters.{name}": f"as in {config}" for name in ("rank", "alpha", "targets", "rs")}
    fields = {"adapters.name": "lora", "adapters.path": str(config)}
    return Outcome("changed", fields, "goes on with adapters", unknown=unknown)


def plain_adapter(value: Any, keys: Keys) -> Outcome:
    """Properties of an adapter that no key changes."""
    return Outcome("mapped", {"adapters.rs": False, "adapters.base_dtype": "", "adapters.path": ""})


def adapter_size(row: Row, value: Any, keys: Keys) -> Outcome:
    """The rank or alpha: in a LoraConfig both are 8 by default, and not as in ModelConfig."""
    number = keys.explicit.get(row.key, 8) if keys.explicit.get("trainer.peft_config") else value
    return Outcome("mapped", {row.field: int(number) if row.name == "lora_r" else float(number)})


def adapter_targets(value: Any, keys: Keys) -> Outcome:
    """The modules with an adapter."""
    outcome = ours.adapter_targets(value)
    excluded = keys.explicit.get("trainer.peft_config.exclude_modules")
    # Only a sentence depends on whether the rows have images, so unknown rows make no field unknown.
    return images.beside_tower(outcome, value, excluded, keys) if images.image_evidence(keys.values) else outcome


def quantized(value: Any, keys: Keys) -> Outcome:
    """Whether the base of adapters is quantized. jaxrl_llm has only 8 bits, which lose less than 4 bits."""
    if not value:
        return Outcome("no effect", reason="not in use")
    if not adapted(keys):
        return Outcome("unsupported", reason="only the base of adapters is quantized: set use_peft")
    reason = "8 bits with a scale for each output of a kernel; embedding and head stay as they are"
    return Outcome("changed", {"adapters.base_dtype": "int8"}, reason)


def schedule(value: Any, keys: Keys) -> Outcome:
    """The schedule of the learning rate."""
    if value not in SCHEDULES:
        return not_here("optim.decay", f"there is constant, linear and cosine, not {value}")
    return Outcome("mapped", {"optim.decay": SCHEDULES[value], "optim.end": _lowest_rate(keys)})


def _lowest_rate(keys: Keys) -> float:
    if keys["lr_scheduler_type"] != "cosine_with_min_lr":
        return 0.0
    arguments = keys.explicit.get("lr_scheduler_kwargs") or {}
    # transformers accepts the lowest rate itself, or its share of the highest rate.
    return float(arguments.get("min_lr", float(keys["learning_rate"]) * arguments.get("min_lr_rate", 0.0)))


def schedule_arguments(value: Any, keys: Keys) -> Outcome:
    """Arguments of the schedule. jaxrl_llm has the lowest rate of a cosine, and no other argument."""
    unknown_arguments = sorted(dict(value or {}).keys() - {"min_lr", "min_lr_rate"})
    if unknown_arguments:
        return not_here("optim.decay", f"no schedule here has {', '.join(unknown_arguments)}")
    return Outcome("mapped", {"optim.end": _lowest_rate(keys)})


def optimizer(value: Any, keys: Keys) -> Outcome:
    """The optimizer. Variants of AdamW compute the same update."""
    if value in (None, "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit"):
        return Outcome("no effect", reason="AdamW, as here")
    if str(value).startswith(("adamw_", "paged_adamw_")):
        return Outcome("changed", {}, f"AdamW, whose moments are rounded in {value}; here they are float32")
    return not_here("optim", f"AdamW is the one optimizer here, not {value}")


def with_critic(rule: Rule) -> Rule:
    """Returns a rule that also sets the critic's optimizer, because TRL's PPO has one optimizer for both models."""

    def with_critic_fields(value: Any, keys: Keys) -> Outcome:
        outcome = rule(value, keys)
        # In TRL one optimizer updates policy and critic, so both have its rate and limits.
        critic_fields = {f"critic.{name}": x for name, x in outcome.fields.items() if name.startswith("optim.")}
        return replace(outcome, fields=outcome.fields | critic_fields)

    return with_critic_fields


def saving(value: Any, keys: Keys) -> Outcome:
    """Whether checkpoints are saved every N steps, every epoch, or never."""
    if value == "steps":
        return Outcome("mapped", {})
    reasons = {"no": "a run here always can resume", "epoch": "here in steps: checkpoint.every"}
    return Outcome("changed", {"checkpoint.every": 25}, reasons.get(str(value), "here every checkpoint.every steps"))


def trackers(value: Any, keys: Keys) -> Outcome:
    """Loggers with the name of their project, whose default is that of transformers."""
    listed = [str(name) for name in (value if isinstance(value, list) else [value])]
    projects = [keys.explicit.get(key) for key in ("wandb_project", "project")]
    return ours.loggers(listed, str(next(filter(None, projects), "huggingface")))


def launcher_file(value: Any, keys: Keys) -> Outcome:
    """The config file of accelerate."""
    if value:
        return Outcome("mapped", {}, "its num_processes is read")
    return Outcome("unsupported", reason="not beside the script or above it: --processes says what it may say")


def not_followed(row: Row, value: Any, keys: Keys) -> Outcome:
    """An unknown call that may change an object of the script, or an unknown argument of the object."""
    reason = f"not read: {value}"
    unknown = dict.fromkeys(row.fields.split() or [_key_of(value, keys)], reason)
    return Outcome("unsupported", reason=reason, unknown=unknown)


def _key_of(value: Any, keys: Keys) -> str:
    return next((key for key, x in keys.values.items() if x is value), "trainer")


def overridden(value: Any, keys: Keys) -> Outcome:
    """A trainer class that the script defines, or an unknown call that may change the trainer."""
    reason = f"not read: {value}"
    decided = ("loss", "aggregate", "kl", "advantage", "reward", "rollout", "optim", "data")
    return Outcome("unsupported", reason=reason, unknown=dict.fromkeys(decided, reason))


def callbacks(value: Any, keys: Keys) -> Outcome:
    """Callbacks of the trainer. A callback that only logs or shows progress has no effect on the run."""
    unknown_callbacks = [
        str(name) for name in value or [] if not QUIET_CALLBACKS.fullmatch(str(name).rpartition(".")[2])
    ]
    if not unknown_callbacks:
        return Outcome("no effect", reason="they log")
    return not_here("trainer.callbacks", f"what {', '.join(unknown_callbacks)} does is not read")
