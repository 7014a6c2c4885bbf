"""What TRL's keys mean: the rules for the loss, the rewards, the data, and the model with its adapter."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate import images, ours
from jaxrl_llm.tools.translate.family import LOGGERS
from jaxrl_llm.tools.translate.family import model as model_path
from jaxrl_llm.tools.translate.outcome import Keys, OnlyIf, Outcome, Rule, not_here
from jaxrl_llm.tools.translate.table import Row
from jaxrl_llm.tools.translate.trl_counts import in_rollouts, updates

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


def schedule(value: Any, keys: Keys) -> Outcome:
    """The schedule of the learning rate."""
    if value == "cosine_with_min_lr":
        arguments = keys.explicit.get("lr_scheduler_kwargs") or {}
        # transformers takes one of the two: the rate itself, or a share of the highest one.
        low = arguments.get("min_lr", float(keys["learning_rate"]) * arguments.get("min_lr_rate", 0.0))
        return Outcome("mapped", {"optim.decay": "cosine", "optim.end": float(low)})
    if value not in SCHEDULES:
        return not_here("optim.decay", f"there is constant, linear and cosine, not {value}")
    return Outcome("mapped", {"optim.decay": SCHEDULES[value], "optim.end": 0.0})


def lowest(value: Any, keys: Keys) -> Outcome:
    """The rate at the end of a cosine, which `schedule` has used."""
    return Outcome("mapped", {"optim.end": schedule("cosine_with_min_lr", keys).fields["optim.end"]})


def half(value: Any, keys: Keys) -> Outcome:
    """Whether products are in bfloat16, as by default."""
    return Outcome("mapped", {"model.dtype": "bfloat16" if value in (None, True) else "float32"})


def launcher_file(value: Any, keys: Keys) -> Outcome:
    """The file of accelerate."""
    if value:
        return Outcome("mapped", {}, "its num_processes is read")
    return Outcome("unsupported", reason="not beside the script or above it: --processes says what it may say")


def prompt_column(value: Any, keys: Keys) -> Outcome:
    return ours.column("data.prompt_column", value, "prompt")


def top_entropy(value: Any, keys: Keys) -> Outcome:
    """The share of tokens with the highest entropy that learn."""
    reason = "the quantile of the whole rollout here, of a micro-batch there"
    return Outcome("changed" if value < 1 else "mapped", {"mask.top_entropy": float(value)}, reason * (value < 1))


def optimizer(value: Any, keys: Keys) -> Outcome:
    """The optimizer. Variants of AdamW have one update, in different kernels and places."""
    if value in (None, "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit"):
        return Outcome("no effect", reason="AdamW, as here")
    if str(value).startswith(("adamw_", "paged_adamw_")):
        return Outcome("changed", {}, f"AdamW, whose moments are rounded in {value}; here they are float32")
    return not_here("optim", f"AdamW is the one optimizer here, not {value}")


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
    by_tokens = "loss_type" in keys.defaults and keys["loss_type"] not in ("grpo", "dr_grpo", "sapo", "luspo")
    if not value or by_tokens:
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


def kl(value: Any, keys: Keys) -> Outcome:
    """The coefficient of k3 in the loss."""
    if not value:
        return Outcome("mapped", {"kl": None})
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
    """Says of a default that it was another one in earlier versions: the file may be for one of them."""
    if isinstance(rule, OnlyIf):
        return replace(rule, rule=was(key, rule.rule))

    def noted(value: Any, keys: Keys) -> Outcome:
        newest = key not in keys and OLDER[key].startswith(str(value))
        return replace(rule(value, keys), kind="changed", reason=OLDER[key]) if newest else rule(value, keys)

    return noted


def rewards(value: Any, keys: Keys) -> Outcome:
    """The reward functions, by name."""
    if not value:
        why = "the file names no reward function"
        unknown = {"reward.functions": why, "eval.function": why}
        return Outcome("changed", ours.reward_fields((ours.ACCURACY,)), unknown=unknown)
    listed = [str(name) for name in (value if isinstance(value, list) else [value])]
    all_weights = keys.explicit.get("reward_weights") or [1.0] * len(listed)
    weight_of = dict(zip(listed, all_weights, strict=False)) if len(listed) == len(all_weights) else {}
    # The penalty for long completions is a reward function there, and a field here.
    soft = [name for name in listed if "soft_overlong" in name]
    # TRL takes a model's name among the functions: it has a slash, as no function has.
    models = [name for name in listed if "/" in name]  # of the hub, or folders
    names = [name for name in listed if name not in soft + models]
    fields, yours = ours.rewards(names, [float(weight_of.get(name, 1.0)) for name in names]) if names else ({}, {})
    reasons = ["open-r1's format also asks for a line break at each tag"] if "format" in names else []
    if soft:
        # The command line of TRL has 256 tokens.
        tokens = re.search(r"\((\d+)\)", soft[0])
        fields |= {"reward.overlong_tokens": int(tokens[1]) if tokens else 256}
        reasons.append("get_soft_overlong_punishment is reward.overlong_tokens, before rollout.max_completion_tokens")
    if models:
        model = ours.reward_model(models[0], "it reads prompt and completion as the policy does")
        fields |= model.fields | {"reward_model.weight": float(weight_of.get(models[0], 1.0))}
        reasons += [model.reason, *(f"a second reward model has no counterpart: {name}" for name in models[1:])]
        if not names:
            fields |= {"reward.functions": (), "reward.weights": ()}
            yours = {"eval.function": JUDGE}
    if not names and not models:
        return not_here("reward.functions", "only an overlong penalty: reward.overlong_tokens")
    # A convert function makes the rows, with their answers.
    if "trainer.train_dataset.steps" in keys:
        fields.pop("data.answer_column", None)
    unknown = {"reward_model": reasons[-1]} if models[1:] else {}
    kind = "unsupported" if unknown else "changed" if yours or reasons else "mapped"
    return Outcome(kind, fields, "; ".join(reasons), yours, unknown)


def alone_reward_model(value: Any, keys: Keys) -> Outcome:
    """A reward model that a command names beside the reward functions."""
    if not value:
        return Outcome("no effect", reason="not set")
    outcome = ours.reward_model(str(value), "it reads prompt and completion as the policy does")
    if keys.explicit.get("reward_funcs"):
        return outcome
    fields = {"reward.functions": (), "reward.weights": ()}
    return Outcome(outcome.kind, outcome.fields | fields, outcome.reason, {"eval.function": JUDGE})


def first_reward(value: Any, keys: Keys) -> Outcome:
    """PPO's learned reward, which TRL's scripts also begin the value model with."""
    outcome = ours.reward_model(str(value), "it reads prompt and completion as the policy does")
    critic = {"critic.path": keys.explicit.get("trainer.value_model", str(value))}
    fields = outcome.fields | critic | {"reward.functions": (), "reward.weights": ()}
    return Outcome(outcome.kind, fields, f"{outcome.reason}; the critic begins as it", {"eval.function": JUDGE})


def weights(value: Any, keys: Keys) -> Outcome:
    """The weights of the reward functions."""
    if value is None:
        return Outcome("no effect", reason="not set: every function has the weight 1")
    names = keys.explicit.get("reward_funcs")
    count = len(names) if isinstance(names, list) else int(bool(names))
    if len(value) != count:
        return not_here("reward.weights", f"{len(value)} weights for {count or 'unknown'} functions")
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
    if "dataset_mixer" in keys:
        return Outcome("no effect", reason="dataset_mixer names the rows")
    return Outcome("changed", {"data.source": "my_data.rows", "data.convert": ""}, unknown=unknown)


def mixer(value: Any, keys: Keys) -> Outcome:
    """The data sets of alignment-handbook, {name: share}, whose splits `dataset_splits` names."""
    shares = dict(value or {})
    splits = [str(split) for split in keys.explicit.get("dataset_splits", ["train", "test"])]
    train = [split for split in splits if "train" in split]
    if list(shares.values()) != [1.0] or len(train) != 1:
        return not_here("data.source", "a mixture, or a part of the rows: data.mixture")
    return ours.dataset("data", next(iter(shares)), train[0])


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
        return Outcome("mapped", dataset(keys["dataset_name"], keys).fields)
    return not_here("data.source", "one configuration in a source: data.mixture")


def rows_changed(value: Any, keys: Keys) -> Outcome:
    """What a script does with the rows that it has loaded."""
    columns = "prompt and answer" if "num_generations" in keys.defaults else "prompt, chosen and rejected"
    why = f"the script calls {value}: a function of a row that does the same, and makes the columns {columns}"
    unknown = {"data.source": f"the script calls {value}, which may leave rows out"}
    return Outcome("changed", {"data.convert": "my_data.convert"}, "code is not read", {"data.convert": why}, unknown)


def evaluating(value: Any, keys: Keys) -> Outcome:
    """When evaluations are made: of problems, or of held-out pairs, whose order TRL logs as a metric."""
    if value in ("no", None, False):
        return Outcome("mapped", ours.NO_EVALUATION)
    # transformers takes logging_steps where eval_steps is not set.
    every = in_rollouts("eval.every", keys["eval_steps"] or keys["logging_steps"], keys)
    pairs = "num_generations" not in keys.defaults
    fields = every.fields | {"eval.source": "data/test.parquet", "eval.convert": ""}
    fields |= {"eval.function": "preference"} if pairs else {}
    yours, unknown = dict[str, str](), dict(every.unknown)
    if source := held_out(keys):
        outcome = ours.dataset("eval", source, str(keys.explicit.get("dataset_test_split", "test")))
        fields, yours = fields | outcome.fields, outcome.yours
    else:
        unknown["eval.source"] = "the file with what to evaluate; this name is a placeholder"
    reason = "the share of held-out pairs in the right order" if pairs else "one greedy completion for each problem"
    return Outcome("changed", fields, reason, yours, unknown)


def evaluating_rows(value: Any, keys: Keys) -> Outcome:
    """What a script does with the rows that it evaluates."""
    why = f"the script calls {value}: a function of a row that does the same"
    unknown = {"eval.source": f"the script calls {value}, which may leave rows out"}
    return Outcome("changed", {"eval.convert": "my_data.convert"}, "code is not read", {"eval.convert": why}, unknown)


def saving(value: Any, keys: Keys) -> Outcome:
    """When checkpoints are saved."""
    if value == "steps":
        return Outcome("mapped", {})
    reasons = {"no": "a run here always can resume", "epoch": "here in steps: checkpoint.every"}
    return Outcome("changed", {"checkpoint.every": 25}, reasons.get(str(value), "here every checkpoint.every steps"))


def held_out(keys: Keys) -> str:
    """Returns the rows to evaluate: the trainer's, or a split of those to learn; "": the file does not say."""
    if rows := keys.explicit.get("trainer.eval_dataset"):
        return str(rows)
    if "dataset_mixer" in keys:
        tests = [str(split) for split in keys.explicit.get("dataset_splits", []) if "test" in str(split)]
        return f"{next(iter(keys['dataset_mixer']))}@{(tests or ['test'])[0]}"
    # The programs of TRL and open-r1 evaluate another split. A file has none.
    name = str(keys.explicit.get("dataset_name") or "")
    other = "/" in name and not name.endswith(ours.FILES)
    return name if other and ("num_generations" not in keys.defaults or "dataset_test_split" in keys) else ""


def held_out_rows(value: Any, keys: Keys) -> Outcome:
    """The rows that a script evaluates."""
    if not value or keys["eval_strategy"] in ("no", None):
        return Outcome("no effect", reason="eval_strategy is no, or there are none")
    outcome = evaluating("steps", keys)
    return Outcome(
        "mapped", {"eval.source": outcome.fields["eval.source"]}, yours=outcome.yours, unknown=outcome.unknown
    )


def model(value: Any, keys: Keys) -> Outcome:
    """The policy's model: a name, or an object of the script."""
    if value and "/" in str(value):
        return model_path(value, keys)
    return Outcome("changed", {"model.path": "my_model"}, unknown={"model.path": "a folder or a hub id"})


def tokenizer(value: Any, keys: Keys) -> Outcome:
    """The tokenizer, with its template: here the model's."""
    if value in (None, keys.explicit.get("model_name_or_path"), keys.explicit.get("sft_model_path")):
        return Outcome("no effect", reason="it is the model's")
    return not_here(
        "model.path", f"the tokenizer is the model's, not that of {value}: put its files into the model's folder"
    )


def reference(value: Any, keys: Keys) -> Outcome:
    """The reference, which a script may load by itself."""
    if value in (None, keys.explicit.get("model_name_or_path"), keys.explicit.get("sft_model_path")):
        return Outcome("no effect", reason="it is the model that the run begins with, as here")
    return not_here("model.path", f"the reference is the model that the run begins with, not {value}")


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
        return not_here("model.path", f"no counterpart: {', '.join(value)}")
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


def adapted(keys: Keys) -> bool:
    """Whether adapters learn alone: by ModelConfig, or by a LoraConfig around the model or in the trainer."""
    return bool(keys["use_peft"] or keys.explicit.get("trainer.peft_config"))


def adapter(value: Any, keys: Keys) -> Outcome:
    """An adapter: the keys of ModelConfig, or the arguments of a LoraConfig, which have the same names here."""
    if not adapted(keys):
        return Outcome("no effect", reason="use_peft is False")
    config = keys.explicit.get("trainer.peft_config")
    # PEFT's own defaults. Those of ModelConfig are 16 and 32.
    rank, alpha = (keys.explicit.get(key, 8) if config else keys[key] for key in ("lora_r", "lora_alpha"))
    targets = keys["lora_target_modules"]
    # There is one size here, which loses less than 4 bits.
    base_dtype = "int8" if keys["load_in_8bit"] or keys["load_in_4bit"] else ""
    outcome = ours.lora(rank, alpha, targets, rs=bool(keys.explicit.get("use_rslora")), base_dtype=base_dtype)
    if config not in (None, "LoraConfig"):
        why = f"as in {config}, where the script starts from"
        unknown = {f"adapters.{name}": why for name in ("rank", "alpha", "targets", "rs")}
        return Outcome("changed", outcome.fields | {"adapters.path": str(config)}, "goes on with adapters", {}, unknown)
    excluded = keys.explicit.get("trainer.peft_config.exclude_modules")
    # Rows whose name the file does not say leave no doubt about an adapter: only a remark depends on them.
    return images.beside_tower(outcome, targets, excluded, keys) if images.evidence(keys.values) else outcome


def part_of_adapter(row: Row) -> Rule:
    """An argument of an adapter, which the rule of the whole has used."""

    def rule(value: Any, keys: Keys) -> Outcome:
        outcome, name = adapter(value, keys), row.field
        if name not in outcome.fields:
            return outcome
        with_reason = name == "adapters.targets"
        unknown = {key: why for key, why in outcome.unknown.items() if key == name}
        kind = outcome.kind if with_reason else "mapped"
        return Outcome(kind, {name: outcome.fields[name]}, outcome.reason * with_reason, unknown=unknown)

    return rule


def quantized(value: Any, keys: Keys) -> Outcome:
    """The base of adapters in integers."""
    if not value:
        return Outcome("no effect", reason="not in use")
    if not adapted(keys):
        return Outcome("unsupported", reason="only the base of adapters is quantized: set use_peft")
    reason = "8 bits with a scale for each output of a kernel; embedding and head stay as they are"
    return Outcome("changed", {"adapters.base_dtype": "int8"}, reason)


def not_followed(row: Row) -> Rule:
    """Something that a script does with an object, or an argument that no table knows."""

    def rule(value: Any, keys: Keys) -> Outcome:
        reason = f"not read: {value}"
        return Outcome(
            "unsupported", reason=reason, unknown=dict.fromkeys(row.fields.split() or [key_of(value, keys)], reason)
        )

    return rule


def key_of(value: Any, keys: Keys) -> str:
    return next((key for key, x in keys.values.items() if x is value), "trainer")


OVERRIDES = {  # methods of a trainer, and what a class of the script may change by them
    "compute_loss _compute_loss compute_liger_loss dpo_loss cpo_loss simpo_loss": "loss aggregate kl",
    "_generate_and_score_completions _prepare_inputs _calculate_rewards": "advantage reward rollout kl",
    "_generate _generate_single_turn": "rollout",
    "create_optimizer create_scheduler create_optimizer_and_scheduler": "optim",
    "get_train_dataloader _get_train_sampler": "data",
    "evaluate prediction_step evaluation_loop get_eval_dataloader": "eval",
    "log _save_checkpoint save_model": "",
}


def overridden(value: Any, keys: Keys) -> Outcome:
    """A method of a class of the script, or something that the script does with its trainer."""
    method = key_of(value, keys).rpartition(".")[2].rstrip("()=")
    decided = next((fields for names, fields in OVERRIDES.items() if method in names.split()), None)
    if decided == "":
        return Outcome("no effect", reason="it logs and saves")
    names = (decided or "loss aggregate kl advantage reward rollout optim data").split()
    return Outcome("unsupported", reason=f"not read: {value}", unknown=dict.fromkeys(names, f"not read: {value}"))


QUIET_CALLBACKS = re.compile(r"\w*(Wandb|TensorBoard|Trackio|MLflow|Comet|Printer|Progress|LogCompletions|Profil)\w*")


def callbacks(value: Any, keys: Keys) -> Outcome:
    """Callbacks of the trainer: those that log change nothing."""
    others = [str(name) for name in value or [] if not QUIET_CALLBACKS.fullmatch(str(name).rpartition(".")[2])]
    if not others:
        return Outcome("no effect", reason="they log")
    reason = f"what {', '.join(others)} does is not read"
    return Outcome("unsupported", reason=reason, unknown={"trainer.callbacks": reason})


def trackers(value: Any, keys: Keys) -> Outcome:
    """Where numbers are logged."""
    listed = [str(name) for name in (value if isinstance(value, list) else [value])]
    names = tuple(name for name in listed if name in LOGGERS)
    others = [name for name in listed if name not in (*LOGGERS, "none", "None", "all")]
    reason = f"there is no {', '.join(others)} here" if others else ""
    if not names:
        return Outcome("changed" if others else "no effect", reason=reason or "metrics.jsonl has all numbers")
    # The project that transformers takes without one.
    projects = [keys.explicit.get(key) for key in ("wandb_project", "project")]
    project = next(filter(None, projects), "huggingface") if names != ("tensorboard",) else ""
    return Outcome("changed" if others else "mapped", {"log.to": names, "log.project": str(project)}, reason)


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


NLL = "TRL divides by the tokens of all chosen completions of a micro-batch, here by those of each completion"
OF_PAIRS = {"aggregate.mode": "sequence_mean", "aggregate.constant_length": 0}
UNLIMITED = 4096  # tokens of prompt and completion, where the file sets no limit


def lengths(value: Any, keys: Keys) -> Outcome:
    """The limits of a prompt and of a completion. TRL cuts pairs that are longer in all, and keeps the others."""
    whole = int(keys["max_length"] or UNLIMITED)
    prompt = int(keys["max_prompt_length"] or whole)
    completion = int(keys.explicit.get("max_completion_length") or whole)
    fields = {"data.max_prompt_tokens": prompt, "rollout.max_completion_tokens": completion}
    cut = f"a pair is cut after {whole} tokens there" if keys["max_length"] else "no limit there"
    return Outcome("changed", fields, f"{cut}; here both parts have a limit, and a longer pair is dropped")


def dpo_loss(value: Any, keys: Keys) -> Outcome:
    """The loss of DPO, alone or with the cross-entropy of the chosen completion."""
    names = value if isinstance(value, list) else str(value).split(",")
    weights = dict(zip(names, keys.explicit.get("loss_weights") or [1.0] * len(names), strict=True))
    if not weights.keys() <= {"sigmoid", "sft"} or not weights.get("sigmoid"):
        reason = f"there is sigmoid, alone or with sft, not {' + '.join(names)}; this config keeps dpo"
        return not_here("loss.name", reason)
    # Older files say the second part by a key of its own.
    nll = weights.get("sft", 0.0) / weights["sigmoid"] or float(keys.explicit.get("rpo_alpha") or 0.0)
    fields = {"loss.name": "dpo", "loss.beta": float(keys["beta"]), "loss.nll_coef": float(nll)}
    fields |= {"loss.label_smoothing": float(keys["label_smoothing"])} | OF_PAIRS
    reasons = [NLL] * bool(nll)
    if weights["sigmoid"] != 1:
        reasons.append(f"the whole loss is divided by {weights['sigmoid']:g}, which AdamW does not see")
    return Outcome("changed" if reasons else "mapped", fields, "; ".join(reasons))


def simpo_loss(value: Any, keys: Keys) -> Outcome:
    """The loss of SimPO, with the cross-entropy of the chosen completion: of CPOConfig, or of SimPO's own trainer."""
    is_simpo_trainer = "gamma_beta_ratio" in keys.defaults
    if value != ("sigmoid" if is_simpo_trainer else "simpo"):
        return not_here("loss.name", f"of CPOConfig there is simpo, not {value}; this config keeps simpo")
    beta, nll = float(keys["beta"]), float(keys["sft_weight" if is_simpo_trainer else "cpo_alpha"])
    gamma = beta * float(keys["gamma_beta_ratio"]) if is_simpo_trainer else float(keys["simpo_gamma"])
    fields = {"loss.name": "simpo", "loss.beta": beta, "loss.gamma": gamma, "loss.nll_coef": nll}
    fields |= {"loss.label_smoothing": float(keys["label_smoothing"])} | OF_PAIRS
    return Outcome("changed" if nll else "mapped", fields, f"{NLL}; TRL's also counts the prompt" * bool(nll))


def loss_argument(row: Row) -> Rule:
    """An argument of the loss, which the rule of `loss_type` has used."""

    def rule(value: Any, keys: Keys) -> Outcome:
        pairs = simpo_loss if "cpo_alpha" in keys.defaults else dpo_loss
        outcome = (loss if "epsilon" in keys.defaults else pairs)(keys["loss_type"], keys)
        fields = {name: outcome.fields[name] for name in row.fields.split() if name in outcome.fields}
        # The lower bound of CISPO is no argument.
        if value is None or not fields or (row.key, keys["loss_type"]) == ("epsilon", "cispo"):
            return Outcome("no effect", reason="not set" if value is None else "the loss has no such argument")
        return Outcome("mapped", fields)

    return rule


def rloo_penalty(value: Any, keys: Keys) -> Outcome:
    """RLOO's KL penalty: k1 of the tokens, in the reward of a completion."""
    fields = {"kl.placement": "reward", "kl.coef": float(value or 0), "kl.estimator": "k1"}
    return Outcome("mapped", fields if value else {"kl": None})


def rloo_clip(value: Any, keys: Keys) -> Outcome:
    """RLOO's clip of the ratio."""
    low = float(keys["epsilon"])
    high = low if keys["epsilon_high"] is None else float(keys["epsilon_high"])
    fields = {"loss.name": "ppo_clip", "loss.clip_low": low, "loss.clip_high": high, "loss.delta": 0.0}
    # With one update the ratio is 1: the gradient of a product of ratios is that of their sum.
    if updates(keys) == 1:
        return Outcome("mapped", fields, "one update on a rollout: the ratio is 1, and nothing is clipped")
    return Outcome("changed", fields, "a ratio for each token here; there one for a completion, the product of them")


def rloo(value: Any, keys: Keys) -> Outcome:
    """RLOO's advantage and the sum of the tokens of a completion."""
    return Outcome(
        "mapped", {"advantage.name": "rloo", "aggregate.mode": "sequence_sum", "aggregate.constant_length": 0}
    )


def both(row: Row) -> Rule:
    """A number of advantages and of the critic."""
    return lambda value, keys: Outcome("mapped", dict.fromkeys(row.fields.split(), float(value)))


def logs_samples(value: Any, keys: Keys) -> Outcome:
    """PPO's evaluation, which is no accuracy."""
    samples = value not in ("no", None)
    reason = "TRL's PPO only logs samples: set eval.every and eval.source for an accuracy" * samples
    return Outcome("changed" if samples else "mapped", ours.NO_EVALUATION, reason)


def with_critic(rule: Rule) -> Rule:
    """Applies a rule of the one optimizer of TRL's PPO to that of the critic too."""

    def both(value: Any, keys: Keys) -> Outcome:
        outcome = rule(value, keys)
        # One optimizer holds policy and critic there, so both have its rate and limits here.
        critic_fields = {f"critic.{name}": x for name, x in outcome.fields.items() if name.startswith("optim.")}
        return replace(outcome, fields=outcome.fields | critic_fields)

    return both
