"""Translates the metrics of other trainers to the names of jaxrl_llm."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from ..finding import LogRecord

NAMES = {  # {name of another trainer: name of jaxrl_llm}
    # TRL: GRPO and RLOO, also of older versions; then PPO
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "groups/no_signal",
    "kl": "kl/ref",
    "clip_ratio": "clip/fraction",
    "clip_ratio/region_mean": "clip/fraction",
    "cispo_clip_ratio": "clip/fraction",
    "completion_length": "completion/length",
    "completions/mean_length": "completion/length",
    "completions/clipped_ratio": "completion/truncated",
    "sampling/importance_sampling_ratio/mean": "importance/mean",
    "objective/scores": "reward/mean",
    "objective/non_score_reward": "reward/kl",
    "objective/kl": "kl/ref",
    "policy/entropy_avg": "entropy",
    "policy/clipfrac_avg": "clip/fraction",
    # veRL, and below EasyR1, which is made from it
    "critic/score/mean": "reward/mean",
    "actor/entropy": "entropy",
    "actor/kl_loss": "kl/ref",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip/fraction",
    "actor/lr": "learning_rate",
    "critic/vf_explained_var": "critic/explained_variance",
    "response_length/mean": "completion/length",
    "response_length/clip_ratio": "completion/truncated",
    "rollout_corr/k3_kl": "importance/kl",
    "rollout_corr/rollout_is_mean": "importance/mean",
    "rollout_corr/rollout_is_eff_sample_size": "importance/ess",
    "reward/overall": "reward/mean",
    "actor/entropy_loss": "entropy",
    "actor/pg_clipfrac_higher": "clip/fraction",  # pg_clipfrac_lower belongs to a second clip.
    # prime-rl: its orchestrator, then its trainer
    "reward/all/mean": "reward/mean",
    "decode_len/all/mean": "completion/length",
    "is_truncated/all/mean": "completion/truncated",
    "entropy/mean": "entropy",
    "entropy/all/mean": "entropy",
    "mismatch_kl/mean": "importance/kl",
    "mismatch_kl/all/mean": "importance/kl",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "learning_rate",
    # SkyRL, also of older versions
    "reward/avg_raw_reward": "reward/mean",
    "generate/avg_num_tokens": "completion/length",
    "policy/policy_entropy": "entropy",
    "policy/policy_kl": "kl/ref",
    "policy/grad_norm": "grad_norm",
    "policy/raw_grad_norm": "grad_norm",
    "policy/loss_metrics/clip_ratio": "clip/fraction",
    "policy/ppo_clip_ratio": "clip/fraction",
    "policy/policy_lr": "learning_rate",
}
KNOWN = ("reward", "critic/score/mean", "reward/all/mean", "reward/avg_raw_reward", "grad_norm", "actor/grad_norm")
# Names of prime-rl and SkyRL that look like reward functions but are summaries.
SUMMARY = re.compile(r"reward/(.+/(mean|max|min|std)|avg_.*|mean_.*)")


def renamed(row: dict[str, Any]) -> LogRecord:
    """Returns the metrics of another trainer under the names of jaxrl_llm; values that are not finite become None."""
    row = {name.removeprefix("train/"): x if math.isfinite(x) else None for name, x in row.items()}
    record = {NAMES.get(name, name): x for name, x in row.items() if name in NAMES or not SUMMARY.fullmatch(name)}
    for name, x in row.items():
        if name.startswith("rewards/") and not name.endswith("/std"):  # TRL names its reward functions so.
            record["reward/" + name.removeprefix("rewards/").removesuffix("/mean")] = x
    return _derived(row) | record


def _derived(row: dict[str, Any]) -> LogRecord:
    """Returns metrics that follow from other ones: standard deviation, groups without signal, KL reward and lag.

    row: metrics under the trainer's names. The lowest, mean and highest reward are those of sequences in veRL, and
    those of groups in prime-rl.
    """
    derived = dict[str, Any]()
    for place in ("critic/score/", "reward/all/"):
        low, mean, high = (row.get(f"{place}{name}") for name in ("min", "mean", "max"))
        if low is not None and mean is not None and high is not None:
            # This is the deviation of rewards that have only two values, and an upper bound for all others.
            derived["reward/std"] = derived["reward/std_bound"] = math.sqrt(max((high - mean) * (mean - low), 0.0))
            # The log of prime-rl has means of groups. Equal means do not imply equal rewards within a group.
            derived |= {"groups/no_signal": 1.0} if low == high and place == "critic/score/" else {}
    score, total = row.get("critic/score/mean"), row.get("critic/rewards/mean")
    if score is not None and total is not None:
        derived["reward/kl"] = total - score
    none_solved, all_solved = row.get("solve_none/all"), row.get("solve_all/all")
    if none_solved is not None and all_solved is not None:
        derived["groups/no_signal"] = none_solved + all_solved
    if row.get("rollout_corr/k3_kl") is not None and not any(name.startswith("fully_async/") for name in row):
        derived["rollout/lag_p95"] = 0.0  # Without this section, the weights that sample are those that score.
    return derived


class RolloutLog:
    """Joins the records of the updates on a rollout to one record, by means.

    TRL logs each update, and the reward only at the first update of a rollout.
    """

    def __init__(self):
        self._group = list[LogRecord]()
        self._broken = self._number = 0  # updates in a row without a finite gradient; finished rollouts

    def add(self, record: LogRecord) -> LogRecord | None:
        """Adds the record of an update. If it begins a new rollout, returns the record of the previous rollout."""
        if "reward/mean" not in record and "grad_norm" not in record:
            return None
        if self._group and "reward/mean" in self._group[0] and "reward/mean" not in record:
            self._group.append(record)
            return None
        finished, self._group = self.last(), [record]
        return finished

    def last(self) -> LogRecord | None:
        """Finishes the current rollout and returns its record; None if there is no current rollout.

        Rollouts are numbered from 1 in "step", because another trainer may log only some of its steps.
        """
        group, self._group = self._group, []
        if not group:
            return None
        self._number += 1
        names = {name: [record[name] for record in group if name in record] for record in group for name in record}
        means = {name: None if None in values else sum(values) / len(values) for name, values in names.items()}
        for gradient in names.get("grad_norm", ()):
            self._broken = self._broken + 1 if gradient is None else 0
        counted = {"updates/skipped_in_a_row": self._broken} if "grad_norm" in names else {}
        return means | counted | {"at": group[-1]["at"], "step": self._number}


def by_rollouts(records: Iterable[LogRecord]) -> list[LogRecord]:
    """Returns one record for each rollout. records: records of updates, with the trainer's own step number in "at"."""
    rows, rollouts = [*records], RolloutLog()
    # The first records are dropped if they belong to a rollout whose reward the log lacks.
    first = next((i for i, row in enumerate(rows) if "reward/mean" in row), 0)
    rollout_records = [*map(rollouts.add, rows[first:]), rollouts.last()]
    return [record for record in rollout_records if record is not None]
