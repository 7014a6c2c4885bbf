"""The table of TRL's GRPO: GRPOConfig of version 1.16, and older keys.

It also knows the keys of ModelConfig and ScriptArguments, and the arguments of the trainer.
"""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.tools.translate import launchers, ours
from jaxrl_llm.tools.translate.family import ENGINE, LOGS, MEMORY, divisors, unknown_steps
from jaxrl_llm.tools.translate.family import model as model_path
from jaxrl_llm.tools.translate.outcome import (
    Idle,
    Keys,
    Outcome,
    Rule,
    System,
    off,
    only_if,
    same_rule,
    to,
    unsupported,
)

HUB = "nothing is pushed to the hub during a run"
LAUNCHER = "how processes are started: here all devices that a run finds"
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
SCORED = "the trainer also scores this distribution; TRL scores that of all tokens"
TRAINER = "an argument of the trainer that is no setting"
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


def processes(keys: Keys) -> int:
    """Processes that train, which multiply a batch."""
    return keys.processes or launchers.count(keys) or 1


def completions_per_update(keys: Keys) -> int:
    """Completions of an optimizer step."""
    per_process = int(keys["per_device_train_batch_size"]) * int(keys["gradient_accumulation_steps"])
    return per_process * processes(keys)


def completions_per_rollout(keys: Keys) -> int:
    """Completions of a rollout."""
    # TRL refuses both this and steps_per_generation in one file.
    if keys["generation_batch_size"]:
        return int(keys["generation_batch_size"])
    # Without the key TRL takes gradient_accumulation_steps: one optimizer step on a rollout.
    every = int(keys["steps_per_generation"] or keys["gradient_accumulation_steps"])
    return int(keys["per_device_train_batch_size"]) * every * processes(keys)


def batch(keys: Keys) -> tuple[dict[str, Any], str]:
    """Returns the batch fields, and how TRL's words make them."""
    group = int(keys["num_generations"])
    per_update = completions_per_update(keys)
    # Here an optimizer step never has more than a rollout.
    rollout = max(completions_per_rollout(keys), per_update)
    # A rollout of TRL may end within a group; here it has whole ones.
    prompts = max(1, round(rollout / group))
    # The learner splits a rollout into equal updates, so the prompts of an update divide those of a rollout.
    update = min(divisors(prompts), key=lambda x: abs(x - per_update / group))
    count = processes(keys)
    product = f"{keys['per_device_train_batch_size']} x {keys['gradient_accumulation_steps']} x {count}"
    reason = (
        f"per_device_train_batch_size x gradient_accumulation_steps x processes counts completions: {product} = "
        f"{per_update} of an optimizer step, {rollout} of a rollout; here prompts, with {group} completions each"
    )
    reason += (
        "" if keys.processes or launchers.count(keys) else ". The file names no number of processes: --processes N does"
    )
    if prompts * group != rollout or update * group != per_update:
        reason += f". They are not whole groups: {prompts} and {update} are the nearest that fit"
    return {"prompts_per_step": prompts, "prompts_per_update": update, "group_size": group}, reason


def part_of_batch(*names: str) -> Rule:
    """A word of the batch that per_device_train_batch_size explains. names: the fields that it changes."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value is None:
            return Outcome("no effect", reason="not set")
        fields, _ = batch(keys)
        return Outcome("changed", {name: fields[name] for name in names}, "a factor of the batch, as said above")

    return rule


def updates(keys: Keys) -> int:
    """Optimizer steps on a rollout."""
    fields, _ = batch(keys)
    return fields["prompts_per_step"] // fields["prompts_per_update"] * int(keys["num_iterations"])


def micro(value: Any, keys: Keys) -> Outcome:
    """The completions of a device, which are also a word of the batch."""
    fields, reason = batch(keys)
    # Rounded down to whole groups: more of them would need more memory than the file allows.
    limit = max(1, int(value) * processes(keys) // fields["group_size"])
    microbatch = max(x for x in divisors(fields["prompts_per_update"]) if x <= limit)
    return Outcome("changed", fields | {"microbatch": microbatch}, reason)


def rollouts(keys: Keys) -> int:
    """Steps of the run, as here; 0: the file does not say them."""
    # transformers counts optimizer steps, of which a rollout has several.
    if (steps := int(keys["max_steps"] or 0)) > 0:
        return max(1, steps // updates(keys))
    # A pass drops its last, smaller batch, so the division is of whole steps.
    passes = float(keys["num_train_epochs"]) * (keys.rows // batch(keys)[0]["prompts_per_step"])
    return max(1, math.ceil(passes)) if keys.rows else 0


def epochs(value: Any, keys: Keys) -> Outcome:
    """Passes over the data."""
    if int(keys["max_steps"] or 0) > 0:
        return Outcome("no effect", reason="max_steps is set")
    prompts = batch(keys)[0]["prompts_per_step"]
    if num_steps := rollouts(keys):
        return Outcome(
            "changed", {"num_steps": num_steps}, f"{value} passes over {keys.rows} rows, {prompts} in a step"
        )
    return unknown_steps(f"num_train_epochs = {value}: {value} x rows // prompts_per_step")


def in_rollouts(name: str, value: Any, keys: Keys) -> Outcome:
    """Returns what a number of optimizer steps, or a share of the run below 1, becomes as a number of rollouts."""
    per_rollout, total = updates(keys), rollouts(keys)
    # transformers takes a number below 1 for a share of all steps.
    if value >= 1:
        reason = f"counts optimizer steps, here rollouts with {per_rollout} of them" * (per_rollout > 1)
        return Outcome("changed" if reason else "mapped", {name: max(1, int(value) // per_rollout)}, reason)
    if total:
        reason = f"a share of the run: {value} x {total} steps"
        return Outcome("changed", {name: max(1, math.ceil(value * total))}, reason)
    why = f"{value} of all steps (give --rows, or max_steps in the file); 25 is a placeholder"
    return Outcome("changed", {name: 25}, "a share of the run", {name: why})


def counts_updates(name: str, what: str) -> Rule:
    """A number of optimizer steps becomes one of rollouts."""

    def rule(value: Any, keys: Keys) -> Outcome:
        return in_rollouts(name, value, keys) if value and value > 0 else Outcome("no effect", reason="not set")

    return only_if(lambda keys: not what or keys[what] == "steps", rule, f"{what} is not steps")


def saving(value: Any, keys: Keys) -> Outcome:
    """When checkpoints are saved."""
    if value == "steps":
        return Outcome("mapped", {})
    reasons = {"no": "a run here always can resume", "epoch": "here in steps: checkpoint.every"}
    return Outcome("changed", {"checkpoint.every": 25}, reasons.get(str(value), "here every checkpoint.every steps"))


def evaluating(value: Any, keys: Keys) -> Outcome:
    """When evaluations are made. A config does not say the problems: the script does."""
    if value in ("no", None, False):
        return Outcome("mapped", {"eval.every": 0, "checkpoint.keep_best": 0})
    # transformers takes logging_steps where eval_steps is not set.
    every = in_rollouts("eval.every", keys["eval_steps"] or keys["logging_steps"], keys)
    fields = every.fields | {"eval.source": "data/test.parquet", "eval.convert": ""}
    why = every.yours | {"eval.source": "the file with the problems; this name is a placeholder"}
    return Outcome("changed", fields, "one greedy completion for each problem, judged by eval.function", why)


def never_warms_up(keys: Keys) -> bool:
    """Whether the schedule ignores the warm-up: transformers' "constant" does, "constant_with_warmup" does not."""
    return keys["lr_scheduler_type"] == "constant"


NO_WARMUP = Outcome(
    "mapped",
    {"optim.warmup_ratio": 0.0, "optim.warmup_steps": 0},
    "lr_scheduler_type constant has no warm-up, whatever this key says",
)


def warmup(value: Any, keys: Keys) -> Outcome:
    """Optimizer steps, or from TRL 1 on also a share."""
    if not value:
        return Outcome("no effect", reason="not set")
    if never_warms_up(keys):
        return NO_WARMUP
    # transformers 5 has one key for both: below 1 it is a share.
    if value < 1:
        return Outcome("mapped", {"optim.warmup_ratio": float(value), "optim.warmup_steps": 0})
    return Outcome("mapped", {"optim.warmup_steps": int(value), "optim.warmup_ratio": 0.0}, "optimizer steps, as here")


def warmup_ratio(value: Any, keys: Keys) -> Outcome:
    """A share of the optimizer steps."""
    if value and never_warms_up(keys):
        return NO_WARMUP
    if keys.explicit.get("warmup_steps"):
        return Outcome("no effect", reason="warmup_steps is set")
    return Outcome("mapped", {"optim.warmup_ratio": float(value or 0), "optim.warmup_steps": 0})


def schedule(section: str) -> Rule:
    """The schedule of the learning rate."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value == "cosine_with_min_lr":
            arguments = keys.explicit.get("lr_scheduler_kwargs") or {}
            # transformers takes one of the two: the rate itself, or a share of the highest one.
            low = arguments.get("min_lr", float(keys["learning_rate"]) * arguments.get("min_lr_rate", 0.0))
            return Outcome("mapped", {f"{section}.decay": "cosine", f"{section}.end": float(low)})
        if value not in SCHEDULES:
            return Outcome("unsupported", reason=f"there is constant, linear and cosine, not {value}")
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
        reason = f"there is no loss {value!r}: {', '.join(LOSSES)}; this config keeps ppo_clip"
        return Outcome("unsupported", reason=reason)
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
        fields = {"kl.placement": "none", "kl.coef": 0.0, "kl.estimator": "k3", "kl.weighted": False}
        return Outcome("mapped", fields) if "beta" in keys else Outcome("changed", fields, OLDER["beta"])
    return Outcome("mapped", {"kl.placement": "loss", "kl.estimator": "k3", "kl.coef": float(value)}, "k3 in the loss")


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
        yours = {"reward.functions": why, "eval.function": why}
        return Outcome("changed", ours.reward_fields((ours.ACCURACY,)), "", yours)
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


JUDGE = "a reward function that judges the evaluation, or eval.every = 0"


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
    yours = {"data.source": "a file, or my_data.rows: a function that returns rows with the column prompt"}
    return Outcome("changed", {"data.source": "my_data.rows", "data.convert": ""}, "", yours)


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
    return Outcome("changed", {"model.path": "my_model"}, "", {"model.path": "a folder or a hub id"})


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
    fields = {"kl.refresh_every": every, "kl.mix": float(keys["ref_model_mixup_alpha"])}
    reason = f"counts optimizer steps, here rollouts with {per_rollout} of them" if per_rollout > 1 else ""
    return Outcome("changed" if reason else "mapped", fields, reason)


def adapter(value: Any, keys: Keys) -> Outcome:
    """An adapter, as a LoraConfig or keys of ModelConfig."""
    if isinstance(value, dict):
        rs = bool(value.get("use_rslora"))
        # PEFT's own defaults. Those of ModelConfig, whose keys are below, are 16 and 32.
        return ours.lora(value.get("r", 8), value.get("lora_alpha", 8), value.get("target_modules"), rs=rs)
    if not keys["use_peft"]:
        return Outcome("no effect", reason="use_peft is False")
    rs = bool(keys.explicit.get("use_rslora"))
    # There is one size here, which loses less than 4 bits.
    base_dtype = "int8" if keys["load_in_8bit"] or keys["load_in_4bit"] else ""
    return ours.lora(keys["lora_r"], keys["lora_alpha"], keys["lora_target_modules"], rs=rs, base_dtype=base_dtype)


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
    return Outcome("changed", {"lora.base_dtype": "int8"}, reason)


def remat(value: Any, keys: Keys) -> Outcome:
    """Whether the backward pass recomputes activations."""
    # Without checkpointing torch with a fused attention keeps the products with kernels, and no scores: that is "dots".
    return Outcome("mapped", {"model.remat": "full" if value else "dots"})


def vllm(value: Any, keys: Keys) -> Outcome:
    """The engine of rollouts."""
    if not value:
        return Outcome("no effect", reason="rollouts come from the trainer's process, there and here")
    return Outcome("changed", {}, "rollouts come from the sampler in JAX; configs/grpo_vllm.py has a vLLM server")


def adaptive_entropy(value: Any, keys: Keys) -> Outcome:
    """An entropy coefficient that adapts."""
    if not keys["use_adaptive_entropy"]:
        return Outcome("no effect", reason="use_adaptive_entropy is False")
    fields = {
        "entropy.target": float(keys["entropy_target"]),
        "entropy.step": float(keys["entropy_coef_delta"]),
        "entropy.most": float(keys["entropy_coef_max"]),
    }
    return Outcome("mapped", fields)


def prompt_limit(value: Any, keys: Keys) -> Outcome:
    """The longest prompt."""
    if value is None:
        return Outcome("changed", {"data.max_prompt_tokens": 2048}, "no limit there; a longer prompt is dropped here")
    return Outcome("changed", {"data.max_prompt_tokens": int(value)}, "cuts a longer prompt there; here it is dropped")


IDLE: dict[str, Rule] = {
    **same_rule(
        Idle(LOGS),
        """
            output_dir overwrite_output_dir run_name report_to log_level log_level_replica logging_dir
            logging_first_step logging_nan_inf_filter logging_strategy disable_tqdm include_for_metrics debug
            log_completions log_multimodal num_completions_to_print log_unique_prompts log_on_each_node
            wandb_log_unique_prompts exp_name project trackio_space_id wandb_entity wandb_project wandb_run_group
            include_num_input_tokens_seen include_tokens_per_second benchmarks callbacks num_sample_generations
            log_with do_train do_predict trainer.callbacks log_completions_hub_repo trackio_bucket_id
            trackio_static_space_id
    """,
    ),
    **same_rule(
        Idle(HUB),
        """
            push_to_hub hub_model_id hub_model_revision hub_strategy hub_token hub_private_repo hub_always_push
            hub_revision push_to_hub_revision overwrite_hub_revision
    """,
    ),
    **same_rule(
        Idle(MEMORY),
        """
            gradient_checkpointing_kwargs per_device_eval_batch_size eval_accumulation_steps deepspeed fsdp
            fsdp_config ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_backend tf32
            ds3_gather_for_generation pad_to_multiple_of torch_empty_cache_steps torch_compile torch_compile_backend
            torch_compile_mode use_liger_kernel use_liger_loss liger_kernel_config accelerator_config
            parallelism_config local_rank attn_implementation dataloader_num_workers dataloader_pin_memory
            dataloader_prefetch_factor dataloader_persistent_workers dataset_num_proc
            local_rollout_forward_batch_size auto_find_batch_size group_by_length length_column_name
            cast_lm_head_to_fp32 average_tokens_across_devices use_cpu bf16_full_eval config_file eval_on_start
            batch_eval_metrics fp16_full_eval activation_checkpointing activation_checkpointing_kwargs use_cache
            prediction_loss_only eval_do_concat_batches eval_use_gather_object dataloader_multiprocessing_context
            dataloader_in_order label_names train_sampling_strategy ddp_broadcast_buffers ddp_static_graph
            fp16_opt_level tp_size skip_memory_metrics
    """,
    ),
    **same_rule(
        Idle(ENGINE),
        """
            vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port
            vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_max_model_len
            vllm_tensor_parallel_size vllm_device vllm_dtype vllm_enable_prefix_caching cache_implementation
            use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
    """,
    ),
    **same_rule(
        Idle("a checkpoint holds all that a run resumes from"),
        """
            save_only_model save_safetensors save_on_each_node enable_jit_checkpoint
            restore_callback_states_from_checkpoint ignore_data_skip
    """,
    ),
    **same_rule(
        Idle(TRAINER),
        """
            trainer.processing_class trainer.data_collator trainer.reward_processing_classes trainer.args
    """,
    ),
    "model_revision": off("download that revision, and give its folder", "main"),
    "trust_remote_code": Idle("no code of a model's folder is run"),
    "remove_unused_columns": Idle("reward functions get all columns"),
    "disable_dropout": Idle("models have no dropout here"),
    "dataset_train_split": Idle("the file names the split"),
    "dataset_test_split": Idle("the file names the split"),
    "dataset_config": configurations,
    "dataset_configs": configurations,
    "dataset_split": Idle("the file names the split"),
    "dataset_prompt_column": lambda value, keys: ours.column("data.prompt_column", value, "prompt"),
    "datasets": off("one source here: data.source"),
    "streaming": Idle("rows are read whole"),
    "test_split_size": off("name the problems in eval.source"),
    "trainer.quantization_config": off("only the base of adapters is quantized: set lora.base_dtype"),
    "dataset_streaming": Idle("rows are read whole"),
    "ignore_bias_buffers": Idle("of torch"),
    "do_eval": Idle("eval_strategy decides"),
    "data_seed": Idle("config.seed decides"),
    "full_determinism": to("deterministic", bool),
    "metric_for_best_model": Idle("the best checkpoints are those with the best accuracy"),
    "greater_is_better": Idle("the best checkpoints are those with the best accuracy"),
    "load_best_model_at_end": off("the best checkpoints are kept: jaxrl export --step best"),
    "resume_from_checkpoint": off("the same --workdir resumes a run"),
    "config": unsupported("this file is not beside the script or above it: its keys have their defaults here"),
    "system_prompt": off("write it into data.convert"),
    "chat_template": off("the template is the model's: change its tokenizer_config.json"),
    "chat_template_path": off("the template is the model's: change its tokenizer_config.json"),
    "eos_token": off("stop tokens are the model's: generation_config.json"),
    "trainer.rollout_func": off("write an environment (docs/environments.md)"),
    "trainer.environment_factory": off("write an environment (docs/environments.md)"),
    "trainer.tools": off("write an environment (docs/environments.md)"),
    "trainer.eval_dataset": off("name the problems in eval.source"),
    "trainer.optimizers": off("AdamW is the one optimizer here"),
    **{f"trainer.{key}": Idle("an object of the script") for key in ("ref_model", "reward_model", "value_model")},
}
SHARED: dict[str, Rule] = {
    "learning_rate": to("optim.learning_rate", float),
    "lr_scheduler_type": schedule("optim"),
    "lr_scheduler_kwargs": only_if(
        lambda keys: keys["lr_scheduler_type"] == "cosine_with_min_lr",
        lambda value, keys: schedule("optim")("cosine_with_min_lr", keys),
        "lr_scheduler_type has none here",
    ),
    "warmup_steps": warmup,
    "warmup_ratio": warmup_ratio,
    "weight_decay": weight_decay,
    "adam_beta1": to("optim.b1", float),
    "adam_beta2": to("optim.b2", float),
    "adam_epsilon": to("optim.eps", float),
    "max_grad_norm": to("optim.clip_norm", float),
    # The three have one update, in different kernels.
    "optim": off("AdamW is the one optimizer here", "adamw_torch", "adamw_torch_fused", "adamw_hf"),
    "optim_args": off("AdamW is the one optimizer here"),
    "optim_target_modules": off("AdamW is the one optimizer here"),
    "neftune_noise_alpha": off("no noise on embeddings"),
    "label_smoothing_factor": off("no label smoothing", 0.0),
    "seed": to("seed", int),
    "bf16": only_if(
        lambda keys: not keys.explicit.get("torch_dtype") and not keys.explicit.get("dtype"),
        lambda value, keys: Outcome("mapped", {"model.dtype": "bfloat16" if value in (None, True) else "float32"}),
        "the model's dtype is set",
    ),
    "fp16": off("bfloat16 and float32"),
    "torch_dtype": dtype,
    "dtype": dtype,
    "gradient_checkpointing": remat,
    "save_strategy": saving,
    "save_steps": counts_updates("checkpoint.every", "save_strategy"),
    "save_total_limit": only_if(
        lambda keys: bool(keys.explicit.get("save_total_limit")), to("checkpoint.keep", int), "checkpoint.keep decides"
    ),
    "eval_strategy": evaluating,
    "evaluation_strategy": evaluating,
    "eval_steps": only_if(
        lambda keys: keys["eval_strategy"] == "steps" and keys["eval_steps"],
        lambda value, keys: in_rollouts("eval.every", value, keys),
        "eval_strategy is no, or it is not set",
    ),
    "eval_delay": off("evaluations begin at step 0", 0),
    "logging_steps": Idle("every step is logged"),
    "model_name_or_path": model,
    "trainer.model": model,
    "dataset_name": dataset,
    "trainer.train_dataset": dataset,
    "trainer.train_dataset.steps": rows_changed,
    "model_init_kwargs": init_kwargs,
    "trainer.peft_config": adapter,
    **same_rule(part_of_adapter, "r lora_alpha target_modules use_rslora", "trainer.peft_config."),
    "trainer.peft_config.task_type": Idle("a policy is a causal language model"),
    "trainer.peft_config.inference_mode": Idle("an adapter learns"),
    "trainer.peft_config.lora_dropout": off("adapters have no dropout", 0.0),
    "trainer.peft_config.bias": off("biases do not learn with LoRA", "none"),
    "trainer.peft_config.modules_to_save": off("only adapters are trained with LoRA"),
    "trainer.peft_config.init_lora_weights": off("adapters begin as in PEFT: A random, B zero", True),
    "trainer.peft_config.*": off("no counterpart in the adapters here"),
    "use_peft": adapter,
    **same_rule(adapter, "lora_r lora_alpha lora_target_modules"),
    "use_rslora": adapter,
    "use_dora": off("adapters are plain LoRA"),
    "lora_dropout": off("adapters have no dropout", 0.0),
    "lora_modules_to_save": off("only adapters are trained with LoRA"),
    "lora_target_parameters": off("name modules in lora_target_modules"),
    "lora_task_type": Idle("a policy is a causal language model"),
    **same_rule(quantized, "load_in_8bit load_in_4bit"),
    **same_rule(
        Idle("of 4 bits; load_in_4bit says what there is here"),
        "bnb_4bit_quant_type bnb_4bit_quant_storage bnb_4bit_compute_dtype bnb_4bit_use_double_quant",
    ),
    "use_bnb_nested_quant": Idle("of 4 bits; load_in_4bit says what there is here"),
    "num_processes": part_of_batch(),
    "world_size": part_of_batch(),
    **dict.fromkeys(launchers.COUNTS, part_of_batch()),
    "accelerate.num_machines": Idle("num_processes counts those of all machines"),
    "accelerate.config_file": lambda value, keys: (
        Outcome("mapped", {}, "its num_processes is read")
        if value
        else Outcome("unsupported", reason="not beside the script or above it: --processes says what it may say")
    ),
    "deepspeed.hostfile": off("it may name more machines: --processes counts them all"),
    **{f"{name}.*": Idle(LAUNCHER) for name in launchers.LAUNCHERS},
    "dataloader_drop_last": Idle("the last, smaller batch of a pass is dropped"),
    # A key of two stars: a **mapping that the script gets from elsewhere. [*] is a star itself.
    "[*][*]*": unsupported("arguments that another object holds"),
}
GRPO_RULES: dict[str, Rule] = {
    "per_device_train_batch_size": micro,
    "gradient_accumulation_steps": part_of_batch("prompts_per_update"),
    "generation_batch_size": part_of_batch("prompts_per_step"),
    "steps_per_generation": part_of_batch("prompts_per_step"),
    "num_generations": lambda value, keys: Outcome("mapped", {"group_size": int(value)}),
    "num_generations_eval": off("one greedy completion for each problem", 1),
    "num_iterations": to("epochs", int),
    "num_train_epochs": epochs,
    "max_steps": counts_updates("num_steps", ""),
    "max_prompt_length": prompt_limit,
    "max_completion_length": was("max_completion_length", to("rollout.max_completion_tokens", int)),
    "shuffle_dataset": lambda value, keys: (
        Outcome("mapped", {}) if value else Outcome("unsupported", reason="rows are shuffled in every pass here")
    ),
    # TRL's trainer divides logits by it too, as here.
    "temperature": to("rollout.temperature", float),
    "top_p": lambda value, keys: Outcome(
        "changed" if value < 1 else "mapped", {"rollout.top_p": float(value)}, SCORED * (value < 1)
    ),
    "top_k": lambda value, keys: Outcome(
        "changed" if value else "mapped", {"rollout.top_k": int(value or 0)}, SCORED * bool(value)
    ),
    "min_p": off("top_k and top_p are there", 0.0),
    "repetition_penalty": off("the sampled distribution is the one that is scored", 1.0),
    "generation_kwargs": off("top_k, top_p and temperature are there", {}),
    "chat_template_kwargs": lambda value, keys: (
        Outcome("mapped", {"data.chat_template_args": dict(value)}) if value else Outcome("no effect", reason="not set")
    ),
    "use_vllm": vllm,
    "vllm_structured_outputs_regex": off("completions are not constrained"),
    "vllm_guided_decoding_regex": off("completions are not constrained"),
    **same_rule(
        Idle("rollouts come from the sampler in JAX; config.importance has such weights"),
        "correction mode clip_max clip_min cap",
        "vllm_importance_sampling_",
    ),
    "beta": kl,
    # The KL of a token times its ratio, as in DeepSeek-V3.2: unbiased also for samples of an older policy.
    "use_bias_correction_kl": only_if(
        lambda keys: bool(keys["beta"]),
        was("use_bias_correction_kl", to("kl.weighted", bool)),
        "beta is 0: there is no KL penalty",
    ),
    "sync_ref_model": reference_sync,
    "ref_model_mixup_alpha": reference_sync,
    "ref_model_sync_steps": reference_sync,
    "loss_type": was("loss_type", loss),
    "importance_sampling_level": lambda value, keys: Outcome(
        "mapped", {name: x for name, x in loss(keys["loss_type"], keys).fields.items() if name == "loss.name"}
    ),
    "epsilon": loss_argument(("grpo", "dapo", "bnpo", "dr_grpo", "luspo"), "the loss has no such clip"),
    "epsilon_high": loss_argument(("grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo"), "the loss has no such clip"),
    "delta": loss_argument(("grpo", "dapo", "bnpo", "dr_grpo"), "the loss has no such bound"),
    **same_rule(loss_argument(("sapo",), "loss_type is not sapo"), "sapo_temperature_pos sapo_temperature_neg"),
    **same_rule(
        loss_argument(("vespo",), "loss_type is not vespo"), "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
    ),
    "scale_rewards": scaling,
    "multi_objective_aggregation": objectives,
    "reward_weights": weights,
    "reward_funcs": rewards,
    "trainer.reward_funcs": rewards,
    "reward_model_name_or_path": alone_reward_model,
    "mask_truncated_completions": truncated,
    "top_entropy_quantile": lambda value, keys: Outcome(
        "changed" if value < 1 else "mapped",
        {"mask.top_entropy": float(value)},
        "the quantile of the whole rollout here, of a micro-batch there" * (value < 1),
    ),
    "off_policy_mask_threshold": lambda value, keys: Outcome("mapped", {"mask.off_policy": float(value or 0.0)}),
    "entropy_coef": to("entropy.coef", float),
    "use_adaptive_entropy": adaptive_entropy,
    "entropy_coef_min": off("it is 0", 0.0),
    **same_rule(adaptive_entropy, "entropy_target entropy_coef_delta entropy_coef_max"),
    "max_tool_calling_iterations": off("write an environment (docs/environments.md)"),
    "router_aux_loss_coef": off("no such term", 0.0),
}
REFERENCE_DEFAULTS = {"sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512}
BOTH: dict[str, Any] = {
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "bf16": None,
    "gradient_checkpointing": True,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "eval_steps": None,
    "logging_steps": 10,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "load_in_8bit": False,
    "load_in_4bit": False,
    "lora_target_modules": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
}
# Defaults that another key of the file may replace.
OPEN_RULES: dict[str, Rule] = {
    "(model)": if_not_given(model, "model_name_or_path", "trainer.model"),
    "(data)": if_not_given(dataset, "dataset_name", "trainer.train_dataset"),
    "(rewards)": if_not_given(rewards, "reward_funcs", "trainer.reward_funcs", "reward_model_name_or_path"),
    "(prompts)": if_not_given(prompt_limit, "max_prompt_length"),
}
# No key of a file has parentheses. So these always count as defaults, and their rules see whether a key says the same.
OPEN_DEFAULTS: dict[str, Any] = {"(model)": "", "(data)": "", "(rewards)": None, "(prompts)": None}
GRPO_DEFAULTS = (
    BOTH
    | REFERENCE_DEFAULTS
    | OPEN_DEFAULTS
    | {
        "learning_rate": 1e-6,
        "num_generations": 8,
        "generation_batch_size": None,
        "steps_per_generation": None,
        "num_iterations": 1,
        "max_steps": -1,
        "max_completion_length": 512,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "use_vllm": False,
        "beta": 0.0,
        "use_bias_correction_kl": True,
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "mask_truncated_completions": False,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "entropy_coef_max": 1.0,
        "entropy_coef_delta": 0.005,
        "entropy_target": 0.2,
    }
)
GRPO = System("TRL's GRPO", "1.16.0", GRPO_RULES | SHARED | IDLE | OPEN_RULES, GRPO_DEFAULTS, lambda keys: "grpo")
