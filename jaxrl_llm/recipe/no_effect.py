"""Refuses settings that would have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe.recipe import Recipe


def check_no_effect(recipe: Recipe, fields: Mapping[str, Any]) -> None:
    """Refuses settings of `train` without effect. The values of configs/grpo.py are always allowed.

    fields: values of the config by their paths, with the defaults. Raises: UserError, naming the field.
    """
    importance, advantage = recipe.importance, f"advantage {recipe.advantage.name!r}"
    action = importance.action
    # Importance weights have no effect if they are off, or if the policy itself samples, so that all weights are 1.
    if action == "none" or recipe.exact or (action == "auto" and recipe.own_samples):
        allowed: dict[str, Any] = {"importance.level": "token", "importance.high": 2.0}
        if action == "none":
            refuse(fields, allowed, "config.importance.action = 'none'")
        else:
            reason = f"the policy itself samples, so that with importance.action = {action!r} all weights are 1"
            refuse(fields, allowed | {"importance.action": "auto"}, reason)
    if action != "mask":
        refuse(fields, {"importance.low": 0.0}, f"config.importance.action = {action!r} is not 'mask'")
    if recipe.exact and recipe.updates_per_rollout == 1:
        refuse(fields, {"mask.off_policy": 0.0}, "the only optimizer step of a rollout is on-policy")
    copies_policy = recipe.refresh and recipe.refresh.every == 1 and recipe.refresh.mix == 1
    if recipe.kl and copies_policy and (recipe.kl.placement == "reward" or recipe.updates_per_rollout == 1):
        raise UserError(
            "config.kl.refresh.every = 1 with kl.refresh.mix = 1.0 makes the reference equal to the policy, so that "
            "the KL penalty is always 0: set every to 2 or more, or mix below 1"
        )
    if not recipe.frozen and ("ref_logprobs" not in recipe.columns or recipe.adapters):
        if recipe.adapters:
            reason = "with adapters the reference is the base model, and the run has no teacher and no reward model"
        else:
            reason = "the run has no reference, no teacher and no reward model"
        refuse(fields, {"host_memory.reference": False}, reason)
    if not recipe.estimator.uses_penalties:
        refuse(fields, {"reward.overlong_tokens": 0}, f"{advantage} ignores penalties")
    has_one_completion = recipe.group_size == 1
    if has_one_completion or not recipe.estimator.needs_reward:
        no_signal = "config.group_size = 1, so that no group has a signal"
        reason = no_signal if has_one_completion else f"{advantage} uses no reward"
        refuse(fields, {"rollout.resample_rounds": 0, "data.curriculum.skip": None}, reason)


def refuse(fields: Mapping[str, Any], allowed: Mapping[str, Any], reason: str) -> None:
    """Refuses values of fields that have no effect in this run.

    fields: values of the config by their paths; allowed: {field: its one allowed value, or None if its section must be
    absent}; reason: why the fields have no effect. Raises: UserError, naming the field.
    """
    for field, allowed_value in allowed.items():
        if field in fields and fields[field] != allowed_value:
            section, _, last = field.rpartition(".")
            remedy = (
                f"set {last} to {allowed_value!r}" if allowed_value is not None else f"remove the section {section}"
            )
            raise UserError(f"config.{field} = {fields[field]!r} has no effect, because {reason}: {remedy}")
