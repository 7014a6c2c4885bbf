"""Translates the config fields in a finding's remedy, which are those of jaxrl_llm, to settings of TRL and veRL."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .finding import Finding

# {field of jaxrl_llm: (field of TRL's GRPOConfig, setting of veRL below actor_rollout_ref)}; "" = it has none.
# docs/coming_from.md tells how the settings differ.
SETTINGS = {
    "completions.jsonl": ("log_completions", "trainer.rollout_data_dir"),
    "entropy.coef": ("entropy_coef", "actor.entropy_coeff"),
    "epochs": ("num_iterations", "actor.ppo_epochs"),
    "group_size": ("num_generations", "rollout.n"),
    "importance.action": ("vllm_importance_sampling_correction", "algorithm.rollout_correction.rollout_is"),
    "kl.coef": ("beta", "actor.kl_loss_coef"),
    "loss.clip_high": ("epsilon_high", "actor.clip_ratio_high"),
    "mask.truncated": ("mask_truncated_completions", ""),
    "model.dtype": ("bf16 or fp16", "actor.fsdp_config.dtype"),
    "optim.clip_norm": ("max_grad_norm", "actor.grad_clip"),
    "optim.learning_rate": ("learning_rate", "actor.optim.lr"),
    "reward.overlong_tokens": ("", "overlong_buffer.len"),
    "reward.weights": ("reward_weights", ""),
    "rollout.max_completion_tokens": ("max_completion_length", "data.max_response_length"),
    "rollout.resample_rounds": ("", "algorithm.filter_groups.enable"),
    "rollout.temperature": ("temperature", "rollout.temperature"),
    "token_mean": ("loss_type='dapo'", "actor.loss_agg_mode=token-mean"),
}


def translated(findings: Iterable[Finding]) -> list[str]:
    """Returns a line for each field that the remedies name, such as "optim.learning_rate is learning_rate in TRL"."""
    text, lines = " ".join(finding.fix for finding in findings), []
    for name, other_names in SETTINGS.items():
        words = ", ".join(
            f"{word} in {trainer}" for word, trainer in zip(other_names, ("TRL", "veRL"), strict=True) if word
        )
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]\w)", text):
            lines.append(f"{name} is {words}")
    return lines
