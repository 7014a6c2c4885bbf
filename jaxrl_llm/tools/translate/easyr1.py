"""The rules of EasyR1's keys that need code. The table easyr1.tsv follows examples/config.yaml of commit 46c6c21."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tools.translate import family, images, ours
from jaxrl_llm.tools.translate.outcome import Keys, Outcome, Rule
from jaxrl_llm.tools.translate.table import Row, read_rows, system

ACTOR, MODEL, ROLLOUT = "worker.actor.", "worker.actor.model.", "worker.rollout."
OLDER = "of spring 2025"
NAMES = family.Names(
    prompts="data.rollout_batch_size",
    update=f"{ACTOR}global_batch_size",
    epochs=f"{ACTOR}ppo_epochs",
    group=(f"{ROLLOUT}n",),
    nodes="trainer.nnodes",
    gpus="trainer.n_gpus_per_node",
    estimator="algorithm.adv_estimator",
    response="data.max_response_length",
    kl_loss="algorithm.use_kl_loss",
)


def penalized(keys: Keys) -> bool:
    return not keys["algorithm.disable_kl"]


def adapted(keys: Keys) -> bool:
    return bool(keys[f"{MODEL}lora.rank"])


def filtering(keys: Keys) -> bool:
    return bool(keys["algorithm.online_filtering"])


KL = family.KlKeys(
    in_loss=lambda keys: bool(keys["algorithm.use_kl_loss"]) and penalized(keys),
    # EasyR1 has one coefficient and one estimator; use_kl_loss alone says in which place they are. Those of the loss
    # had keys of their own in spring 2025.
    in_reward=lambda keys: not keys["algorithm.use_kl_loss"] and penalized(keys),
    loss_coef=f"{ACTOR}kl_loss_coef",
    loss_kind=f"{ACTOR}kl_loss_type",
    reward_coef="algorithm.kl_coef",
    reward_kind="algorithm.kl_penalty",
    estimator="algorithm.adv_estimator",
)
MODE = f"{ACTOR}loss_type"
SIDES = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}
LOSSES: family.Losses = {
    "default": ("ppo_clip", SIDES | {"delta": "clip_ratio_dual"}),
    "gspo": ("gspo", SIDES),
    "gspo_token": ("gspo", SIDES),
    "cispo": ("cispo", SIDES),
    "sapo": ("sapo", {"tau_positive": "tau_positive", "tau_negative": "tau_negative"}),
}
CONDITIONS = {
    "critic": (NAMES.critic, "there is no critic: adv_estimator is not gae"),
    "gamma": (
        lambda keys: keys["algorithm.adv_estimator"] in ("gae", "reinforce_plus_plus"),
        "the estimator has no gamma",
    ),
    "penalized": (penalized, "disable_kl is True"),
    "unpenalized": (lambda keys: not penalized(keys), "there is a penalty"),
    "filtering": (filtering, "online_filtering is False"),
    "adapted": (adapted, "it is off"),
    "in_loss": (KL.in_loss, "the penalty is not in the loss"),
    "pictures": (images.shown, images.NONE),
}
# Sentences of the table.
NO_REMOTE_CODE = "no code of a model's folder is run"
ALL_DEVICES = "all devices that a run finds"
SAME_WORKDIR = "the same --workdir resumes a run"
MODEL_CONFIG = "the model is as its config.json says: change that"
OWN_TOKENIZER = "the tokenizer is the model's"
NOT_BESIDE = "this file is not beside the script or above it: its keys have their defaults here"
GREEDY = "an evaluation is one greedy completion for each problem here (jaxrl evaluate samples several)"
SOUND = images.SOUND
RESIZED = "EasyR1 first resizes to any size, and then to whole tokens, so that a side may differ by one token"
# Rules that EasyR1 shares with veRL, for its names of keys. Its GRPO always divides by the deviation.
advantage = family.advantage("")
aggregation = family.aggregation(NAMES, "", MODE)
epochs = family.epochs_rule(NAMES, "trainer.max_steps")
evaluates = family.evaluates("data.val_files")
kl_switch = KL.switch
kl_adaptive = KL.adaptive("algorithm.kl_type", "algorithm.kl_target", "algorithm.kl_horizon")
mini_batch = family.update(NAMES)
micro_batch = family.micro(NAMES, per_gpu=True)
tower = images.tower(adapted)


def kl_part(row: Row) -> Rule:
    return KL.value(row, penalized, "disable_kl is True")


def warmup_steps(row: Row) -> Rule:
    return family.warmup_steps(NAMES, row)


def pixels(row: Row) -> Rule:
    return images.pixels(row.field, RESIZED)


def argument(keys: Keys, name: str) -> float:
    """Returns an argument of the loss."""
    return float(keys[f"{ACTOR}{name}"])


def loss_argument(row: Row) -> Rule:
    return family.loss_argument(LOSSES, MODE, argument, row)


def loss(value: Any, keys: Keys) -> Outcome:
    """The policy loss, with all its arguments."""
    outcome = family.loss(LOSSES, argument, value, keys)
    if outcome.fields.get("loss.name") != "gspo":
        return outcome
    # Both names have the value of one ratio for a completion, and differ in the gradient only.
    level = "token" if value == "gspo_token" else "sequence"
    reason = "there also the bound clip_ratio_dual; gspo has none here"
    return Outcome("changed", outcome.fields | {"loss.level": level}, reason)


def old_clip(value: Any, keys: Keys) -> Outcome:
    """clip_ratio, which the keys of the two sides have replaced."""
    sides = {f"loss.{field}": float(value) for field, name in SIDES.items() if f"{ACTOR}{name}" not in keys}
    return Outcome("mapped", sides)


def shared_with_policy(row: Row) -> Rule:
    """A setting that the critic has of its own: one loop updates both here, with the same batches."""
    shared = {
        "global_batch_size": (NAMES.update, "mini-batch"),
        "ppo_epochs": (NAMES.epochs, "epochs"),
        "loss_avg_mode": (f"{ACTOR}loss_avg_mode", "aggregation"),
    }
    return family.shared_with_policy(shared, row)


def files(row: Row) -> Rule:
    """A file, or a data set of the hub as id@split."""
    section, usual = row.our_section, "train" if row.name == "train_files" else "test"

    def rule(value: Any, keys: Keys) -> Outcome:
        if not value:
            return Outcome("changed", {row.field: "my_data.rows"}, unknown={row.field: "a file with rows"})
        name, _, split = str(value).partition("@")
        return ours.dataset(section, name, split or usual)

    return rule


def too_long(value: Any, keys: Keys) -> Outcome:
    """Whether longer prompts are left out."""
    fields = {"data.overlong": "drop"}
    if value:
        return Outcome("mapped", fields)
    return Outcome("changed", fields, "False cuts a longer prompt; here it is dropped and counted")


def online_filtering(value: Any, keys: Keys) -> Outcome:
    """Groups without signal, replaced by others."""
    if not filtering(keys):
        return Outcome("mapped", {"rollout.resample_rounds": 0})
    batches = int(keys["trainer.max_try_make_batch"])
    reason = (
        f"groups whose mean {keys['algorithm.filter_key']} is outside {keys['algorithm.filter_low']} ... "
        f"{keys['algorithm.filter_high']} are left out there; here, groups with one total reward, and "
        "what still has no signal stays"
    )
    # Without a limit there, which a data set without a signal never leaves: ten rounds stand for it.
    return Outcome("changed", {"rollout.resample_rounds": max(batches - 1, 1) if batches > 0 else 10}, reason)


def filter_range(value: Any, keys: Keys) -> Outcome:
    """What says that a group has no signal."""
    return Outcome("changed", {}, "see online_filtering")


def rewards(value: Any, keys: Keys) -> Outcome:
    """The file and the name of a reward function, with its arguments; EasyR1's own math.py is like ours."""
    file, built_in = (keys.explicit.get(f"worker.reward.{name}") for name in ("reward_function", "compute_score"))
    if not file and built_in in ours.EASYR1_SCORES:
        return Outcome("mapped", ours.reward_fields((ours.EASYR1_SCORES[built_in],)))
    if not file:
        why = f"the file names {built_in or 'no worker.reward.reward_function'}, which is not here"
        unknown = {"reward.functions": why, "eval.function": why}
        return Outcome("changed", ours.reward_fields((ours.ACCURACY,)), unknown=unknown)
    path, _, function = str(file).partition(":")
    named = keys.explicit.get("worker.reward.reward_function_kwargs") or {}
    arguments = dict(named) | keys.under("worker.reward.reward_function_kwargs.")
    return ours.easyr1_reward(path, function or "compute_score", arguments)


def around(value: Any, keys: Keys) -> Outcome:
    """A template around the question."""
    return ours.template(str(value)) if value else Outcome("no effect", reason="not in use")


def model(value: Any, keys: Keys) -> Outcome:
    """The policy's model."""
    if value:
        return family.model(value, keys)
    return Outcome("changed", {"model.path": "my_model"}, unknown={"model.path": "a folder or a hub id"})


def lora(value: Any, keys: Keys) -> Outcome:
    """An adapter."""
    rank, alpha, targets = (keys[f"{MODEL}lora.{name}"] for name in ("rank", "alpha", "target_modules"))
    excluded = keys.explicit.get(f"{MODEL}lora.exclude_modules")
    return images.beside_tower(ours.lora(rank, alpha, targets), targets, excluded, keys)


def strategy(row: Row) -> Rule:
    """The kind of AdamW."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if value == "adamw":
            return Outcome("mapped")
        reason = (
            f"{value} rounds parameters and moments to bfloat16; parameters are float32 here, the mean of gradients not"
        )
        # The nearest thing: of the three, the mean of gradients alone may be bfloat16 here.
        return Outcome("changed", {row.field: "bfloat16"}, reason)

    return rule


def dtype(value: Any, keys: Keys) -> Outcome:
    """The dtype in which the model is computed."""
    low = value in ("bf16", "bfloat16", "fp16")
    reason = "of activations; parameters and the optimizer are float32 there and here"
    return Outcome("changed", {"model.dtype": "bfloat16" if low else "float32"}, reason)


def critic_path(value: Any, keys: Keys) -> Outcome:
    """The model that the critic begins with."""
    return Outcome("mapped", {"critic.path": "" if value in (None, keys[f"{MODEL}model_path"]) else value})


EASYR1 = system(
    "EasyR1",
    "commit 46c6c21",
    read_rows("easyr1"),
    vars(family) | globals(),
    lambda keys: "ppo" if NAMES.critic(keys) else "grpo",
)
