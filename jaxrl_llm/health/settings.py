"""The settings that a remedy names, in the words of TRL and veRL: a finding names those of jaxrl_llm."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .finding import Finding

# Ours -> TRL's GRPOConfig, veRL without actor_rollout_ref; "": it has none. docs/coming_from.md says how they differ.
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
    """Returns a line for each setting that the remedies name: "optim.learning_rate is learning_rate in TRL, …"."""
    text, lines = " ".join(finding.fix for finding in findings), []
    for name, theirs in SETTINGS.items():
        words = ", ".join(f"{word} in {who}" for word, who in zip(theirs, ("TRL", "veRL"), strict=True) if word)
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]\w)", text):
            lines.append(f"{name} is {words}")
    return lines
