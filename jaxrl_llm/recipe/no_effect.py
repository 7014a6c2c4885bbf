"""Refuses settings that would have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe.recipe import Recipe


def check_no_effect(recipe: Recipe, fields: Mapping[str, Any]) -> None:
    """Refuses settings of `train` without effect. The values of configs/grpo.py are always allowed.

    fields: argument of `checks.check_train`. Raises: UserError, naming the field.
    """
    weights, advantage = recipe.importance, f"advantage {recipe.advantage.name!r}"
    if weights.action == "none" or recipe.exact or (weights.action == "auto" and recipe.own_samples):
        none = weights.action == "none"
        why = f"this very policy samples, so that importance.action = {weights.action!r} weighs nothing"
        unset = {"importance.level": "token", "importance.high": 2.0} | ({} if none else {"importance.action": "auto"})
        refuse(fields, unset, "importance.action is 'none'" if none else why)
    if weights.action != "mask":
        refuse(fields, {"importance.low": 0.0}, "importance.action is not 'mask'")
    if recipe.exact and recipe.updates_per_rollout == 1:
        refuse(fields, {"mask.off_policy": 0.0}, "a rollout's only optimizer step is on-policy")
    at_policy = recipe.refresh and recipe.refresh.every == 1 and recipe.refresh.mix == 1
    if recipe.kl and at_policy and (recipe.kl.placement == "reward" or recipe.updates_per_rollout == 1):
        raise UserError(
            "config.kl.refresh.every = 1 with mix = 1.0 does nothing: the reference is the policy itself whenever the "
            "penalty is computed, which is then 0; set every to 2 or more, or mix below 1"
        )
    if not recipe.frozen and ("ref_logprobs" not in recipe.columns or recipe.adapters):
        beside = " beside the base" * bool(recipe.adapters)
        why = f"there is no reference{beside}, and none of teachers and reward_model"
        refuse(fields, {"host_memory.reference": False}, why)
    if not recipe.estimator.uses_penalties:
        refuse(fields, {"reward.overlong_tokens": 0}, f"{advantage} does not look at it")
    alone = recipe.group_size == 1
    if alone or not recipe.estimator.needs_reward:
        why = "a group of 1 never has a signal" if alone else f"{advantage} looks at no reward"
        refuse(fields, {"rollout.resample_rounds": 0, "data.curriculum.skip": None}, why)


def refuse(fields: Mapping[str, Any], unset: Mapping[str, Any], why: str) -> None:
    """Refuses fields that do nothing. unset: their values that are allowed; None: the section must not be there.

    Raises: UserError, naming the field.
    """
    for field, allowed in unset.items():
        if field in fields and fields[field] != allowed:
            remedy = f"set it to {allowed!r}" if allowed is not None else "take the section out"
            raise UserError(f"config.{field} = {fields[field]!r} does nothing: {why}; {remedy}")
