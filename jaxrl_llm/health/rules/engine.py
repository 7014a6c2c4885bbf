"""Health rules on the engine: whether it samples from the distribution that the trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from math import isclose
from typing import Any

import numpy as np

from ..finding import Finding, LogRecord
from ..history import KEPT_WITHOUT_GAP, History
from .bounds import (
    BFLOAT16,
    DRIFT_FACTOR,
    FIRST_CLIPPED,
    IMPORTANCE_KL,
    MEAN_WEIGHT,
    ROUNDINGS,
    SAMPLE_SIZE,
    STALE_FACTOR,
    WEIGHT_OFF,
)


def kl_bound(record: LogRecord) -> float:
    """Returns the largest KL(sampler || trainer) that rounding explains.

    If log-probabilities differ by d, the KL is about d^2 / 2. Rounding explains d = ROUNDINGS e, where e is the
    rounding error of the number type. Other trainers do not log e, so e is that of bfloat16, in which most of them
    train.
    """
    rounding = record.get("importance/rounding", BFLOAT16)
    return max(IMPORTANCE_KL, (ROUNDINGS * (rounding or 0.0)) ** 2 / 2)


def _weight_statistics(record: LogRecord) -> tuple[float, float] | None:
    """Returns mean and effective sample size of a step's importance weights; None if the record lacks one of the two.

    The weights before truncation count if the log has them. Other trainers log only the truncated weights.
    """
    for kind in ("importance/raw_", "importance/"):
        mean, size = record.get(f"{kind}mean"), record.get(f"{kind}ess")
        if mean is not None and size is not None:
            return mean, size
    return None


def _younger_samples(record: LogRecord) -> str:
    """Returns the settings with which samples are younger, as the beginning of a remedy."""
    oldest_group = record.get("rollout/age_max")  # only partial rollouts have it
    if oldest_group is None:
        return "lower rollout.max_lag"
    # If the run has no lag, no token is older than its group.
    lag = "rollout.max_lag, " if record["rollout/lag_p95"] > oldest_group else ""
    return f"lower {lag}rollout.partial or rollout.max_age"


def _has_far_weights(record: LogRecord) -> bool:
    """Returns whether the importance weights of a step are so far from 1 that no correction helps."""
    statistics = _weight_statistics(record)
    return statistics is not None and (
        not MEAN_WEIGHT[0] <= statistics[0] <= MEAN_WEIGHT[1] or statistics[1] < SAMPLE_SIZE
    )


def _kl_excess(record: LogRecord) -> float | None:
    """Returns KL(sampler || trainer) of a step as a multiple of `kl_bound`; None if the record lacks the KL."""
    kl = record.get("importance/kl")
    return None if kl is None else kl / kl_bound(record)


def _kl_beyond_rounding(record: LogRecord) -> float:
    """Returns KL(sampler || trainer) of a step as a multiple of a value that no rounding explains; 0 if missing."""
    return (record.get("importance/kl") or 0.0) / max(4 * kl_bound(record), 10 * IMPORTANCE_KL)


def sampler_mismatch(history: History) -> Finding | None:
    """Rule F7: sampler and trainer compute distributions that differ too much for the importance correction.

    In a healthy run they differ by rounding and, with a lag, by the age of the weights. The KL exceeds its bound in at
    most 1 % of the steps, and with a lag, importance weights are far from 1 in less than half of the steps.
    """
    if history.trains_nothing:
        return None
    record = history.last_records[-1]
    kl, weight_statistics, lag_p95 = (
        record.get("importance/kl"),
        _weight_statistics(record),
        record.get("rollout/lag_p95"),
    )
    if kl is None:
        return None
    # If the run has a lag, the policies differ by design, so the KL tells nothing about the engine. If the log does not
    # tell the lag, the KL counts only where it is often larger than a lag explains.
    may_be_old = lag_p95 is None or lag_p95 > 0
    kl_is_ill = _kl_beyond_rounding(record) > 1
    if lag_p95 is None:  # Asynchronous trainers do not log their lag.
        differs = kl_is_ill and history.is_often_above(_kl_beyond_rounding, 1.0, 0.01)
    else:
        # One step with a KL that no rounding explains is enough. A KL that only exceeds its bound must do so often.
        differs = not lag_p95 and (
            kl_is_ill or (kl > kl_bound(record) and history.is_often_above(_kl_excess, 1.0, 0.01))
        )
    evidence = [f"KL(sampler || trainer) {kl:.1e}"] if differs else []
    recent_records = history.last_records[-history.recent_steps :]
    weights_are_far = _has_far_weights(record) and (
        not may_be_old or sum(map(_has_far_weights, recent_records)) > history.recent_steps / 2
    )
    evidence += (
        [f"mean importance weight {weight_statistics[0]:.2f}, effective sample size {weight_statistics[1]:.0%}"]
        if weight_statistics and weights_are_far
        else []
    )
    if not evidence:
        return None
    return Finding(
        "error" if weights_are_far or (kl_is_ill and lag_p95 is not None) else "warning",
        evidence=", ".join(evidence),
        cause="the tokens were sampled with weights that are too old"
        if lag_p95
        else "the engine computes other log-probabilities than the trainer for the same tokens",
        fix=f"{_younger_samples(record)}, or lower optim.learning_rate"
        if lag_p95
        else "set model.dtype to the dtype of the engine, and importance.action = 'truncate'",
        reference="arXiv 2505.24298, 2510.18855",
    )


def stale_weights(history: History) -> Finding | None:
    """Rule F23: after a push of weights, the servers still answer with the previous weights.

    Each weight check compares the servers' log-probabilities with those of the pushed weights (gap) and of the previous
    weights (gap_before). In a healthy run the gap is that of rounding. The rule fires if, in the last three checks, the
    gap is the larger of the two and STALE_FACTOR times the usual one, and each gap_before equals the gap of the check
    before, which means that the servers' answers did not change.
    """
    gap_names = "weight_check/gap", "weight_check/gap_before"
    # Only the last records are used, because the history keeps them without gaps, and each check is compared with the
    # check before.
    checks = [r for r in history.records[-KEPT_WITHOUT_GAP:] if all(r.get(name) is not None for name in gap_names)]
    last_checks = checks[-3:]
    if len(last_checks) < 3 or not all(r["weight_check/gap"] >= r["weight_check/gap_before"] > 0 for r in last_checks):
        return None
    if not all(
        isclose(b["weight_check/gap_before"], a["weight_check/gap"], rel_tol=0.2) for a, b in pairwise(last_checks)
    ):
        return None
    # The usual gap is the lower quartile of the smaller gaps, so that a quarter of healthy checks is enough.
    usual_gap = np.quantile([min(r["weight_check/gap"], r["weight_check/gap_before"]) for r in checks], 0.25)
    if min(r["weight_check/gap"] for r in last_checks) < max(STALE_FACTOR * usual_gap, 1e-5):
        return None
    last_check = last_checks[-1]
    return Finding(
        "error",
        evidence=f"after a push, the servers' log-probabilities differ by {last_check['weight_check/gap']:.1e} from "
        f"the new weights, but only by {last_check['weight_check/gap_before']:.1e} from the previous ones "
        f"(usual difference: {usual_gap:.1e})",
        cause="the servers did not load the pushed weights",
        fix="restart the servers, and resume the run",
        reference="TRL #5312",
    )


def engine_drift(history: History) -> Finding | None:
    """Rule F24: the gap between engine and trainer grows although both use the same weights.

    A healthy gap is that of rounding: it changes with the entropy, but not by DRIFT_FACTOR. While no update changes the
    weights, the gap does not change at all.
    """

    def gaps(records: Sequence[LogRecord]) -> list[Any]:
        return [r["sampler/gap_mean"] for r in records if r.get("sampler/gap_mean") is not None]

    unchanged_gaps = gaps([*takewhile(lambda r: not r.get("update_norm"), reversed(history.last_records))][::-1])
    first_gap, last_gap = history.start_mean("sampler/gap_mean"), history.recent_mean("sampler/gap_mean")
    same_weights = len(unchanged_gaps) >= 8
    if same_weights:
        first_gap, last_gap = np.mean(unchanged_gaps[:4]), np.mean(unchanged_gaps[-4:])
    elif (
        history.last_records[-1].get("rollout/lag_p95")
        or history.rise_strength("sampler/gap_mean", logarithmic=True) <= 1
    ):
        return None
    # Gaps of a few rounding errors are ignored, because their ratio means nothing.
    least_gap = max(1e-5, 8 * (history.last_records[-1].get("importance/rounding") or 0.0))
    if not (last_gap > DRIFT_FACTOR * first_gap and last_gap >= least_gap):
        return None
    return Finding(
        "error",
        evidence=f"the mean difference between the log-probabilities of engine and trainer grew from {first_gap:.1e} "
        "to "
        f"{last_gap:.1e}" + (", while the weights did not change" if same_weights else ""),
        cause="the engine's numbers drift"
        if same_weights
        else "the engine's numbers drift, or it does not have the pushed weights",
        fix="restart the engine, and resume the run",
        reference="measured here",
    )


def _off_weight(record: LogRecord) -> float | None:
    """Returns the distance of a step's mean importance weight from 1; None if no older weights sampled the step."""
    weight = record.get("importance/mean")
    return abs(weight - 1) if weight is not None and record.get("rollout/lag_p95") else None


def stale_samples(history: History) -> Finding | None:
    """Rule F30: samples are so old that the importance correction removes a part of their weight.

    In a healthy run the mean weight is 1 before the correction and nearly 1 after it: in at most 2 % of the steps, the
    mean of a batch is further from 1 than WEIGHT_OFF.
    """
    record = history.last_records[-1]
    if not _off_weight(record) or not history.is_often_above(_off_weight, WEIGHT_OFF, 0.02):
        return None
    return Finding(
        "warning",
        evidence=f"95 % of the tokens are at most {record['rollout/lag_p95']:g} steps old, and their mean importance "
        f"weight is {record['importance/mean']:.2f} instead of 1",
        cause="the tokens were sampled by a policy that is too old, so the importance correction discards a part of "
        "them",
        fix=_younger_samples(record),
        reference="arXiv 2505.24298",
    )


def phantom_clipping(history: History) -> Finding | None:
    """Rule F8: the first update on a rollout clips tokens, although the policy has not changed since it sampled them.

    In a healthy run only rounding clips tokens in the first update, so at most one step in ten exceeds the bound.
    """
    clipped_share, lag = history.recent_mean("clip/first"), history.recent_mean("rollout/lag_p95")
    if lag > 0 or not clipped_share > FIRST_CLIPPED or not history.is_often_above("clip/first", FIRST_CLIPPED, 0.1):
        return None
    return Finding(
        "error",
        evidence=f"{clipped_share:.1%} of the tokens are clipped in the first optimizer step on a rollout, where "
        "none should be",
        cause="the old log-probabilities are rounded differently from those of the update, so clipped tokens have "
        "no gradient",
        fix="let the trainer compute the old log-probabilities: set model.dtype to the engine's dtype, or the "
        "engine's dtype to float32",
        reference="docs/failures.md F8",
    )
