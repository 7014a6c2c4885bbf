"""Rules that translate keys of veRL into fields of a jaxrl_llm config, where the table verl.tsv needs code.

The table follows veRL 0.9.1, and has older keys too. A rule gets the value of its key and all `Keys` of the user's
file, and returns the `Outcome`. family.py has the rules that EasyR1 and Search-R1 share.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jaxrl_llm.tools.translate import conversions, family
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, unsupported
from jaxrl_llm.tools.translate.table import SENTENCES, Row, read_names, read_rows, trainer_table

# Sections of veRL's keys.
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
ROWS = read_rows("verl")
FAMILY = family.Family(
    rows=ROWS,
    losses=read_names("verl_losses"),
    in_loss=lambda keys: bool(keys[f"{ACTOR}use_kl_loss"]),
    in_reward=lambda keys: bool(keys["algorithm.use_kl_in_reward"]) and not keys[f"{ACTOR}use_kl_loss"],
)
# Keys that several rules read, and beginnings of the keys of a section.
LOSS_MODE = FAMILY.key_of_field["loss.name"]  # key of veRL that decides our loss.name
FILTERED = "data.filter_overlong_prompts"
OVERLONG = "reward_model.overlong_buffer."
REWARD_FILE = "custom_reward_function."  # section with the path and the name of the user's reward function
TURNS = f"{ROLLOUT}multi_turn."

# Rule of the source of the rows, whose columns `verl.convert` renames.
data_files = partial(family.rows_of, "verl.convert")


def truncation(value: Any, keys: Keys) -> Outcome:
    """Translates veRL's `data.truncation`, what happens to prompts above the limit, to `data.overlong`."""
    if keys.get(FILTERED):
        return Outcome("mapped", {"data.overlong": "drop"}, f"{FILTERED} drops a longer prompt before")
    if value == "error":
        return Outcome("mapped", {"data.overlong": "error"})
    return Outcome("changed", {"data.overlong": "drop"}, f"{value} cuts a longer prompt; jaxrl_llm drops and counts it")


def resampling(value: Any, keys: Keys) -> Outcome:
    """Translates `algorithm.filter_groups`, which replaces groups without signal, to `rollout.resample_rounds`."""
    batches = int(keys["algorithm.filter_groups.max_num_gen_batches"] or 0)
    reason = SENTENCES["VERL_RESAMPLES"].format(batches or "any number of")
    return resampled(batches if keys["algorithm.filter_groups.enable"] else None, reason)


def resampled(batches: int | None, reason: str) -> Outcome:
    """Returns `rollout.resample_rounds`. batches: limit, 0 or less if unlimited, None if no group is replaced."""
    if batches is None:
        return Outcome("mapped", {"rollout.resample_rounds": 0})
    # Resampling a data set without signal would never end, so a file without a limit gets ten rounds.
    return Outcome("changed", {"rollout.resample_rounds": max(batches - 1, 1) if batches > 0 else 10}, reason)


def overlong(value: Any, keys: Keys) -> Outcome:
    """Translates the switch and the length of DAPO's soft penalty for long completions to `reward.overlong_tokens`."""
    on = keys.get(f"{OVERLONG}enable", False) and f"{OVERLONG}len" in keys
    # With the filter, veRL has no group whose other rewards are equal.
    reason = SENTENCES["OVERLONG"].format("veRL") * bool(on and not keys.get("algorithm.filter_groups.enable"))
    fields = {"reward.overlong_tokens": int(keys[f"{OVERLONG}len"]) if on else 0}
    return Outcome("changed" if reason else "mapped", fields, reason)


def template_arguments(value: Any, keys: Keys) -> Outcome:
    """Translates an argument of the chat template: `data.chat_template_args` has all arguments together."""
    return Outcome("mapped", {"data.chat_template_args": keys.prefixed("data.apply_chat_template_kwargs.")})


def rewards(value: Any, keys: Keys) -> Outcome:
    """Translates veRL's `custom_reward_function`, or its reward by the column data_source, to `reward.functions`."""
    file = keys.get(f"{REWARD_FILE}path")
    if keys.get("reward_model.enable"):
        return Outcome("mapped", {"reward.functions": (), "reward.weights": ()}, "veRL uses the reward model alone")
    if not file:
        return conversions.by_data_source(keys["data.train_files"])
    name = str(keys.get(f"{REWARD_FILE}name") or "compute_score")
    arguments = keys.prefixed(f"{REWARD_FILE}reward_kwargs.") | keys.prefixed(f"reward.{REWARD_FILE}reward_kwargs.")
    return conversions.custom_reward(str(file), name, arguments)


def reward_model(value: Any, keys: Keys) -> Outcome:
    """Translates veRL's `reward_model.enable` and its path to `reward_model`."""
    path = keys.get("reward_model.model.path")
    if not path:
        return Outcome("unsupported", reason="the file names no folder of the reward model: set reward_model.path")
    outcome = conversions.reward_model(str(path), "it reads prompt and completion as the policy does")
    # veRL ignores reward functions in a run with a reward model.
    return replace(outcome, fields=outcome.fields | {"reward.functions": (), "reward.weights": ()})


def reward_coef(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates `algorithm.kl_ctrl.kl_coef`, the coefficient of a KL penalty in the reward, to `kl.coef`."""
    if FAMILY.in_reward(keys):
        return FAMILY.kl_part(row, value, keys)
    if not FAMILY.in_loss(keys) and value and "algorithm.use_kl_in_reward" not in keys:
        reason = "veRL needs use_kl_in_reward for it since 0.4; until 0.3 this file had the penalty in the reward"
        return Outcome("changed", {}, reason)
    return Outcome("no effect", reason="the penalty is not in the reward")


def tools(value: Any, keys: Keys) -> Outcome:
    """Translates veRL's `rollout.multi_turn`, episodes with tools, to `env` and `turns`: tools are Python functions."""
    if not keys.get(f"{TURNS}tool_config_path"):
        return unsupported("env", f"episodes of several turns without a file of tools; {SENTENCES['ENVIRONMENT']}")
    names = keys.get(f"{TURNS}tool_config_path.names") or []
    assistant, user = (keys.get(f"{TURNS}max_{who}_turns") for who in ("assistant", "user"))
    # An episode ends with a turn of the policy, so it has one turn more than answers of tools.
    limits = [int(assistant)] if assistant else []
    limits += [int(user) + 1] if user else []
    tokens = int(keys["data.max_response_length"])
    fields = {
        "env.functions": tuple(f"my_tools.{name}" for name in names) or ("my_tools.tool",),
        "turns.most": min(limits, default=100),
        "turns.tokens": tokens,
        "turns.observation_tokens": min(int(keys.get(f"{TURNS}max_tool_response_length") or 256), tokens),
    }
    # Only a sentence depends on these keys, so `keys` need not record the request.
    needs_agent_name = keys.values.get(f"{ROLLOUT}agent.default_agent_loop") != "tool_agent"
    needs_agent_name = needs_agent_name and keys.values.get(f"{ROLLOUT}mode") != "sync"
    reasons = [SENTENCES["TOOLS"]] + ["veRL has no limit of turns"] * (not limits)
    reason = "; ".join(reasons + [SENTENCES["ROWS_WITH_TOOLS"]] * needs_agent_name)
    task = "write them in my_tools.py beside this file, with types and a docstring (docs/environments.md)"
    # The tools are classes of veRL, whose code is not read.
    tools_task = f"{task}: they do what the tools of {keys[f'{TURNS}tool_config_path']} do"
    return Outcome("changed", fields, reason, unknown={"env.functions": tools_task})


def validation(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates veRL's `rollout.val_kwargs`, how evaluations are sampled: jaxrl_llm's are greedy."""
    val = f"{ROLLOUT}val_kwargs."
    # veRL's do_sample is False by default, and temperature 0 is greedy too.
    greedy = not keys.get(f"{val}do_sample", False) or keys.get(f"{val}temperature", 0) == 0
    if greedy and keys.get(f"{val}n", 1) == 1:
        return Outcome("no effect", reason="evaluations are greedy in veRL and in jaxrl_llm")
    return Outcome("unsupported", reason=row.why)


def base(keys: Keys) -> str:
    """Returns the config of jaxrl_llm that a translation changes."""
    return "ppo" if keys["algorithm.adv_estimator"] == "gae" else "grpo"


VERL = trainer_table("veRL", "0.9.1", ROWS, vars(family) | FAMILY.rules() | globals(), base)
