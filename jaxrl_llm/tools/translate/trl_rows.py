"""The rules of TRL's rows and rewards: data to train on and to evaluate, and reward functions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate import ours
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, not_here
from jaxrl_llm.tools.translate.table import Row
from jaxrl_llm.tools.translate.trl_counts import in_rollouts, learns_pairs

NO_FUNCTIONS = {"reward.functions": (), "reward.weights": ()}
JUDGE = {"eval.function": "a reward function that judges the evaluation, or eval.every = 0"}
NO_REWARD = "the file names no reward function"
SAME_TEXT = "it reads prompt and completion as the policy does"


def rewards(value: Any, keys: Keys) -> Outcome:
    """The reward functions by their names. In TRL reward models and the overlong penalty are functions too."""
    if not value:
        unknown = {"reward.functions": NO_REWARD, "eval.function": NO_REWARD}
        return Outcome("changed", ours.reward_fields((ours.ACCURACY,)), unknown=unknown)
    listed = [str(name) for name in (value if isinstance(value, list) else [value])]
    all_weights = keys.explicit.get("reward_weights") or [1.0] * len(listed)
    weight_of = dict(zip(listed, map(float, all_weights), strict=False)) if len(listed) == len(all_weights) else {}
    # The penalty for long completions is a reward function in TRL, and a field in jaxrl_llm.
    soft = [name for name in listed if "soft_overlong" in name]
    # TRL accepts reward models among the functions. The name of a model has a slash.
    models = [name for name in listed if "/" in name]
    names = [name for name in listed if name not in soft + models]
    if not names and not models:
        return not_here("reward.functions", "only an overlong penalty: reward.overlong_tokens")
    fields, tasks = ours.rewards(names, [weight_of.get(name, 1.0) for name in names]) if names else (NO_FUNCTIONS, {})
    unknown: dict[str, str] = {}
    reasons = ["open-r1's format also asks for a line break at each tag"] if "format" in names else []
    if soft:
        # On TRL's command line the penalty has 256 tokens.
        tokens = re.search(r"\((\d+)\)", soft[0])
        fields = fields | {"reward.overlong_tokens": int(tokens[1]) if tokens else 256}
        reasons.append("get_soft_overlong_punishment is reward.overlong_tokens, before rollout.max_completion_tokens")
        if weight_of.get(soft[0], 1.0) != 1:
            unknown["reward.overlong_tokens"] = f"the penalty has no weight here, and {weight_of[soft[0]]:g} there"
    if models:
        model = ours.reward_model(models[0], SAME_TEXT)
        fields = fields | model.fields | {"reward_model.weight": weight_of.get(models[0], 1.0)}
        reasons.append(model.reason)
        tasks = tasks if names else JUDGE
    if models[1:]:
        unknown["reward_model"] = f"a second reward model has no counterpart: {', '.join(models[1:])}"
    # A convert function makes the answers of the rows itself.
    if "trainer.train_dataset.steps" in keys:
        fields = {name: x for name, x in fields.items() if name != "data.answer_column"}
    reason = "; ".join([*reasons, *unknown.values()])
    kind = "unsupported" if unknown else "changed" if tasks or reason else "mapped"
    return Outcome(kind, fields, reason, tasks, unknown)


def reward_model(value: Any, keys: Keys) -> Outcome:
    """A reward model. It is the only reward of PPO, whose critic starts as the reward model in TRL's scripts."""
    alone = "reward_funcs" not in keys.defaults
    if not value:
        return not_here("reward_model.path", NO_REWARD) if alone else Outcome("no effect", reason="not set")
    outcome = ours.reward_model(str(value), SAME_TEXT)
    if alone:
        critic = {"critic.path": keys.explicit.get("trainer.value_model", str(value))}
        reason = f"{outcome.reason}; the critic begins as it"
        return replace(outcome, fields=outcome.fields | critic | NO_FUNCTIONS, reason=reason, yours=JUDGE)
    if keys.explicit.get("reward_funcs"):
        return outcome
    return replace(outcome, fields=outcome.fields | NO_FUNCTIONS, yours=JUDGE)


def weights(value: Any, keys: Keys) -> Outcome:
    """The weights of the reward functions."""
    if value is None:
        return Outcome("no effect", reason="not set: every function has the weight 1")
    names = keys.explicit.get("reward_funcs")
    count = len(names) if isinstance(names, list) else int(bool(names))
    if len(value) != count:
        return not_here("reward.weights", f"{len(value)} weights for {count or 'unknown'} functions")
    fields = rewards(names, keys).fields
    weighed = ("reward.weights", "reward_model.weight")
    return Outcome("mapped", {name: x for name, x in fields.items() if name in weighed})


def dataset(value: Any, keys: Keys) -> Outcome:
    """The rows: a data set of the hub, a folder or a file. The code of a script may make the rows too."""
    name, subset = str(value), _configuration(keys)
    if subset and "/" in name and not name.endswith(ours.FILES):
        name = f"{name}:{subset}"
    if name.endswith(ours.FILES) or "/" in name:
        return ours.dataset("data", name, str(keys.explicit.get("dataset_train_split", "train")))
    if "dataset_mixer" in keys:
        return Outcome("no effect", reason="dataset_mixer names the rows")
    unknown = {"data.source": "a file, or my_data.rows: a function that returns rows with the column prompt"}
    return Outcome("changed", {"data.source": "my_data.rows", "data.convert": ""}, unknown=unknown)


def mixer(value: Any, keys: Keys) -> Outcome:
    """The data sets of alignment-handbook as {name: share}. The key dataset_splits names their splits."""
    shares = dict(value or {})
    train = _splits("train", keys)
    if list(shares.values()) != [1.0] or len(train) != 1:
        return not_here("data.source", "a mixture, or a part of the rows: data.mixture")
    return ours.dataset("data", next(iter(shares)), train[0])


def _splits(part: str, keys: Keys) -> list[str]:
    return [str(split) for split in keys.explicit.get("dataset_splits", ["train", "test"]) if part in str(split)]


def _configuration(keys: Keys) -> str:
    """Returns the configuration of a data set of the hub; "" if the file has none or several."""
    names = keys.explicit.get("dataset_config") or keys.explicit.get("dataset_configs") or ""
    listed = names if isinstance(names, list) else [names]
    return str(listed[0]) if len(listed) == 1 else ""


def configurations(value: Any, keys: Keys) -> Outcome:
    """The configuration of a data set of the hub, or a list of configurations."""
    if not value:
        return Outcome("no effect", reason="not set")
    if _configuration(keys):
        return Outcome("mapped", dataset(keys["dataset_name"], keys).fields)
    return not_here("data.source", "one configuration in a source: data.mixture")


def changed_rows(row: Row, value: Any, keys: Keys) -> Outcome:
    """Calls with which a script changes the rows that it has loaded."""
    source, convert = f"{row.our_section}.source", f"{row.our_section}.convert"
    columns = "prompt, chosen and rejected" if learns_pairs(keys) else "prompt and answer"
    task = f"the script calls {value}: a function of a row that does the same, and makes the columns {columns}"
    unknown = {source: f"the script calls {value}, which may leave rows out"}
    return Outcome("changed", {convert: "my_data.convert"}, "code is not read", {convert: task}, unknown)


def prompt_limit(value: Any, keys: Keys) -> Outcome:
    """The longest prompt."""
    longer = "no limit there" if value is None else "cuts a longer prompt there"
    limit = 2048 if value is None else int(value)
    return Outcome("changed", {"data.max_prompt_tokens": limit}, f"{longer}; a longer prompt is dropped here")


def pair_limits(value: Any, keys: Keys) -> Outcome:
    """The limits of a prompt and of a completion of a pair. TRL cuts a longer pair, and jaxrl_llm drops it."""
    # Without a limit in the file, prompt and completion have this limit each.
    limit = int(keys["max_length"] or 4096)
    fields = {
        "data.max_prompt_tokens": int(keys["max_prompt_length"] or limit),
        "rollout.max_completion_tokens": int(keys.explicit.get("max_completion_length") or limit),
    }
    limit_reason = f"a pair is cut after {limit} tokens there" if keys["max_length"] else "no limit there"
    return Outcome("changed", fields, f"{limit_reason}; here both parts have a limit, and a longer pair is dropped")


def evaluates(keys: Keys) -> bool:
    return keys["eval_strategy"] not in ("no", None, False)


def evaluation(value: Any, keys: Keys) -> Outcome:
    """Steps between evaluations of problems or of held-out pairs."""
    if not evaluates(keys):
        return Outcome("mapped", ours.NO_EVALUATION)
    # transformers takes logging_steps if eval_steps is not set.
    evaluation_steps = in_rollouts("eval.every", keys["eval_steps"] or keys["logging_steps"], keys)
    held_out = held_out_rows(value, keys)
    fields = evaluation_steps.fields | {"eval.convert": ""} | held_out.fields
    pairs = learns_pairs(keys)
    fields |= {"eval.function": "preference"} if pairs else {}
    reason = "the share of held-out pairs in the right order" if pairs else "one greedy completion for each problem"
    return Outcome("changed", fields, reason, held_out.yours, evaluation_steps.unknown | held_out.unknown)


def held_out_rows(value: Any, keys: Keys) -> Outcome:
    """The rows to evaluate: an argument of the trainer, or a split of the data set to train on."""
    source = str(keys.explicit.get("trainer.eval_dataset") or "")
    name = str(keys.explicit.get("dataset_name") or "")
    if not source and "dataset_mixer" in keys:
        source = f"{next(iter(keys['dataset_mixer']))}@{[*_splits('test', keys), 'test'][0]}"
    # A data file has one split, so only a data set of the hub has rows to evaluate.
    elif not source and "/" in name and not name.endswith(ours.FILES):
        source = name if learns_pairs(keys) or "dataset_test_split" in keys else ""
    if source:
        outcome = ours.dataset("eval", source, str(keys.explicit.get("dataset_test_split", "test")))
        return replace(outcome, fields={"eval.source": outcome.fields["eval.source"]})
    task = "the file with what to evaluate; this name is a placeholder"
    return Outcome("mapped", {"eval.source": "data/test.parquet"}, unknown={"eval.source": task})


def logs_samples(value: Any, keys: Keys) -> Outcome:
    """The evaluation of TRL's PPO, which logs samples and no accuracy."""
    samples = evaluates(keys)
    reason = "TRL's PPO only logs samples: set eval.every and eval.source for an accuracy" * samples
    return Outcome("changed" if samples else "mapped", ours.NO_EVALUATION, reason)
