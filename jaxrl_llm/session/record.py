"""The record of a step, and its summary for the log."""

from __future__ import annotations

import time
import zlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm.learner.update import TRAINED
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.rollout.grading import GradedCompletions
from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.structs import Array, Rollouts

T = TypeVar("T")
LOG = "log"  # channel of the log's thread


class Timer:
    """Measures the seconds of each phase of a step. Phases may overlap: the host rewards while the device scores."""

    def __init__(self, after: Future[float] | None = None):
        """after: when the device finished the previous step. The first phase may have waited for that."""
        self.began = self._last = time.perf_counter()
        self._after = after
        self.at: dict[str, float] = {}  # end of each phase
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str, *, since: float | None = None, at: float | None = None) -> None:
        """Ends a phase, now or at time `at`. It began at the end of the previous phase, or at time `since`."""
        WATCHDOG.moved()
        at = time.perf_counter() if at is None else at
        since = self._last if since is None else since
        if not self.at:  # the first phase: time in which the device still did the previous step does not count
            since = max(since, self._after.result()) if self._after else since
            self.began = since
        self._last = self.at[phase] = at
        self.seconds[phase] = at - since

    @property
    def whole(self) -> float:
        """Seconds from the beginning of the first phase to the end of the last."""
        return max(self.at.values()) - self.began


@dataclass
class Record:
    """A step that the log will write. Arrays are still on the device."""

    step: int
    timer: Timer
    tokens: int  # of this process's completions, without padding
    updates: list[dict[str, Array]]  # metrics of each update
    metrics: dict[str, Any]  # of the whole step
    updated: Future[float]  # when the updates were done
    scored: Future[float] | None = None  # when the scores were ready
    samples: Samples | None = None
    rewards: Array | None = None  # [B, G], task rewards
    evaluation: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Returns the record for metrics.jsonl, without the step. Waits for the device.

        Metrics of the mismatch of sampler and trainer are from the first update that trained something, coefficients
        from the last update. Other metrics of updates are averaged (`of_updates`). A channel is left out if its
        function abstained from all completions.
        """
        self._finish_timing()
        updates, metrics = sharding.to_host((self.updates, self.metrics))
        record = {k: v for k, v in metrics.items() if not (k.startswith("reward/") and np.isnan(v))}
        if self.samples:
            record |= of_rollouts(self.samples.rollouts, self.step) | of_texts(self.samples) | of_sources(self.samples)
            measured = gathered(self.samples.wait_for_grades().metrics)
            record |= {name: sum(values) / len(values) for name, values in measured.items()}
        record |= of_updates(updates) | self.evaluation
        record |= {f"time/{phase}": seconds for phase, seconds in self.timer.seconds.items()}
        tokens = sum(distributed.exchange(self.tokens, LOG))
        return record | {"time/step": self.timer.whole, "tokens_per_second": tokens / self.timer.whole}

    def _finish_timing(self) -> None:
        timer, updated = self.timer, self.updated.result()
        if self.scored:  # score and reward overlap: both begin after the rollout
            scored = self.scored.result()
            timer.lap("score", since=timer.at["rollout"], at=scored)
            timer.lap("update", since=max(scored, timer.at["reward"]), at=updated)
        else:
            timer.lap("update", at=updated)


LAST = "learning_rate", "/coef", "updates/skipped", "updates/skipped_in_a_row"  # how names of states end
# How names of numbers of an update begin, which are no means over its tokens.
OF_AN_UPDATE = "grad_norm", "update_norm", "update_size", "kl/to_reward", "loss/total", "loss/balance", "router/"


def of_updates(updates: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the metrics of a step's updates.

    A mean over tokens weighs by the trained tokens of its update, so it is the mean over those of all updates. An
    update without a trained token has no numbers, and is left out.
    """
    counts = [max(x for name, x in u.items() if name.endswith(TRAINED)) for u in updates]
    trained = [u for u, count in zip(updates, counts, strict=True) if count]
    record = {name: _merged(name, [u[name] for u in trained], counts) for name in (trained or [{}])[0]}
    record |= {name: np.mean([u[name] for u in updates]) for name in updates[0] if "skip/" in name}
    for first in trained[:1]:
        # These metrics come from the first update, because later updates compare a changed policy with the sampler.
        record |= {name: x for name, x in first.items() if name.startswith(("sampler/", "importance/"))}
        # The first update should clip nothing, because the policy has not moved since it sampled the rollout.
        record |= {"clip/first": first["clip/fraction"]} if "clip/fraction" in first else {}
    record |= {name: x for name, x in updates[-1].items() if name.endswith(LAST)}
    record = {name: x for name, x in record.items() if not name.endswith(TRAINED)}
    if "logprobs/good" in record:  # the mean over tokens of completions with a positive advantage
        total, good = record.pop("logprobs/good"), record.pop("tokens/good")
        record |= {"logprobs/good": total / good} if good else {}
    for kind in ("importance/", "importance/raw_"):
        if f"{kind}square" in record:
            record[f"{kind}ess"] = record[f"{kind}mean"] ** 2 / max(record.pop(f"{kind}square"), 1e-30)
    return record


def _merged(name: str, values: list[Any], counts: list[Any]) -> Any:
    """Merges a metric of the updates that trained something; counts: the trained tokens of all updates."""
    if reduction := {"_max": np.max, "_min": np.min}.get(name[-4:]):
        return reduction(values)
    if name.removeprefix("critic/").startswith(OF_AN_UPDATE):
        return np.mean(values)
    return np.average(values, weights=[count for count in counts if count])


def of_rollouts(rollouts: Rollouts, step: int) -> dict[str, Any]:
    """Returns the lengths of all processes' completions, and the lag in steps of the weights that sampled them."""
    lengths = distributed.gather(rollouts.completion_mask.sum(axis=-1), LOG)
    cut = distributed.gather(rollouts.truncated, LOG)
    record = {"completion/length": lengths.mean(), "completion/length_max": lengths.max()}
    record |= {"completion/truncated": cut.mean(), "groups/count": len(lengths)}
    if len(lengths) > 1:
        record |= {"completion/length_error": error_of_mean(lengths), "completion/truncated_error": error_of_mean(cut)}
    versions, tokens = np.unique(rollouts.versions[rollouts.loss_mask], return_counts=True)
    versions, tokens = distributed.gather(versions, LOG), distributed.gather(tokens, LOG)
    if len(versions):
        lags = np.repeat(step - 1 - versions, tokens)
        record |= {"rollout/lag": lags.mean(), "rollout/lag_p95": np.percentile(lags, 95)}
    return record | of_episodes(rollouts)


def error_of_mean(values: np.ndarray) -> float:
    """Returns the standard error of the mean of values [B, G]: those of a group are alike, so groups are what varies.

    The deviation of the B means of groups over sqrt(B): the cluster-robust error (Liang and Zeger, 1986).
    """
    return float(values.mean(axis=1).std(ddof=1) / np.sqrt(len(values)))


def gathered(numbers: dict[str, T]) -> dict[str, list[T]]:
    """Returns what the processes have under each name, in their order."""
    lists: dict[str, list[T]] = {}
    for in_process in distributed.exchange(numbers, LOG):
        for name, x in in_process.items():
            lists.setdefault(name, []).append(x)
    return lists


def of_episodes(rollouts: Rollouts) -> dict[str, Any]:
    """Returns the means over the episodes of all processes of what their environments measured, if there are any."""
    if not distributed.exchange(rollouts.episodes != {}, LOG)[0]:
        return {}
    sums = {name: [float(x.sum()), x.size] for name, x in rollouts.episodes.items()}
    own, real = rollouts.loss_mask.sum(), rollouts.completion_mask.sum()
    sums |= {"policy_tokens": [float(own), rollouts.truncated.size]}
    sums |= {"environment_tokens": [float(real - own), rollouts.truncated.size]}
    pairs_of = gathered(sums)
    size = sum(count for _, count in pairs_of["policy_tokens"])
    record = {f"episode/{name}": sum(total for total, _ in pairs) / size for name, pairs in pairs_of.items()}
    seconds = record.pop("episode/seconds", 0.0)
    return record | {"time/environment": seconds}


def of_sources(samples: Samples) -> dict[str, Any]:
    """Returns, for each source of a mixture, its share of the groups, how many of these teach nothing, and its reward.

    The numbers are those of all processes.
    """
    if not samples.prompts.sources:
        return {}
    here: dict[str, list[tuple[bool, list[float]]]] = {}
    rows = zip(
        samples.prompts.sources, samples.no_signal.tolist(), samples.wait_for_grades().rewards.total, strict=True
    )
    for name, teaches_nothing, rewards in rows:
        here.setdefault(name, []).append((teaches_nothing, rewards[np.isfinite(rewards)].tolist()))
    groups = {name: list(chain(*lists)) for name, lists in gathered(here).items()}
    size, record = sum(map(len, groups.values())), {}
    for name, pairs in groups.items():
        lacking, earned = [lacks for lacks, _ in pairs], list(chain(*(rewards for _, rewards in pairs)))
        record[f"source/{name}/share"] = len(pairs) / size
        record[f"source/{name}/no_signal"] = np.mean(lacking)
        record |= {f"source/{name}/reward": np.mean(earned)} if earned else {}
    return record


GRAM = 4  # tokens
READ = 64  # completions of a step, at most, whose text is measured, of all processes: it takes milliseconds


def of_texts(samples: Samples) -> dict[str, Any]:
    """Returns how alike the first completions of this step are within their groups, within themselves and as text.

    Only what the policy wrote counts. What an environment said is left out, because it may show a document twice.
    completion/distinct: completions of a group that differ, as a share. completion/repeated: tokens that continue GRAM
    tokens which the completion has had before, as a share. completion/compressed: size of the texts after deflate, as a
    share; noise has a large one, repetition a small one.
    """
    tokens, mask = samples.rollouts.completions, samples.rollouts.loss_mask
    first = slice(max(READ // (tokens.shape[1] * distributed.count()), 1))  # groups of this process
    groups = [
        [row[real] for row, real in zip(*group, strict=True)] for group in zip(tokens[first], mask[first], strict=True)
    ]
    whole = "\n".join(text for group in _own_texts(samples.wait_for_grades())[first] for text in group).encode()
    here = {
        "completion/distinct": np.mean([len({row.tobytes() for row in group}) / len(group) for group in groups]),
        "completion/repeated": np.mean([repeated(row) for group in groups for row in group]),
    } | ({"completion/compressed": len(zlib.compress(whole)) / len(whole)} if whole else {})
    return {name: np.mean(values) for name, values in gathered({name: float(x) for name, x in here.items()}).items()}


def _own_texts(graded: GradedCompletions) -> list[list[str]]:
    """Returns what the policy wrote, B x G."""
    if not graded.turns:
        return graded.texts

    def policy_text(turns: list[dict[str, str]]) -> str:
        return "\n".join(turn["content"] for turn in turns if turn["role"] == "assistant")

    return [[policy_text(turns) for turns in group] for group in graded.turns]


def repeated(tokens: np.ndarray) -> float:
    """Returns the share of the sequences of GRAM tokens that the completion has had before."""
    if len(tokens) < GRAM:
        return 0.0
    grams = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(tokens, GRAM))
    return 1 - len(set(map(bytes, grams))) / len(grams)  # ten times as fast as np.unique
