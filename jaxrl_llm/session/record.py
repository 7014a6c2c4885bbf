"""The record of a training step: its timer, its metrics, and their summary for metrics.jsonl."""

from __future__ import annotations

import time
import zlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm.learner.update import TRAINED
from jaxrl_llm.machine import distributed, transfers
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.structs import Array, Rollouts
from jaxrl_llm.tasks.protocol import COLUMN

T = TypeVar("T")
LOG_CHANNEL = "log"  # channel of exchanges between processes in the thread of the log


class Timer:
    """Measures the seconds of each phase of a step.

    Phases may overlap, because the host rewards while devices score.
    """

    def __init__(self, previous_step_end: Future[float] | None = None):
        """previous_step_end: time at which the device finished the previous step; None for the first step.

        The first phase of a step may have waited for it.
        """
        self.start_time = self._last_end = time.perf_counter()
        self._previous_step_end = previous_step_end
        self.end_times: dict[str, float] = {}  # time at the end of each phase
        self.seconds: dict[str, float] = {}  # duration of each phase

    def lap(self, phase: str, *, start_time: float | None = None, end_time: float | None = None) -> None:
        """Ends a phase at `end_time` (None = now).

        It started at `start_time` (None = the end of the previous phase).
        """
        WATCHDOG.report_progress()
        end_time = time.perf_counter() if end_time is None else end_time
        start_time = self._last_end if start_time is None else start_time
        if not self.end_times:  # the first phase excludes the time in which the device still computed the last step
            start_time = max(start_time, self._previous_step_end.result()) if self._previous_step_end else start_time
            self.start_time = start_time
        self._last_end = self.end_times[phase] = end_time
        self.seconds[phase] = end_time - start_time

    @property
    def total_seconds(self) -> float:
        """Seconds from the start of the first phase to the end of the last phase."""
        return max(self.end_times.values()) - self.start_time


@dataclass
class Record:
    """The results of a step, which the log will write. Arrays are still on the device."""

    step: int
    timer: Timer
    tokens: int  # tokens of this process's completions, without padding
    updates: list[dict[str, Array]]  # metrics of each update
    metrics: dict[str, Any]  # metrics of the whole step
    updated: Future[float]  # time at which the updates were done
    scored: Future[float] | None = None  # time at which the scores were ready
    samples: Samples | None = None
    rewards: Array | None = None  # [B, G], task rewards
    evaluation: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Returns the metrics of the step for metrics.jsonl. Waits for the device.

        `update_metrics` merges the metrics of the updates. A reward channel is omitted if its function abstained from
        all completions.
        """
        self._finish_timing()
        # Metrics of the whole step come first, then those of its samples, of its updates, and the times of its phases.
        updates, metrics = transfers.to_host((self.updates, self.metrics))
        record = {name: x for name, x in metrics.items() if not (name.startswith("reward/") and np.isnan(x))}
        if self.samples:
            record |= (
                rollout_metrics(self.samples.rollouts, self.step)
                | text_metrics(self.samples)
                | source_metrics(self.samples)
                | environment_metrics(self.samples)
            )
            measured = gather_by_name(self.samples.wait_for_grades().metrics)
            record |= {name: sum(values) / len(values) for name, values in measured.items()}
        record |= update_metrics(updates) | self.evaluation
        record |= {f"time/{phase}": seconds for phase, seconds in self.timer.seconds.items()}
        tokens = sum(distributed.exchange(self.tokens, LOG_CHANNEL))
        return record | {"time/step": self.timer.total_seconds, "tokens_per_second": tokens / self.timer.total_seconds}

    def _finish_timing(self) -> None:
        """Adds the phases that end on the device to the timer: scoring, if the step has scores, and the updates."""
        timer, updated = self.timer, self.updated.result()
        if self.scored:  # scores and rewards overlap, because both phases start after the rollout
            scored = self.scored.result()
            timer.lap("score", start_time=timer.end_times["rollout"], end_time=scored)
            timer.lap("update", start_time=max(scored, timer.end_times["reward"]), end_time=updated)
        else:
            timer.lap("update", end_time=updated)


# Suffixes of metrics that describe a state after the update, such as a coefficient.
STATE_SUFFIXES = "learning_rate", "/coef", "updates/skipped", "updates/skipped_in_a_row"
# Prefixes of metrics that belong to an update as a whole, and are not means over its tokens.
UPDATE_PREFIXES = "grad_norm", "update_norm", "update_size", "kl/to_reward", "loss/total", "loss/balance", "router/"


def update_metrics(updates: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the metrics of a step's updates.

    Means over tokens are weighted by the trained tokens of each update, so the result is the mean over all trained
    tokens. Metrics that compare sampler and trainer come from the first update that trained a token, and states such
    as coefficients from the last update. Updates without a trained token are ignored.
    """
    # An update has a number of trained tokens for each learner, such as policy and critic. The largest one counts.
    trained_tokens = [max(value for name, value in update.items() if name.endswith(TRAINED)) for update in updates]
    training_updates = [update for update, tokens in zip(updates, trained_tokens, strict=True) if tokens]
    names = training_updates[0] if training_updates else {}
    record = {
        name: _merge_metric(name, [update[name] for update in training_updates], trained_tokens) for name in names
    }
    record |= {name: np.mean([update[name] for update in updates]) for name in updates[0] if "skip/" in name}
    if training_updates:
        first_update = training_updates[0]
        # These metrics come from the first update, because later updates compare a changed policy with the sampler.
        record |= {name: x for name, x in first_update.items() if name.startswith(("sampler/", "importance/"))}
        # The first update should clip nothing, because the policy has not moved since it sampled the rollout.
        record |= {"clip/first": first_update["clip/fraction"]} if "clip/fraction" in first_update else {}
    record |= {name: x for name, x in updates[-1].items() if name.endswith(STATE_SUFFIXES)}
    record = {name: x for name, x in record.items() if not name.endswith(TRAINED)}
    if "logprobs/good" in record:  # the mean over tokens of completions with a positive advantage
        total, good = record.pop("logprobs/good"), record.pop("tokens/good")
        record |= {"logprobs/good": total / good} if good else {}
    # The effective sample size of importance weights, as a share of the tokens, is mean(w)**2 / mean(w**2).
    for prefix in ("importance/", "importance/raw_"):
        if f"{prefix}square" in record:
            record[f"{prefix}ess"] = record[f"{prefix}mean"] ** 2 / max(record.pop(f"{prefix}square"), 1e-30)
    return record


def _merge_metric(name: str, values: list[Any], counts: list[Any]) -> Any:
    """Merges the values of one metric. values: one per update that trained a token. counts: tokens of all updates."""
    if reduction := {"_max": np.max, "_min": np.min}.get(name[-4:]):
        return reduction(values)
    if name.removeprefix("critic/").startswith(UPDATE_PREFIXES):
        return np.mean(values)
    return np.average(values, weights=[count for count in counts if count])


def rollout_metrics(rollouts: Rollouts, step: int) -> dict[str, Any]:
    """Returns metrics of the completions of all processes: lengths, truncation, and the lag of the sampling weights."""
    lengths = distributed.gather(rollouts.completion_mask.sum(axis=-1), LOG_CHANNEL)
    truncated = distributed.gather(rollouts.truncated, LOG_CHANNEL)
    record = {"completion/length": lengths.mean(), "completion/length_max": lengths.max()}
    record |= {"completion/truncated": truncated.mean(), "groups/count": len(lengths)}
    if len(lengths) > 1:
        record |= {
            "completion/length_error": standard_error(lengths),
            "completion/truncated_error": standard_error(truncated),
        }
    # The lag of a token is the number of steps between the push of its sampling weights and this step.
    versions, tokens = np.unique(rollouts.versions[rollouts.loss_mask], return_counts=True)
    versions, tokens = distributed.gather(versions, LOG_CHANNEL), distributed.gather(tokens, LOG_CHANNEL)
    if len(versions):
        lags = np.repeat(step - 1 - versions, tokens)
        record |= {"rollout/lag": lags.mean(), "rollout/lag_p95": np.percentile(lags, 95)}
    return record | episode_metrics(rollouts)


def standard_error(values: np.ndarray) -> float:
    """Returns the cluster-robust standard error (Liang and Zeger, 1986) of the mean of values [B, G].

    The completions of a group are correlated, so the error is the standard deviation of the B group means / sqrt(B).
    """
    return float(values.mean(axis=1).std(ddof=1) / np.sqrt(len(values)))


def gather_by_name(numbers: dict[str, T]) -> dict[str, list[T]]:
    """Returns the values of all processes by name, in the order of the processes."""
    lists: dict[str, list[T]] = {}
    for process_numbers in distributed.exchange(numbers, LOG_CHANNEL):
        for name, number in process_numbers.items():
            lists.setdefault(name, []).append(number)
    return lists


def episode_metrics(rollouts: Rollouts) -> dict[str, Any]:
    """Returns the means of the environments' metrics over the episodes of all processes; {} without environments."""
    if not distributed.exchange(rollouts.episodes != {}, LOG_CHANNEL)[0]:
        return {}
    record = _episode_means(_episode_sums(rollouts))
    seconds = record.pop("episode/seconds", 0.0)
    return record | {"time/environment": seconds}


def environment_metrics(samples: Samples) -> dict[str, Any]:
    """Returns episode/NAME/..., the same means over the episodes of each named environment; {} without named ones."""
    if not samples.has_named_environments:
        return {}
    names = np.array([row[COLUMN] for row in samples.prompts.rows])
    sums = {
        f"{name}/{metric}": pair
        for name in np.unique(names).tolist()
        for metric, pair in _episode_sums(samples.rollouts, names == name).items()
        if metric != "seconds"  # time/environment has the seconds of all environments
    }
    return _episode_means(sums)


def _episode_sums(rollouts: Rollouts, groups: np.ndarray | None = None) -> dict[str, tuple[float, int]]:
    """Returns the sum of each metric over episodes, and the number of episodes that have the metric.

    groups [B]: True for the groups whose episodes count, None for all of them.
    """
    chosen = np.ones(len(rollouts.truncated), bool) if groups is None else groups
    policy_tokens = rollouts.loss_mask[chosen].sum(axis=-1)
    tokens = {
        "policy_tokens": policy_tokens,
        "environment_tokens": rollouts.completion_mask[chosen].sum(axis=-1) - policy_tokens,
    }
    measured = {name: values[chosen] for name, values in rollouts.episodes.items()} | tokens
    # A metric is NaN where an agent has not measured it.
    return {name: (float(np.nansum(x)), int(np.sum(~np.isnan(x)))) for name, x in measured.items()}


def _episode_means(sums: dict[str, tuple[float, int]]) -> dict[str, float]:
    """Returns the means over the episodes of all processes. sums: those of this process."""
    totals = {name: np.sum(pairs, axis=0) for name, pairs in gather_by_name(sums).items()}
    return {f"episode/{name}": float(total / size) for name, (total, size) in totals.items() if size}


def source_metrics(samples: Samples) -> dict[str, Any]:
    """Returns metrics of each source of a mixture over all processes, or {} without a mixture.

    share: share of the step's groups. no_signal: share of the source's groups without a gradient. reward: mean reward.
    """
    if not samples.prompts.sources:
        return {}
    # A group is a pair: whether it has no signal, and its finite rewards.
    local_groups: dict[str, list[tuple[bool, list[float]]]] = {}
    rewards_of_groups = samples.wait_for_grades().rewards.total
    rows = zip(samples.prompts.sources, samples.no_signal.tolist(), rewards_of_groups, strict=True)
    for source, has_no_signal, rewards in rows:
        local_groups.setdefault(source, []).append((has_no_signal, rewards[np.isfinite(rewards)].tolist()))
    groups = {name: list(chain(*lists)) for name, lists in gather_by_name(local_groups).items()}
    group_count, record = sum(map(len, groups.values())), {}
    for name, pairs in groups.items():
        no_signal_flags = [has_no_signal for has_no_signal, _ in pairs]
        rewards = list(chain(*(rewards for _, rewards in pairs)))
        record[f"source/{name}/share"] = len(pairs) / group_count
        record[f"source/{name}/no_signal"] = np.mean(no_signal_flags)
        record |= {f"source/{name}/reward": np.mean(rewards)} if rewards else {}
    return record


GRAM_TOKENS = 4  # length of the token sequences whose repetition is measured
MAX_TEXTS = 64  # completions of a step, over all processes, whose text is measured, which takes milliseconds


def text_metrics(samples: Samples) -> dict[str, Any]:
    """Returns three metrics of repetition in the first completions of a step.

    completion/distinct: share of the completions of a group that differ from each other. completion/repeated: share of
    a completion's sequences of GRAM_TOKENS tokens that occurred in it before. completion/compressed: size of the texts
    after deflate, as a share of their size; it is large for noise and small for repetition. Only tokens of the policy
    count, because an environment may show the same document twice.
    """
    tokens, mask = samples.rollouts.completions, samples.rollouts.loss_mask
    first_groups = slice(max(MAX_TEXTS // (tokens.shape[1] * distributed.count()), 1))  # groups of this process
    # Each group becomes a list of its completions, of which each is the tokens of the policy without padding.
    groups = [
        [completion[is_policy] for completion, is_policy in zip(group_tokens, group_mask, strict=True)]
        for group_tokens, group_mask in zip(tokens[first_groups], mask[first_groups], strict=True)
    ]
    texts = [text for group in _policy_texts(samples.wait_for_grades())[first_groups] for text in group]
    all_text = "\n".join(texts).encode()
    distinct_shares = [len({completion.tobytes() for completion in group}) / len(group) for group in groups]
    repeated_shares = [repeated_share(completion) for group in groups for completion in group]
    local_metrics = {
        "completion/distinct": float(np.mean(distinct_shares)),
        "completion/repeated": float(np.mean(repeated_shares)),
    }
    if all_text:
        local_metrics["completion/compressed"] = len(zlib.compress(all_text)) / len(all_text)
    # The result is the mean over the processes.
    return {name: np.mean(values) for name, values in gather_by_name(local_metrics).items()}


def _policy_texts(graded: GradedCompletions) -> list[list[str]]:
    """Returns the texts that the policy wrote, without those of an environment: B lists of G texts."""
    if not graded.turns:
        return graded.texts

    def policy_text(turns: list[dict[str, str]]) -> str:
        return "\n".join(turn["content"] for turn in turns if turn["role"] == "assistant")

    return [[policy_text(turns) for turns in group] for group in graded.turns]


def repeated_share(tokens: np.ndarray) -> float:
    """Returns the share of a completion's sequences of GRAM_TOKENS tokens that occurred in it before."""
    if len(tokens) < GRAM_TOKENS:
        return 0.0
    grams = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(tokens, GRAM_TOKENS))
    return 1 - len(set(map(bytes, grams))) / len(grams)  # ten times as fast as np.unique
