"""The table of TRL's RLOO: RLOOConfig of version 1.16. What it shares with GRPOConfig is in `trl`."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tools.translate.outcome import Keys, Outcome, Rule, System, off
from jaxrl_llm.tools.translate.trl import GRPO_DEFAULTS, GRPO_RULES, IDLE, OPEN_RULES, RENAMED, SHARED
from jaxrl_llm.tools.translate.trl_counts import updates

# Keys of GRPOConfig that RLOOConfig does not have.
PREFIXES = ("sapo_", "vespo_", "vllm_importance_sampling_")
OF_GRPO = {key for key in GRPO_RULES if key.startswith(PREFIXES)} | {
    *("loss_type", "importance_sampling_level", "delta", "scale_rewards", "multi_objective_aggregation"),
    *("use_bias_correction_kl", "top_entropy_quantile", "off_policy_mask_threshold", "router_aux_loss_coef"),
    *("entropy_coef", "entropy_coef_min", "use_adaptive_entropy", "entropy_target", "entropy_coef_delta"),
    *("entropy_coef_max", "max_tool_calling_iterations"),
}


def penalty(value: Any, keys: Keys) -> Outcome:
    """The coefficient of the KL penalty: k1 of the tokens, in the reward of a completion."""
    if not value:
        return Outcome("mapped", {"kl": None})
    return Outcome("mapped", {"kl.placement": "reward", "kl.coef": float(value), "kl.estimator": "k1"})


def clip(value: Any, keys: Keys) -> Outcome:
    """The clip of the ratio."""
    low = float(keys["epsilon"])
    high = low if keys["epsilon_high"] is None else float(keys["epsilon_high"])
    fields = {"loss.name": "ppo_clip", "loss.clip_low": low, "loss.clip_high": high, "loss.delta": 0.0}
    # With one update the ratio is 1: the gradient of a product of ratios is that of their sum.
    if updates(keys) == 1:
        return Outcome("mapped", fields, "one update on a rollout: the ratio is 1, and nothing is clipped")
    return Outcome("changed", fields, "a ratio for each token here; there one for a completion, the product of them")


def truncated(value: Any, keys: Keys) -> Outcome:
    """Whether completions that the limit cut are left out."""
    reason = "TRL still divides the loss by the number of all completions, here by that of those with a trained token"
    return Outcome("changed" if value else "mapped", {"mask.truncated": bool(value)}, reason * bool(value))


RLOO_RULES: dict[str, Rule] = {key: rule for key, rule in GRPO_RULES.items() if key not in OF_GRPO} | {
    "beta": penalty,
    "epsilon": clip,
    "epsilon_high": clip,
    "mask_truncated_completions": truncated,
    "normalize_advantages": off("advantages of rloo are not divided by a deviation here (reinforce_pp_baseline does)"),
    "reward_clip_range": off("clip the reward in its function"),
    "(rloo)": lambda value, keys: Outcome(
        "mapped", {"advantage.name": "rloo", "aggregate.mode": "sequence_sum", "aggregate.constant_length": 0}
    ),
}
DEFAULTS = {key: value for key, value in GRPO_DEFAULTS.items() if key not in OF_GRPO} | {
    "num_generations": 2,
    "beta": 0.05,
    "(rloo)": None,
}
REST = {key: rule for key, rule in (SHARED | IDLE | OPEN_RULES).items() if key not in RLOO_RULES}
RLOO = System("TRL's RLOO", "1.16.0", RLOO_RULES | REST, DEFAULTS, lambda keys: "grpo", renamed=RENAMED)
