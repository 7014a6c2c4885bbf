"""Refuses settings that would have no effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxrl_llm.config.load import flatten
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.scorers import FROZEN
from jaxrl_llm.rollout import engines
from jaxrl_llm.structs import Config

# Sizes of a new model, with the values of configs/sft.py.
SIZES = (
    ("hidden_size", 128),
    ("num_hidden_layers", 4),
    ("num_attention_heads", 4),
    ("num_key_value_heads", 2),
    ("intermediate_size", 384),
    ("vocabulary", 0),
)


def check_no_effect(config: Config, required: tuple[str, ...], updates: int) -> None:
    """Refuses settings without effect in a `train` config. The values of configs/grpo.py are always allowed.

    required: signals of the advantage estimator; updates: optimizer steps per rollout.
    Raises: UserError, naming the field.
    """
    k, r, c, advantage = config.kl, config.rollout, config.importance, config.advantage.name
    no_place, no_warmup = k.placement == "none", not (config.optim.warmup_steps or config.optim.warmup_ratio)
    # same_policy: the weights that sample are those at the start of the step. exact: in float32, sampler and trainer
    # also compute the same log-probabilities, to rounding.
    same_policy = engines.own_samples(config)
    exact = same_policy and config.model.dtype == "float32"
    unseen = not {"rewards", "token_rewards"} & set(required)
    unweighed, why_not = c.action == "none", "importance.action is 'none'"
    if c.action == "auto" and same_policy:
        unweighed, why_not = True, "this very policy samples, so that importance.action = 'auto' weighs nothing"
    _refuse_no_effect(
        config,
        (
            ("kl.coef", 0.0, no_place, "kl.placement is 'none'"),
            ("kl.target", 0.0, no_place, "kl.placement is 'none'"),
            ("kl.decay", "constant", no_place, "kl.placement is 'none'"),
            ("kl.estimator", "k3", no_place, "kl.placement is 'none'"),
            ("kl.refresh_every", 0, no_place, "kl.placement is 'none'"),
            ("kl.refresh_every", 0, k.refresh_every > config.num_steps, f"the run has {config.num_steps} steps"),
            ("kl.mix", 1.0, not k.refresh_every, "kl.refresh_every is 0"),
            (
                "host_memory.reference",
                False,
                (no_place or "lora" in config) and not any(name in config for name in FROZEN),
                f"there is no reference{' beside the base' * ('lora' in config)}, and none of {', '.join(FROZEN)}",
            ),
            ("kl.end", 0.0, k.decay == "constant", "kl.decay is 'constant'"),
            ("kl.horizon", 10_000, not k.target, "kl.target is 0"),
            ("kl.weighted", False, (k.placement, k.estimator) != ("loss", "k3"), "it is for k3 in the loss"),
            ("entropy.step", 0.0, not config.entropy.target, "entropy.target is 0"),
            ("entropy.most", 0.0, not config.entropy.target, "entropy.target is 0"),
            ("importance.action", "auto", exact and c.action in ("truncate", "mask"), "this very policy samples"),
            ("importance.level", "token", unweighed, why_not),
            ("importance.high", 2.0, unweighed, why_not),
            ("importance.low", 0.0, c.action != "mask", "importance.action is not 'mask'"),
            ("adaptive_warmup.kl_to_reward", 0.0, no_place, "kl.placement is 'none'"),
            ("adaptive_warmup.kl_to_reward", 0.0, not (k.coef or k.end), "kl.coef is 0"),
            ("adaptive_warmup.kl_to_reward", 0.0, no_warmup, "there is no warm-up to hold"),
            ("adaptive_warmup.update_size", 0.0, no_warmup, "there is no warm-up to hold"),
            ("mask.off_policy", 0.0, exact and updates == 1, "a rollout's only optimizer step is on-policy"),
            ("rollout.max_lag", 0, r.max_lag >= config.num_steps, f"the run has {config.num_steps} steps"),
            ("reward.overlong_tokens", 0, unseen, f"advantage {advantage!r} does not look at it"),
            (
                "rollout.resample_rounds",
                0,
                not looks_at_rewards(required),
                f"advantage {advantage!r} looks at no reward",
            ),
            ("rollout.resample_rounds", 0, config.group_size == 1, "a group of 1 never has a signal"),
            ("data.curriculum.skip", 0.0, config.group_size == 1, "a group of 1 never has a signal"),
            (
                "data.curriculum.skip",
                0.0,
                not looks_at_rewards(required),
                f"advantage {advantage!r} looks at no reward",
            ),
        ),
    )


def check_no_effect_shared(config: Config) -> None:
    """Does the same for the fields that `train` and `sft` share, and for the model sizes of `sft`."""
    constant = "decay is 'constant'"
    _refuse_no_effect(config, [("optim.end", 0.0, config.optim.decay == "constant", f"optim.{constant}")])
    if "critic" in config:
        end = ("critic.optim.end", 0.0, config.critic.optim.decay == "constant", f"critic.optim.{constant}")
        _refuse_no_effect(config, [end])
    _refuse_no_effect(config, [("eval.patience", 0, not config.eval.every, "eval.every is 0")])
    # keep_best = 1 is the value of the complete configs, so it is allowed.
    idle = not config.eval.every and config.checkpoint.keep_best > 1
    _refuse_no_effect(config, [("checkpoint.keep_best", 0, idle, "eval.every is 0, and nothing says which is best")])
    if "hidden_size" in config.model:
        there = bool(config.model.path)
        _refuse_no_effect(config, [(f"model.{name}", size, there, "model.path names a model") for name, size in SIZES])


def _refuse_no_effect(config: Config, rules: Iterable[tuple[str, Any, bool, str]]) -> None:
    """Refuses idle fields unless they are unset. Each rule is (field, unset value, idle, reason)."""
    flat = flatten(config)
    for field, unset, idle, why in rules:
        if idle and flat[field] != unset:
            raise UserError(f"config.{field} = {flat[field]!r} does nothing: {why}; set it to {unset!r}")


def looks_at_rewards(required: tuple[str, ...]) -> bool:
    """Returns whether an estimator that requires these signals uses any reward."""
    return bool({"rewards", "token_rewards", "channels"} & set(required))
