"""Rules that translate keys of EasyR1 into fields of a jaxrl_llm config, where the table easyr1.tsv needs code.

The table follows EasyR1's examples/config.yaml of commit 46c6c21. family.py has the rules that veRL shares.
"""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tools.translate import conversions, family, verl
from jaxrl_llm.tools.translate.outcome import Keys, Outcome
from jaxrl_llm.tools.translate.table import SENTENCES, Row, read_names, read_rows, trainer_table

ROWS = read_rows("easyr1")
FAMILY = family.Family(
    rows=ROWS,
    losses=read_names("easyr1_losses"),
    # EasyR1 has one coefficient and one estimator, and use_kl_loss says whether they are in the loss or in the reward.
    in_loss=lambda keys: bool(keys["algorithm.use_kl_loss"] and not keys["algorithm.disable_kl"]),
    in_reward=lambda keys: not keys["algorithm.use_kl_loss"] and not keys["algorithm.disable_kl"],
)


def loss(value: Any, keys: Keys) -> Outcome:
    """Translates EasyR1's `loss_type` to `loss.name`, and for gspo to `loss.level`, the level of its ratio."""
    outcome = FAMILY.loss(value, keys)
    if outcome.fields.get("loss.name") != "gspo":
        return outcome
    # Both losses have one ratio for a completion, and differ only in their gradients.
    level = "token" if value == "gspo_token" else "sequence"
    reason = "EasyR1's gspo also has the bound clip_ratio_dual; jaxrl_llm's gspo has none"
    return Outcome("changed", outcome.fields | {"loss.level": level}, reason)


def files(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates EasyR1's `train_files` or `val_files`, a data file or a data set of the hub as id@split."""
    if not value:
        return Outcome("changed", {row.field: "my_data.rows"}, unknown={row.field: "a file with rows"})
    name, _, split = str(value).partition("@")
    return conversions.dataset(row.field_section, name, split or ("train" if row.name == "train_files" else "test"))


def too_long(value: Any, keys: Keys) -> Outcome:
    """Translates EasyR1's `filter_overlong_prompts` to `data.overlong`."""
    if value:
        return Outcome("mapped", {"data.overlong": "drop"})
    return Outcome("changed", {"data.overlong": "drop"}, "False cuts a longer prompt; jaxrl_llm drops and counts it")


def resampling(value: Any, keys: Keys) -> Outcome:
    """Translates EasyR1's `online_filtering`, which replaces groups without signal, to `rollout.resample_rounds`."""
    batches = int(keys["trainer.max_try_make_batch"])
    reason = SENTENCES["EASYR1_RESAMPLES"].format(*(keys[f"algorithm.filter_{x}"] for x in ("key", "low", "high")))
    return verl.resampled(batches if keys["algorithm.online_filtering"] else None, reason)


def rewards(value: Any, keys: Keys) -> Outcome:
    """Translates EasyR1's `reward_function` to `reward.functions`. jaxrl_llm has those of EasyR1's examples."""
    file, built_in = (keys.get(f"worker.reward.{name}") for name in ("reward_function", "compute_score"))
    if not file and built_in in conversions.EASYR1_SCORES:
        return Outcome("mapped", conversions.reward_fields((conversions.EASYR1_SCORES[built_in],)))
    if not file:
        reason = f"the file names {built_in or 'no worker.reward.reward_function'}, which is unknown"
        unknown = {"reward.functions": reason, "eval.function": reason}
        return Outcome("changed", conversions.reward_fields((conversions.ACCURACY,)), unknown=unknown)
    path, _, function = str(file).partition(":")
    named = keys.get("worker.reward.reward_function_kwargs") or {}
    arguments = dict(named) | keys.prefixed("worker.reward.reward_function_kwargs.")
    return conversions.easyr1_reward(path, function or "compute_score", arguments)


def around(value: Any, keys: Keys) -> Outcome:
    """Translates EasyR1's `format_prompt`, the template around a question, to `data.format_prompt`."""
    if "{{" in str(value):
        return Outcome("mapped", {"data.format_prompt": str(value)}, "the template itself, and not its file")
    task = f"a copy of {value}, or the template itself"
    return Outcome("mapped", {"data.format_prompt": str(value)}, tasks={"data.format_prompt": task})


def strategy(row: Row, value: Any, keys: Keys) -> Outcome:
    """Translates EasyR1's `optim.strategy`, the variant of AdamW, to `optim.momentum_dtype`."""
    if value == "adamw":
        return Outcome("mapped")
    reason = f"{value} rounds parameters and moments to bfloat16; jaxrl_llm rounds only the mean of gradients"
    # Only the first moment can be bfloat16 in jaxrl_llm: parameters and the second moment are float32.
    return Outcome("changed", {row.field: "bfloat16"}, reason)


EASYR1 = trainer_table("EasyR1", "commit 46c6c21", ROWS, vars(family) | FAMILY.rules() | globals(), verl.base)
