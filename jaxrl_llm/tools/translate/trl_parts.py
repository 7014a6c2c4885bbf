"""Rules that translate TRL's keys of the parts of a run: model, adapters, optimizer, loggers, data and rewards.

Each rule gets the value of its key and all `Keys` of the user's file, and returns the `Outcome` in jaxrl_llm.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate import conversions, images
from jaxrl_llm.tools.translate.family import model as model_path
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, Rule, Unread, unsupported
from jaxrl_llm.tools.translate.table import SENTENCES, Row, read_names
from jaxrl_llm.tools.translate.trl_counts import in_rollouts, learns_pairs

# {lr_scheduler_type of TRL: optim.decay of jaxrl_llm}
SCHEDULES = read_names("trl_schedules")
# Names of callbacks that only log or show progress.
QUIET_CALLBACKS = re.compile(r"\w*(Wandb|TensorBoard|Trackio|MLflow|Comet|Printer|Progress|LogCompletions|Profil)\w*")
# Fields of a run whose only reward is a reward model.
NO_FUNCTIONS = {"reward.functions": (), "reward.weights": ()}
# Task of the user if a reward model is the only reward, because an evaluation needs a function.
EVALUATION_TASK = {"eval.function": "a reward function that judges the evaluation, or eval.every = 0"}
# Reasons that a translation prints.
NO_REWARD = "the file names no reward function"
SAME_TEXT = "it reads the same prompt and completion as the policy"


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
    # The precision of TRL's run has two names: the dtype of the parameters, and bf16 or fp16 of the computation.
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
    has_images = images.evidence(keys.values, "image")
    return images.adapters_beside_tower(outcome, value, excluded, keys) if has_images else outcome


def tower(value: Any, keys: Keys) -> Outcome:
    """Translates whether the vision tower is frozen to `model.vision`: TRL has no key for it, and freezes nothing."""
    return images.tower(value, adapted(keys))


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


def rewards(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `reward_funcs` to `reward`, `reward_model` and `reward.overlong_tokens`."""
    if not value:
        unknown = {"reward.functions": NO_REWARD, "eval.function": NO_REWARD}
        # Weights are known also without the functions that they are for.
        weights = keys.values.get("reward_weights")
        fields = conversions.reward_fields((conversions.ACCURACY,), weights if isinstance(weights, list) else None)
        return Outcome("changed", fields, unknown=unknown)
    # Each function is paired with its weight, if the file has as many weights as functions.
    listed = [str(name) for name in (value if isinstance(value, list) else [value])]
    # Weights that cannot be read make no other field unknown, so `keys` need not record the request.
    given_weights = keys.values.get("reward_weights") or [1.0] * len(listed)
    all_weights = given_weights if isinstance(given_weights, list) else [given_weights]
    is_weighed = len(listed) == len(all_weights) and not isinstance(given_weights, Unread)
    unknown = {} if is_weighed else {"reward.weights": f"reward_weights = {given_weights} for {len(listed)} functions"}
    weight_of = dict(zip(listed, map(float, all_weights), strict=True)) if is_weighed else {}
    # The penalty for long completions is a reward function in TRL, and a field in jaxrl_llm.
    length_penalties = [name for name in listed if "soft_overlong" in name and conversions.is_registered(name)]
    # TRL accepts reward models among the functions. The name of a model has a slash.
    models = [name for name in listed if "/" in name]
    names = [name for name in listed if name not in length_penalties + models]
    if not names and not models:
        return unsupported("reward.functions", "only an overlong penalty: reward.overlong_tokens")
    weights_of_names = [weight_of.get(name, 1.0) for name in names]
    fields, tasks = conversions.rewards(names, weights_of_names) if names else (NO_FUNCTIONS, {})
    reasons = ["open-r1's format also asks for a line break at each tag"] if "format" in names else []
    if length_penalties:
        penalty = length_penalties[0]
        # In TRL's command line, the penalty rises from 1,024 to 1,280 tokens, whatever the limit of a completion is.
        end, tokens = map(int, re.findall(r"\d+", penalty)) if "(" in penalty else (1280, 256)
        fields = fields | {"reward.overlong_tokens": tokens}
        # A limit that cannot be read makes no other field unknown, so `keys` need not record the request.
        limit = keys.values.get("max_completion_length", keys.defaults["max_completion_length"])
        reasons.append("get_soft_overlong_punishment is reward.overlong_tokens, before rollout.max_completion_tokens")
        reasons.append(SENTENCES["OVERLONG"].format("TRL"))
        if limit != end:
            unknown["reward.overlong_tokens"] = f"TRL's penalty ends at {end} tokens, and jaxrl_llm's at {limit}"
        elif weight_of.get(penalty, 1.0) != 1:
            unknown["reward.overlong_tokens"] = f"the penalty has weight 1, and {weight_of[penalty]:g} in TRL"
    if models:
        model = conversions.reward_model(models[0], SAME_TEXT)
        fields = fields | model.fields | {"reward_model.weight": weight_of.get(models[0], 1.0)}
        reasons.append(model.reason)
        tasks = tasks if names else EVALUATION_TASK
    if models[1:]:
        unknown["reward_model"] = f"a second reward model has no counterpart: {', '.join(models[1:])}"
    # A convert function makes the answers of the rows itself.
    if "trainer.train_dataset.steps" in keys:
        fields = {name: x for name, x in fields.items() if name != "data.answer_column"}
    reason = "; ".join([*reasons, *unknown.values()])
    kind = "unsupported" if unknown else "changed" if tasks or reason else "mapped"
    return Outcome(kind, fields, reason, tasks, unknown)


def reward_model(value: Any, keys: Keys) -> Outcome:
    """Translates a reward model of TRL to `reward_model`. In PPO it is the only reward, and the critic starts as it."""
    is_only_reward = "reward_funcs" not in keys.defaults
    if not value:
        return unsupported("reward_model.path", NO_REWARD) if is_only_reward else Outcome("no effect", reason="not set")
    outcome = conversions.reward_model(str(value), SAME_TEXT)
    if is_only_reward:
        critic = {"critic.path": keys.get("trainer.value_model", str(value))}
        reason = f"{outcome.reason}; the critic begins as it"
        return replace(outcome, fields=outcome.fields | critic | NO_FUNCTIONS, reason=reason, tasks=EVALUATION_TASK)
    if keys.get("reward_funcs"):
        return outcome
    return replace(outcome, fields=outcome.fields | NO_FUNCTIONS, tasks=EVALUATION_TASK)


def dataset(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `dataset_name`, a data set of the hub, a folder or a file, to `data.source`."""
    name, subset = str(value), _configuration(keys)
    # A data set that a script loads has its configuration in its name.
    if subset and ":" not in name and "/" in name and not name.endswith(conversions.FILES):
        name = f"{name}:{subset}"
    if name.endswith(conversions.FILES) or "/" in name:
        return conversions.dataset("data", name, str(keys.get("dataset_train_split", "train")))
    if "dataset_mixer" in keys:
        return Outcome("no effect", reason="dataset_mixer names the rows")
    unknown = {"data.source": "a file, or my_data.rows: a function that returns rows with the column prompt"}
    return Outcome("changed", {"data.source": "my_data.rows", "data.convert": ""}, unknown=unknown)


def mixer(value: Any, keys: Keys) -> Outcome:
    """Translates alignment-handbook's `dataset_mixer`, {data set: share}, to `data.source` if it has one data set."""
    shares = dict(value or {})
    train = _splits("train", keys)
    if list(shares.values()) != [1.0] or len(train) != 1:
        return unsupported("data.source", "a mixture, or a part of the rows: data.mixture")
    return conversions.dataset("data", next(iter(shares)), train[0])


def _splits(part: str, keys: Keys) -> list[str]:
    """Returns alignment-handbook's `dataset_splits` whose names contain `part`, which is "train" or "test"."""
    return [str(split) for split in keys.get("dataset_splits", ["train", "test"]) if part in str(split)]


def _configuration(keys: Keys) -> str:
    """Returns the configuration of a data set of the hub; "" if the file has none or several."""
    names = keys.get("dataset_config") or keys.get("dataset_configs") or ""
    listed = names if isinstance(names, list) else [names]
    return str(listed[0]) if len(listed) == 1 else ""


def configurations(value: Any, keys: Keys) -> Outcome:
    """Translates `dataset_config` of TRL or `dataset_configs`, whose name becomes a part of `data.source`."""
    if _configuration(keys):
        return Outcome("mapped", dataset(keys["dataset_name"], keys).fields)
    return unsupported("data.source", "one configuration in a source: data.mixture")


def changed_rows(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates a script's calls that change its loaded rows: the user must write them as `data.convert`."""
    source, convert = f"{row.field_section}.source", f"{row.field_section}.convert"
    columns = "prompt, chosen and rejected" if learns_pairs(keys) else "prompt and answer"
    task = f"the script calls {value}: a function of a row that does the same, and makes the columns {columns}"
    unknown = {source: f"the script calls {value}, which may leave rows out"}
    return Outcome("changed", {convert: "my_data.convert"}, "code is not read", {convert: task}, unknown)


def prompt_limit(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `max_prompt_length` to `data.max_prompt_tokens`."""
    trl_limit = "TRL has no limit" if value is None else "TRL cuts a longer prompt"
    limit = 2048 if value is None else int(value)
    return Outcome("changed", {"data.max_prompt_tokens": limit}, f"{trl_limit}; jaxrl_llm drops a longer prompt")


def read_prompt_limit(value: Any, keys: Keys) -> Outcome:
    """Translates `max_prompt_length` of GRPO and RLOO, which the last releases that accept it do not read."""
    outcome = prompt_limit(value, keys)
    if value is None or keys.defaults["max_prompt_length"] is not None:
        return outcome
    return replace(outcome, reason="TRL no longer reads it, and cuts no prompt; jaxrl_llm drops a longer prompt")


def pair_limits(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's limits of pairs: TRL cuts a pair to `max_length` tokens, and jaxrl_llm drops a longer one."""
    # Prompt and completion each have this limit if the file sets no limit of their own.
    limit = int(keys["max_length"] or 4096)
    fields = {
        "data.max_prompt_tokens": int(keys["max_prompt_length"] or limit),
        "rollout.max_completion_tokens": int(keys.get("max_completion_length") or limit),
    }
    limit_reason = f"TRL cuts a pair to {limit} tokens" if keys["max_length"] else "TRL has no limit"
    return Outcome("changed", fields, f"{limit_reason}; jaxrl_llm limits each part, and drops a longer pair")


def evaluates(keys: Keys) -> bool:
    """Whether the run of the other trainer evaluates, by TRL's `eval_strategy`."""
    return keys["eval_strategy"] not in ("no", None, False)


def evaluation(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `eval_strategy` to the section `eval`, which evaluates problems or held-out pairs."""
    if not evaluates(keys):
        return Outcome("mapped", conversions.NO_EVALUATION)
    # transformers takes logging_steps if eval_steps is not set.
    evaluation_steps = in_rollouts("eval.every", keys["eval_steps"] or keys["logging_steps"], keys)
    held_out = held_out_rows(value, keys)
    fields = evaluation_steps.fields | {"eval.convert": ""} | held_out.fields
    pairs = learns_pairs(keys)
    fields |= {"eval.function": "preference"} if pairs else {}
    reason = "the share of held-out pairs in the right order" if pairs else "one greedy completion for each problem"
    reason += f"; {SENTENCES['EVERY_ROW']}"
    return Outcome("changed", fields, reason, held_out.tasks, evaluation_steps.unknown | held_out.unknown)


def held_out_rows(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `eval_dataset`, or the test split of its data set, to `eval.source`."""
    source = str(keys.get("trainer.eval_dataset") or "")
    name = str(keys.get("dataset_name") or "")
    if not source and "dataset_mixer" in keys:
        source = f"{next(iter(keys['dataset_mixer']))}@{[*_splits('test', keys), 'test'][0]}"
    # A data file has one split, so only a data set of the hub has rows to evaluate.
    elif not source and "/" in name and not name.endswith(conversions.FILES):
        source = name if learns_pairs(keys) or "dataset_test_split" in keys else ""
    if source:
        outcome = conversions.dataset("eval", source, str(keys.get("dataset_test_split", "test")))
        return replace(outcome, fields={"eval.source": outcome.fields["eval.source"]})
    task = "the file with what to evaluate; this name is a placeholder"
    return Outcome("mapped", {"eval.source": "data/test.parquet"}, unknown={"eval.source": task})
