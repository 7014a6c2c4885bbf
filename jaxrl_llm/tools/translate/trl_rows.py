"""Rules that translate TRL's keys of the data and the rewards to `data`, `eval`, `reward` and `reward_model`.

Each rule gets the value of its key and all `Keys` of the user's file, and returns the `Outcome` in jaxrl_llm.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate import conversions
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, Unread, unsupported
from jaxrl_llm.tools.translate.table import SENTENCES, Row
from jaxrl_llm.tools.translate.trl_counts import in_rollouts, learns_pairs

# Fields of a run whose only reward is a reward model.
NO_FUNCTIONS = {"reward.functions": (), "reward.weights": ()}
# Task of the user if a reward model is the only reward, because an evaluation needs a function.
EVALUATION_TASK = {"eval.function": "a reward function that judges the evaluation, or eval.every = 0"}
NO_REWARD = "the file names no reward function"
SAME_TEXT = "it reads the same prompt and completion as the policy"


def rewards(value: Any, keys: Keys) -> Outcome:
    """Translates TRL's `reward_funcs` to `reward`, `reward_model` and `reward.overlong_tokens`."""
    if not value:
        unknown = {"reward.functions": NO_REWARD, "eval.function": NO_REWARD}
        # Weights are known also without the functions that they are for.
        weights = keys.values.get("reward_weights")
        fields = conversions.reward_fields((conversions.ACCURACY,), weights if isinstance(weights, list) else None)
        return Outcome("changed", fields, unknown=unknown)
    listed = [str(name) for name in (value if isinstance(value, list) else [value])]
    # Weights that cannot be read make no other field unknown, so `keys` need not record the request.
    given_weights = keys.values.get("reward_weights") or [1.0] * len(listed)
    all_weights = given_weights if isinstance(given_weights, list) else [given_weights]
    is_weighed = len(listed) == len(all_weights) and not isinstance(given_weights, Unread)
    unknown = {} if is_weighed else {"reward.weights": f"reward_weights = {given_weights} for {len(listed)} functions"}
    weight_of = dict(zip(listed, map(float, all_weights), strict=True)) if is_weighed else {}
    # The penalty for long completions is a reward function in TRL, and a field in jaxrl_llm.
    soft = [name for name in listed if "soft_overlong" in name and conversions.is_registered(name)]
    # TRL accepts reward models among the functions. The name of a model has a slash.
    models = [name for name in listed if "/" in name]
    names = [name for name in listed if name not in soft + models]
    if not names and not models:
        return unsupported("reward.functions", "only an overlong penalty: reward.overlong_tokens")
    weights_of_names = [weight_of.get(name, 1.0) for name in names]
    fields, tasks = conversions.rewards(names, weights_of_names) if names else (NO_FUNCTIONS, {})
    reasons = ["open-r1's format also asks for a line break at each tag"] if "format" in names else []
    if soft:
        # In TRL's command line, the penalty rises from 1,024 to 1,280 tokens, whatever the limit of a completion is.
        end, tokens = map(int, re.findall(r"\d+", soft[0])) if "(" in soft[0] else (1280, 256)
        fields = fields | {"reward.overlong_tokens": tokens}
        # A limit that cannot be read makes no other field unknown, so `keys` need not record the request.
        limit = keys.values.get("max_completion_length", keys.defaults["max_completion_length"])
        reasons.append("get_soft_overlong_punishment is reward.overlong_tokens, before rollout.max_completion_tokens")
        reasons.append(SENTENCES["OVERLONG"].format("TRL"))
        if limit != end:
            unknown["reward.overlong_tokens"] = f"TRL's penalty ends at {end} tokens, and jaxrl_llm's at {limit}"
        elif weight_of.get(soft[0], 1.0) != 1:
            unknown["reward.overlong_tokens"] = f"the penalty has weight 1, and {weight_of[soft[0]]:g} in TRL"
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
