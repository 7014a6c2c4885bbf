"""What TRL's keys mean: the rules for the loss, the rewards, the data, and the model with its adapter."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tools.translate import images, ours
from jaxrl_llm.tools.translate.family import model as model_path
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, Rule, not_here
from jaxrl_llm.tools.translate.trl_counts import updates

SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
OLDER = {  # defaults that were others in earlier versions
    "beta": "0.0, so that there is no KL penalty; until TRL 0.17 it was 0.04",
    "loss_type": "dapo; in TRL 0.21 it was bnpo",
    "max_completion_length": "512; until TRL 0.29 it was 256",
    "use_bias_correction_kl": "True; in TRL 0.29 it was False",
}
# dapo divides by the tokens of the whole optimizer step, bnpo by those of a micro-batch: here there is only the first,
# which no micro-batch changes.
LOSSES = {  # ours, its aggregation, and its arguments with the keys that they are
    "grpo": ("ppo_clip", "sequence_mean", {}),
    "dapo": ("ppo_clip", "token_mean", {}),
    "bnpo": ("ppo_clip", "token_mean", {}),
    "dr_grpo": ("ppo_clip", "constant", {}),
    "luspo": ("gspo", "sequence_sum", {}),
    "cispo": ("cispo", "token_mean", {}),
    "sapo": ("sapo", "sequence_mean", {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"}),
    "vespo": (
        "vespo",
        "token_mean",
        {
            "k_positive": "vespo_k_pos",
            "lambda_positive": "vespo_lambda_pos",
            "k_negative": "vespo_k_neg",
            "lambda_negative": "vespo_lambda_neg",
        },
    ),
}
JUDGE = "a reward function that judges the evaluation, or eval.every = 0"


def schedule(section: str) -> Rule:
    """The schedule of the learning rate."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value == "cosine_with_min_lr":
            arguments = keys.explicit.get("lr_scheduler_kwargs") or {}
            # transformers takes one of the two: the rate itself, or a share of the highest one.
            low = arguments.get("min_lr", float(keys["learning_rate"]) * arguments.get("min_lr_rate", 0.0))
            return Outcome("mapped", {f"{section}.decay": "cosine", f"{section}.end": float(low)})
        if value not in SCHEDULES:
            return not_here(f"{section}.decay", f"there is constant, linear and cosine, not {value}")
        return Outcome("mapped", {f"{section}.decay": SCHEDULES[value], f"{section}.end": 0.0})

    return rule


def weight_decay(value: Any, keys: Keys) -> Outcome:
    """Weight decay of AdamW."""
    reason = (
        "here only for matrices; there for all but norms and biases, so also for the embedding and a head tied to it"
    )
    return Outcome("changed" if value else "mapped", {"optim.weight_decay": float(value)}, reason * bool(value))


def truncated(value: Any, keys: Keys) -> Outcome:
    """Whether completions that the limit cut are left out."""
    fields = {"mask.truncated": bool(value)}
    # These divide by a number of completions. The others divide by tokens, of which a masked completion has none.
    if not value or keys["loss_type"] not in ("grpo", "dr_grpo", "sapo", "luspo"):
        return Outcome("mapped", fields)
    reason = "TRL still divides the loss by the number of all completions, here by that of those with a trained token"
    return Outcome("changed", fields, reason)


def loss(value: Any, keys: Keys) -> Outcome:
    """The loss and its aggregation."""
    if value not in LOSSES:
        return not_here("loss.name", f"there is no loss {value!r}: {', '.join(LOSSES)}; this config keeps ppo_clip")
    name, mode, arguments = LOSSES[value]
    low = float(keys["epsilon"])
    # TRL's clip is symmetric if epsilon_high is not set.
    high = low if keys["epsilon_high"] is None else float(keys["epsilon_high"])
    reason = {
        "bnpo": "TRL divides by the tokens of a micro-batch, here by those of the optimizer step",
        "cispo": "epsilon_high is the upper bound of the ratio there, 1 + clip_high here",
    }.get(value, "")
    fields: dict[str, Any] = {f"loss.{argument}": float(keys[key]) for argument, key in arguments.items()}
    # TRL's GSPO is a level of the clipped loss; here it is a loss of its own.
    if keys["importance_sampling_level"] == "sequence" and name == "ppo_clip":
        name = "gspo"
        # One ratio for a completion has one gradient: a mean of tokens would weigh it by the length.
        if mode == "token_mean":
            mode, reason = "sequence_mean", "one ratio for a completion: the mean of completions, as GSPO's paper"
    if name == "ppo_clip":
        fields |= {"loss.clip_low": low, "loss.clip_high": high, "loss.delta": float(keys["delta"] or 0.0)}
    elif name == "gspo":
        fields |= {"loss.clip_low": low, "loss.clip_high": high, "loss.level": "sequence"}
    elif name == "cispo":
        # CISPO in TRL has no lower bound: a ratio is at least 1 - 1 = 0.
        fields |= {"loss.clip_low": 1.0, "loss.clip_high": max(high - 1.0, 0.0)}
    # Dr. GRPO divides by a length that no completion changes: the limit.
    length = int(keys["max_completion_length"]) if mode == "constant" else 0
    fields |= {"loss.name": name, "aggregate.mode": mode, "aggregate.constant_length": length}
    return Outcome("changed" if reason else "mapped", fields, reason)


def loss_argument(losses: tuple[str, ...], why: str) -> Rule:
    """An argument of the loss, which `loss` has used."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value is None or keys["loss_type"] not in losses:
            return Outcome("no effect", reason="not set" if value is None else why)
        outcome = loss(keys["loss_type"], keys)
        return Outcome("mapped", {name: x for name, x in outcome.fields.items() if name.startswith("loss.")})

    return rule


def kl(value: Any, keys: Keys) -> Outcome:
    """The coefficient of k3 in the loss."""
    if not value:
        # A default that trains without a penalty, where older versions had one, is worth a word: the file may be older.
        fields = {"kl": None}
        return Outcome("mapped", fields) if "beta" in keys else Outcome("changed", fields, OLDER["beta"])
    fields = {"kl.placement": "loss", "kl.coef": float(value)}
    return Outcome("mapped", fields | kl_estimator(keys["use_bias_correction_kl"], keys).fields, "k3 in the loss")


def kl_estimator(value: Any, keys: Keys) -> Outcome:
    """Whether the KL of a token is multiplied by its ratio."""
    return Outcome("mapped", {"kl.estimator": "k3_weighted" if value else "k3"})


def scaling(value: Any, keys: Keys) -> Outcome:
    """What advantages are divided by."""
    # Older files say True or False.
    normal = {True: "group", False: "none"}.get(value, value)
    if keys["multi_objective_aggregation"] == "normalize_then_sum":
        return Outcome("no effect", reason="multi_objective_aggregation normalizes each reward")
    fields = {"advantage.name": "grpo", "advantage.normalize": normal, "advantage.epsilon": 1e-4}
    return Outcome("mapped", fields, "a deviation has ddof = 1 and epsilon = 1e-4 there and here")


def objectives(value: Any, keys: Keys) -> Outcome:
    """Whether each reward is normalized before they are added."""
    if value != "normalize_then_sum":
        return Outcome("mapped", {})
    return Outcome("mapped", {"advantage.name": "gdpo", "advantage.epsilon": 1e-4})


def was(key: str, rule: Rule) -> Rule:
    """Says of a default that it was another one in earlier versions."""

    def noted(value: Any, keys: Keys) -> Outcome:
        outcome = rule(value, keys)
        return outcome if key in keys else Outcome("changed", outcome.fields, OLDER[key])

    return noted


def rewards(value: Any, keys: Keys) -> Outcome:
    """The reward functions, by name."""
    if not value:
        why = "the file names no reward function"
        unknown = {"reward.functions": why, "eval.function": why}
        return Outcome("changed", ours.reward_fields((ours.ACCURACY,)), unknown=unknown)
    # A script may call a factory here, as get_soft_overlong_punishment(...).
    listed = [str(name).split("(")[0] for name in (value if isinstance(value, list) else [value])]
    all_weights = keys.explicit.get("reward_weights") or [1.0] * len(listed)
    weight_of = dict(zip(listed, all_weights, strict=False)) if len(listed) == len(all_weights) else {}
    # The penalty for long completions is a reward function there, and a field here.
    soft = [name for name in listed if "soft_overlong" in name]
    # TRL takes a model's name among the functions: it has a slash, as no function has.
    models = [name for name in listed if "/" in name]  # of the hub, or folders
    names = [name for name in listed if name not in soft + models]
    reasons = ["get_soft_overlong_punishment is reward.overlong_tokens: set it to soft_punish_cache"] if soft else []
    fields, yours = ours.rewards(names, [float(weight_of.get(name, 1.0)) for name in names]) if names else ({}, {})
    if models:
        model = ours.reward_model(models[0], "it reads prompt and completion as the policy does")
        fields |= model.fields | {"reward_model.weight": float(weight_of.get(models[0], 1.0))}
        reasons += [model.reason, *(f"a second reward model has no counterpart: {name}" for name in models[1:])]
        if not names:
            fields |= {"reward.functions": (), "reward.weights": ()}
            yours = {"eval.function": JUDGE}
    if not fields:
        return Outcome("unsupported", reason="only an overlong penalty: reward.overlong_tokens")
    # A convert function makes the rows, with their answers.
    if "trainer.train_dataset.steps" in keys:
        fields.pop("data.answer_column", None)
    kind = "unsupported" if models[1:] else "changed" if yours or reasons else "mapped"
    return Outcome(kind, fields, "; ".join(reasons), yours)


def alone_reward_model(value: Any, keys: Keys) -> Outcome:
    """A reward model that a command names beside the reward functions."""
    if not value:
        return Outcome("no effect", reason="not set")
    outcome = ours.reward_model(str(value), "it reads prompt and completion as the policy does")
    if reward_names(keys):
        return outcome
    fields = {"reward.functions": (), "reward.weights": ()}
    return Outcome(outcome.kind, outcome.fields | fields, outcome.reason, {"eval.function": JUDGE})


def reward_names(keys: Keys) -> Any:
    return keys.explicit.get("reward_funcs") or keys.explicit.get("trainer.reward_funcs")


def weights(value: Any, keys: Keys) -> Outcome:
    """The weights of the reward functions."""
    names = reward_names(keys)
    count = len(names) if isinstance(names, list) else 1
    if value is None:
        return Outcome("no effect", reason="not set: every function has the weight 1")
    if not names or len(value) != count:
        return Outcome("unsupported", reason=f"{len(value)} weights for {count if names else 'unknown'} functions")
    fields = rewards(names, keys).fields
    return Outcome(
        "mapped", {name: x for name, x in fields.items() if name in ("reward.weights", "reward_model.weight")}
    )


def dataset(value: Any, keys: Keys) -> Outcome:
    """A data set of the hub, or a folder or file; in a script it may be made by code."""
    name, subset = str(value), configuration(keys)
    if subset and "/" in name and not name.endswith(ours.FILES):
        name = f"{name}:{subset}"
    if name.endswith(ours.FILES) or "/" in name:
        return ours.dataset("data", name, str(keys.explicit.get("dataset_train_split", "train")))
    unknown = {"data.source": "a file, or my_data.rows: a function that returns rows with the column prompt"}
    return Outcome("changed", {"data.source": "my_data.rows", "data.convert": ""}, unknown=unknown)


def configuration(keys: Keys) -> str:
    """Returns the configuration of a data set of the hub; "": none, or several."""
    names = keys.explicit.get("dataset_config") or keys.explicit.get("dataset_configs") or ""
    listed = names if isinstance(names, list) else [names]
    return str(listed[0]) if len(listed) == 1 else ""


def configurations(value: Any, keys: Keys) -> Outcome:
    """The configuration of a data set of the hub, or a list of them. `dataset` has used one."""
    if not value:
        return Outcome("no effect", reason="not set")
    if configuration(keys):
        return Outcome("mapped")
    return Outcome("unsupported", reason="one configuration in a source: data.mixture")


def rows_changed(value: Any, keys: Keys) -> Outcome:
    """What a script does with the rows that it has loaded."""
    why = f"the script calls {value}: a function of a row that does the same, and makes the column answer"
    return Outcome("changed", {"data.convert": "my_data.convert"}, "code is not read", {"data.convert": why})


def model(value: Any, keys: Keys) -> Outcome:
    """The policy's model: a name, or an object of the script."""
    if value and "/" in str(value):
        return model_path(value, keys)
    return Outcome("changed", {"model.path": "my_model"}, unknown={"model.path": "a folder or a hub id"})


def if_not_given(rule: Rule, *others: str) -> Rule:
    """Applies a default only if none of the other keys that say the same is in the file."""
    return lambda value, keys: (
        rule(value, keys) if not any(other in keys for other in others) else Outcome("no effect", reason="another key")
    )


def dtype(value: Any, keys: Keys) -> Outcome:
    """The dtype of activations; here parameters are float32."""
    # There is no float16 here: bfloat16 takes the same memory, and its gradients need no scaling.
    low = value in ("bfloat16", "float16", "auto") or bool(keys["bf16"]) or bool(keys.explicit.get("fp16"))
    fields = {"model.dtype": "bfloat16" if low else "float32"}
    if value in ("bfloat16", "float16"):
        return Outcome("changed", fields, f"{value} parameters there; here float32 ones, and activations of this dtype")
    return Outcome("mapped", fields, "of activations; parameters are float32")


def init_kwargs(value: Any, keys: Keys) -> Outcome:
    """Arguments of from_pretrained."""
    value = dict(value or {})
    dtype_name = value.pop("torch_dtype", None) or value.pop("dtype", None)
    value = {key: x for key, x in value.items() if key not in ("attn_implementation", "use_cache", "device_map")}
    if value:
        return Outcome("unsupported", reason=f"no counterpart: {', '.join(value)}")
    return dtype(dtype_name, keys) if dtype_name else Outcome("no effect", reason="not set")


def reference_sync(value: Any, keys: Keys) -> Outcome:
    """A reference that moves towards the policy."""
    if not keys["sync_ref_model"] or not keys["beta"]:
        return Outcome("no effect", reason="sync_ref_model is False, or there is no reference")
    per_rollout = updates(keys)
    # The reference moves between rollouts here, never within one.
    every = max(1, int(keys["ref_model_sync_steps"]) // per_rollout)
    # ref = alpha policy + (1 - alpha) ref, there and here.
    fields = {"kl.refresh.every": every, "kl.refresh.mix": float(keys["ref_model_mixup_alpha"])}
    reason = f"counts optimizer steps, here rollouts with {per_rollout} of them" if per_rollout > 1 else ""
    return Outcome("changed" if reason else "mapped", fields, reason)


def adapter(value: Any, keys: Keys) -> Outcome:
    """An adapter, as a LoraConfig or keys of ModelConfig."""
    if isinstance(value, dict):
        rs = bool(value.get("use_rslora"))
        # PEFT's own defaults. Those of ModelConfig, whose keys are below, are 16 and 32.
        targets, excluded = value.get("target_modules"), value.get("exclude_modules")
        outcome = ours.lora(value.get("r", 8), value.get("lora_alpha", 8), targets, rs=rs)
        return images.beside_tower(outcome, targets, excluded, keys)
    if not keys["use_peft"]:
        return Outcome("no effect", reason="use_peft is False")
    rs = bool(keys.explicit.get("use_rslora"))
    # There is one size here, which loses less than 4 bits.
    base_dtype = "int8" if keys["load_in_8bit"] or keys["load_in_4bit"] else ""
    targets = keys["lora_target_modules"]
    outcome = ours.lora(keys["lora_r"], keys["lora_alpha"], targets, rs=rs, base_dtype=base_dtype)
    return images.beside_tower(outcome, targets, (), keys)


def adapted(keys: Keys) -> bool:
    return bool(keys["use_peft"] or "trainer.peft_config" in keys)


def part_of_adapter(value: Any, keys: Keys) -> Outcome:
    """An argument of a LoraConfig, which `adapter` has used."""
    return Outcome("mapped", reason="")


def quantized(value: Any, keys: Keys) -> Outcome:
    """The base of adapters in integers."""
    if not value:
        return Outcome("no effect", reason="not in use")
    if not keys["use_peft"]:
        return Outcome("unsupported", reason="only the base of adapters is quantized: set use_peft")
    reason = "8 bits with a scale for each output of a kernel; embedding and head stay as they are"
    return Outcome("changed", {"adapters.base_dtype": "int8"}, reason)


def remat(value: Any, keys: Keys) -> Outcome:
    """Whether the backward pass recomputes activations."""
    # Without checkpointing torch with a fused attention keeps the products with kernels, and no scores: that is "dots".
    return Outcome("mapped", {"model.remat": "full" if value else "dots"})


def vllm(value: Any, keys: Keys) -> Outcome:
    """The engine of rollouts."""
    if not value:
        return Outcome("no effect", reason="rollouts come from the trainer's process, there and here")
    return Outcome("changed", {}, "rollouts come from the sampler in JAX; configs/grpo_vllm.py has a vLLM server")


def entropy_bonus(value: Any, keys: Keys) -> Outcome:
    """The coefficient of an entropy bonus, which may begin at 0 and adapt."""
    if keys["use_adaptive_entropy"]:
        return Outcome("mapped", {"entropy.coef": float(value)})
    return ours.entropy_bonus(value, keys)


def adaptive_entropy(value: Any, keys: Keys) -> Outcome:
    """An entropy coefficient that adapts."""
    if not keys["use_adaptive_entropy"]:
        return Outcome("no effect", reason="use_adaptive_entropy is False")
    fields = {
        "entropy.adaptive.target": float(keys["entropy_target"]),
        "entropy.adaptive.step": float(keys["entropy_coef_delta"]),
        "entropy.adaptive.most": float(keys["entropy_coef_max"]),
    }
    return Outcome("mapped", fields)


def prompt_limit(value: Any, keys: Keys) -> Outcome:
    """The longest prompt."""
    if value is None:
        return Outcome("changed", {"data.max_prompt_tokens": 2048}, "no limit there; a longer prompt is dropped here")
    return Outcome("changed", {"data.max_prompt_tokens": int(value)}, "cuts a longer prompt there; here it is dropped")
