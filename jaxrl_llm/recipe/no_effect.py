"""Refuses settings that would have no effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxrl_llm.config.records import flat
from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe.recipe import Recipe, Settings, SftRecipe

# Sizes of a new model, with the values of configs/sft.py.
SIZES = (
    ("hidden_size", 128),
    ("num_hidden_layers", 4),
    ("num_attention_heads", 4),
    ("num_key_value_heads", 2),
    ("intermediate_size", 384),
    ("vocabulary", 0),
)


def check_no_effect(recipe: Recipe) -> None:
    """Refuses settings of `train` without effect. The values of configs/grpo.py are always allowed.

    Raises: UserError, naming the field.
    """
    k, r, c, advantage = recipe.kl, recipe.rollout, recipe.importance, recipe.advantage.name
    no_place = k.placement == "none"
    same_policy, exact, updates = recipe.own_samples, recipe.exact, recipe.updates_per_rollout
    unseen = not {"rewards", "token_rewards"} & set(recipe.estimator.inputs)
    unrewarded = not recipe.estimator.needs_reward
    unweighed, why_not = c.action == "none", "importance.action is 'none'"
    if c.action == "auto" and same_policy:
        unweighed, why_not = True, "this very policy samples, so that importance.action = 'auto' weighs nothing"
    _refuse_no_effect(
        recipe,
        (
            ("kl.coef", 0.0, no_place, "kl.placement is 'none'"),
            ("kl.target", 0.0, no_place, "kl.placement is 'none'"),
            ("kl.decay", "constant", no_place, "kl.placement is 'none'"),
            ("kl.estimator", "k3", no_place, "kl.placement is 'none'"),
            ("kl.refresh_every", 0, no_place, "kl.placement is 'none'"),
            ("kl.refresh_every", 0, k.refresh_every > recipe.num_steps, f"the run has {recipe.num_steps} steps"),
            ("kl.mix", 1.0, not k.refresh_every, "kl.refresh_every is 0"),
            (
                "host_memory.reference",
                False,
                ("ref_logprobs" not in recipe.columns or bool(recipe.adapters)) and not recipe.frozen,
                f"there is no reference{' beside the base' * bool(recipe.adapters)}, and none of teachers and "
                "reward_model",
            ),
            ("kl.end", 0.0, k.decay == "constant", "kl.decay is 'constant'"),
            ("kl.horizon", 10_000, not k.target, "kl.target is 0"),
            ("kl.weighted", False, (k.placement, k.estimator) != ("loss", "k3"), "it is for k3 in the loss"),
            ("entropy.step", 0.0, not recipe.entropy.target, "entropy.target is 0"),
            ("entropy.most", 0.0, not recipe.entropy.target, "entropy.target is 0"),
            ("importance.action", "auto", exact and c.action in ("truncate", "mask"), "this very policy samples"),
            ("importance.level", "token", unweighed, why_not),
            ("importance.high", 2.0, unweighed, why_not),
            ("importance.low", 0.0, c.action != "mask", "importance.action is not 'mask'"),
            ("mask.off_policy", 0.0, exact and updates == 1, "a rollout's only optimizer step is on-policy"),
            ("rollout.max_lag", 0, r.max_lag >= recipe.num_steps, f"the run has {recipe.num_steps} steps"),
            ("reward.overlong_tokens", 0, unseen, f"advantage {advantage!r} does not look at it"),
            ("rollout.resample_rounds", 0, unrewarded, f"advantage {advantage!r} looks at no reward"),
            ("rollout.resample_rounds", 0, recipe.group_size == 1, "a group of 1 never has a signal"),
            ("data.curriculum.skip", 0.0, recipe.group_size == 1, "a group of 1 never has a signal"),
            ("data.curriculum.skip", 0.0, unrewarded, f"advantage {advantage!r} looks at no reward"),
        ),
    )


def check_no_effect_shared(recipe: Settings) -> None:
    """Refuses fields without effect of those that `train` and `sft` share, and model sizes of `sft`."""
    constant = "decay is 'constant'"
    _refuse_no_effect(recipe, [("optim.end", 0.0, recipe.optim.decay == "constant", f"optim.{constant}")])
    if isinstance(recipe, Recipe) and recipe.critic:
        end = ("critic.optim.end", 0.0, recipe.critic.optim.decay == "constant", f"critic.optim.{constant}")
        _refuse_no_effect(recipe, [end])
    _refuse_no_effect(recipe, [("eval.patience", 0, not recipe.eval.every, "eval.every is 0")])
    # keep_best = 1 is the value of the complete configs, so it is allowed.
    idle = not recipe.eval.every and recipe.checkpoint.keep_best > 1
    _refuse_no_effect(recipe, [("checkpoint.keep_best", 0, idle, "eval.every is 0, and nothing says which is best")])
    if isinstance(recipe, SftRecipe):
        there = bool(recipe.model.path)
        _refuse_no_effect(recipe, [(f"model.{name}", size, there, "model.path names a model") for name, size in SIZES])


def _refuse_no_effect(recipe: Settings, rules: Iterable[tuple[str, Any, bool, str]]) -> None:
    """Refuses idle fields unless they are unset. Each rule is (field, unset value, idle, reason)."""
    values = flat(recipe)
    for field, unset, idle, why in rules:
        if idle and values[field] != unset:
            raise UserError(f"config.{field} = {values[field]!r} does nothing: {why}; set it to {unset!r}")
