"""The rules of EasyR1's keys that need code. The table easyr1.tsv follows examples/config.yaml of commit 46c6c21."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxrl_llm.tools.translate import family, images, ours, verl
from jaxrl_llm.tools.translate.outcome import Keys, Outcome
from jaxrl_llm.tools.translate.table import Row, read_rows, trainer_table

MODEL = "worker.actor.model."
OLDER = ("of spring 2025", 2025.3)


def penalized(keys: Keys) -> bool:
    return not keys["algorithm.disable_kl"]


def adapted(keys: Keys) -> bool:
    return bool(keys[f"{MODEL}lora.rank"])


def filtering(keys: Keys) -> bool:
    return bool(keys["algorithm.online_filtering"])


ROWS = read_rows("easyr1")
FAMILY = family.Family(
    rows=ROWS,
    losses={"default": "ppo_clip", "gspo": "gspo", "gspo_token": "gspo", "cispo": "cispo", "sapo": "sapo"},
    # EasyR1 has one coefficient and one estimator, and use_kl_loss says whether they are in the loss or in the reward.
    in_loss=lambda keys: bool(keys["algorithm.use_kl_loss"]) and penalized(keys),
    in_reward=lambda keys: not keys["algorithm.use_kl_loss"] and penalized(keys),
    total_steps="trainer.max_steps",
)
CONDITIONS = FAMILY.conditions() | {
    "penalized": (penalized, "disable_kl is True"),
    "unpenalized": (lambda keys: not penalized(keys), "there is a penalty"),
    "filtering": (filtering, "online_filtering is False"),
    "adapted": (adapted, "it is off"),
}
# Sentences that the table names by these constants.
GREEDY = "an evaluation is one greedy completion for each problem here (jaxrl evaluate samples several)"
RESIZED = "EasyR1 first resizes to any size, and then to whole tokens, so that a side may differ by one token"
tower = images.tower(adapted)


def pixels(row: Row, value: Any, keys: Keys) -> Outcome:
    """A limit of the pixels of an image; 0 for the limit of the model's image processor."""
    if not value:
        return Outcome("mapped", {row.field: 0}, "the limit of the model's own processor")
    return Outcome("changed", {row.field: int(value)}, row.why)


def loss(value: Any, keys: Keys) -> Outcome:
    """The policy loss, with the level at which gspo has its ratio."""
    outcome = FAMILY.loss(value, keys)
    if outcome.fields.get("loss.name") != "gspo":
        return outcome
    # Both losses have one ratio for a completion, and differ only in their gradients.
    level = "token" if value == "gspo_token" else "sequence"
    reason = "there also the bound clip_ratio_dual; gspo has none here"
    return Outcome("changed", outcome.fields | {"loss.level": level}, reason)


def files(row: Row, value: Any, keys: Keys) -> Outcome:
    """A data file, or a data set of the hub as id@split."""
    if not value:
        return Outcome("changed", {row.field: "my_data.rows"}, unknown={row.field: "a file with rows"})
    name, _, split = str(value).partition("@")
    return ours.dataset(row.our_section, name, split or ("train" if row.name == "train_files" else "test"))


def too_long(value: Any, keys: Keys) -> Outcome:
    """Whether prompts above the limit are left out."""
    fields = {"data.overlong": "drop"}
    if value:
        return Outcome("mapped", fields)
    return Outcome("changed", fields, "False cuts a longer prompt; here it is dropped and counted")


def resampling(value: Any, keys: Keys) -> Outcome:
    """Whether groups with one total reward are replaced, and how often."""
    batches = int(keys["trainer.max_try_make_batch"])
    reason = (
        f"groups whose mean {keys['algorithm.filter_key']} is outside {keys['algorithm.filter_low']} ... "
        f"{keys['algorithm.filter_high']} are left out there; here, groups with one total reward, and "
        "what still has no signal stays"
    )
    return verl.resampled(batches if filtering(keys) else None, reason)


def rewards(value: Any, keys: Keys) -> Outcome:
    """The reward function with its arguments. jaxrl_llm has those of EasyR1's examples."""
    file, built_in = (keys.explicit.get(f"worker.reward.{name}") for name in ("reward_function", "compute_score"))
    if not file and built_in in ours.EASYR1_SCORES:
        return Outcome("mapped", ours.reward_fields((ours.EASYR1_SCORES[built_in],)))
    if not file:
        reason = f"the file names {built_in or 'no worker.reward.reward_function'}, which is not here"
        unknown = {"reward.functions": reason, "eval.function": reason}
        return Outcome("changed", ours.reward_fields((ours.ACCURACY,)), unknown=unknown)
    path, _, function = str(file).partition(":")
    named = keys.explicit.get("worker.reward.reward_function_kwargs") or {}
    arguments = dict(named) | keys.prefixed("worker.reward.reward_function_kwargs.")
    return ours.easyr1_reward(path, function or "compute_score", arguments)


def around(value: Any, keys: Keys) -> Outcome:
    """The template around a question."""
    return ours.template(str(value)) if value else Outcome("no effect", reason="not in use")


def model(value: Any, keys: Keys) -> Outcome:
    """The policy's model."""
    if value:
        return family.model(value, keys)
    return Outcome("changed", {"model.path": "my_model"}, unknown={"model.path": "a folder or a hub id"})


lora = partial(verl.adapter, f"{MODEL}lora.", f"{MODEL}lora.")
critic_path = partial(verl.critic_model, f"{MODEL}model_path")


def strategy(row: Row, value: Any, keys: Keys) -> Outcome:
    """The variant of AdamW."""
    if value == "adamw":
        return Outcome("mapped")
    reason = (
        f"{value} rounds parameters and moments to bfloat16; parameters are float32 here, the mean of gradients not"
    )
    # Of parameters and both moments, only the first moment can be bfloat16 in jaxrl_llm.
    return Outcome("changed", {row.field: "bfloat16"}, reason)


EASYR1 = trainer_table("EasyR1", "commit 46c6c21", ROWS, vars(family) | FAMILY.rules() | globals(), verl.base)
