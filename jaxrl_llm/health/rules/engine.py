"""Rules on the engine: whether it samples from what the trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from math import isclose
from typing import Any

import numpy as np

from ..finding import Finding, LogRecord
from ..history import GAPLESS, History
from .bounds import (
    BFLOAT16,
    DRIFT,
    FIRST_CLIPPED,
    IMPORTANCE_KL,
    MEAN_WEIGHT,
    ROUNDINGS,
    SAMPLE_SIZE,
    STALE,
    WEIGHT_OFF,
)


def kl_bound(record: LogRecord) -> float:
    """Returns the KL(sampler || trainer) from which on the two differ by more than by rounding.

    Log-probabilities that are off by ROUNDINGS rounding errors e have a KL of (ROUNDINGS e)^2 / 2, since KL = d^2 / 2.
    Other trainers log no rounding error, and most of them train in bfloat16.
    """
    rounding = record.get("importance/rounding", BFLOAT16)
    return max(IMPORTANCE_KL, (ROUNDINGS * (rounding or 0.0)) ** 2 / 2)


def _sizes(record: LogRecord) -> tuple[float, float] | None:
    """Returns mean and effective sample size of the weights of tokens before the correction cuts them.

    Other trainers log them only as used. A sum of two is None: the record lacks one.
    """
    for kind in ("importance/raw_", "importance/"):
        mean, size = record.get(f"{kind}mean"), record.get(f"{kind}ess")
        if mean is not None and size is not None:
            return mean, size
    return None


def _far(record: LogRecord) -> bool:
    """Returns whether the weights are so far from 1 that no correction mends them."""
    sizes = _sizes(record)
    return sizes is not None and (not MEAN_WEIGHT[0] <= sizes[0] <= MEAN_WEIGHT[1] or sizes[1] < SAMPLE_SIZE)


def _excess(record: LogRecord) -> float | None:
    """Returns KL(sampler || trainer) as a multiple of its bound."""
    kl = record.get("importance/kl")
    return None if kl is None else kl / kl_bound(record)


def _times_ill(record: LogRecord) -> float:
    """Returns KL(sampler || trainer) as a multiple of what no rounding explains; 0 if it is missing."""
    return (record.get("importance/kl") or 0.0) / max(4 * kl_bound(record), 10 * IMPORTANCE_KL)


def sampler_mismatch(history: History) -> Finding | None:
    """F7: sampler and trainer compute different distributions, too different for the correction.

    A healthy engine differs by rounding, and by older weights where a lag allows them. Its KL is above the bound in
    1 % of the steps at most, and weights that are old are far from 1 in less than half of them: one batch may be odd.
    """
    if history.trains_nothing:
        return None
    r = history.latest[-1]
    kl, sizes, lag = r.get("importance/kl"), _sizes(r), r.get("rollout/lag_p95")
    if kl is None:
        return None
    # A lag makes the policies differ by design, so a KL then says nothing of the engine. If the log has no lag, a KL
    # counts only where it is often larger than a lag explains.
    old = lag is None or lag > 0
    ill = _times_ill(r) > 1
    if lag is None:  # asynchronous trainers do not log their lag
        differs = ill and history.often_above(_times_ill, 1.0, 0.01)
    else:
        # One step with an ill KL is enough. A KL that is only above the bound must be so often.
        differs = not lag and (ill or (kl > kl_bound(r) and history.often_above(_excess, 1.0, 0.01)))
    signs = [f"KL(sampler || trainer) {kl:.1e}"] if differs else []
    recent = history.latest[-history.recent :]
    far = _far(r) and (not old or sum(map(_far, recent)) > history.recent / 2)
    signs += [f"mean weight {sizes[0]:.2f}, effective sample size {sizes[1]:.0%}"] if sizes and far else []
    if not signs:
        return None
    return Finding(
        "error" if far or (ill and lag is not None) else "warning",
        ", ".join(signs),
        "the weights that sampled are too old" if lag else "the engine does not compute what the trainer computes",
        "lower rollout.max_lag, set rollout.partial = False, or lower optim.learning_rate"
        if lag
        else "set importance.action = 'truncate', and model.dtype to the server's",
        "arXiv 2505.24298, 2510.18855",
    )


def stale_weights(history: History) -> Finding | None:
    """F23: after a push, the servers still answer with the previous weights.

    In a healthy run the gap to the pushed weights is that of rounding, as in earlier checks. It may by chance exceed
    the one to the weights before, where an update changes less than rounding; so it must be STALE times the usual.
    And the servers answer something else after each push. If they do not, the gap to the weights before is the gap of
    the check before.
    """
    both = "weight_check/gap", "weight_check/gap_before"
    # Only records without a gap count, because each check is compared with the check before it.
    checks = [r for r in history.records[-GAPLESS:] if all(r.get(name) is not None for name in both)]
    last = checks[-3:]
    if len(last) < 3 or not all(r["weight_check/gap"] >= r["weight_check/gap_before"] > 0 for r in last):
        return None
    if not all(isclose(b["weight_check/gap_before"], a["weight_check/gap"], rel_tol=0.2) for a, b in pairwise(last)):
        return None
    # The smaller gap, and the lower quartile of it: the checks may already be ill, as long as a quarter was not.
    usual = np.quantile([min(r["weight_check/gap"], r["weight_check/gap_before"]) for r in checks], 0.25)
    if min(r["weight_check/gap"] for r in last) < max(STALE * usual, 1e-5):
        return None
    r = last[-1]
    return Finding(
        "error",
        f"gap {r['weight_check/gap']:.1e} after a push, {r['weight_check/gap_before']:.1e} to the weights before, "
        f"{usual:.1e} in earlier checks",
        "pushed weights did not arrive",
        "start the servers again and resume",
        "TRL #5312",
    )


def engine_drift(history: History) -> Finding | None:
    """F24: the mismatch grows although the same weights sample and score.

    A healthy gap is that of rounding, and changes with the entropy, but not by DRIFT times. While no update changes the
    weights, it does not change at all.
    """

    def gaps(records: Sequence[LogRecord]) -> list[Any]:
        return [r["sampler/gap_mean"] for r in records if r.get("sampler/gap_mean") is not None]

    still = gaps([*takewhile(lambda r: not r.get("update_norm"), reversed(history.latest))][::-1])
    first, last = history.then("sampler/gap_mean"), history.now("sampler/gap_mean")
    same = len(still) >= 8
    if same:
        first, last = np.mean(still[:4]), np.mean(still[-4:])
    elif history.latest[-1].get("rollout/lag_p95") or history.risen("sampler/gap_mean", log=True) <= 1:
        return None
    # A gap of a few rounding errors may be any multiple of another one.
    least = max(1e-5, 8 * (history.latest[-1].get("importance/rounding") or 0.0))
    if not (last > DRIFT * first and last >= least):
        return None
    return Finding(
        "error",
        f"mean gap {first:.1e} to {last:.1e}" + (" with weights that did not change" if same else ""),
        "the engine drifts" if same else "the engine drifts, or its weights are not those that were pushed",
        "start the server again and resume",
        "measured here",
    )


def _off_weight(record: LogRecord) -> float | None:
    """Returns how far the mean weight of old samples is from 1; None: the samples of the step are not old."""
    weight = record.get("importance/mean")
    return abs(weight - 1) if weight is not None and record.get("rollout/lag_p95") else None


def stale_samples(history: History) -> Finding | None:
    """F30: samples are too old for the correction, which cuts a part of their weight.

    The weights of a healthy run have mean 1, and the correction cuts little of it: in 2 % of the steps at most, the
    mean of a batch is further from 1 than the bound.
    """
    r = history.latest[-1]
    if not _off_weight(r) or not history.often_above(_off_weight, WEIGHT_OFF, 0.02):
        return None
    return Finding(
        "warning",
        f"95 % of the tokens are at most {r['rollout/lag_p95']:g} steps old, "
        f"their mean weight is {r['importance/mean']:.2f}",
        "rollouts are too far off-policy",
        "lower rollout.max_lag, or set rollout.partial = False",
        "arXiv 2505.24298",
    )


def phantom_clipping(history: History) -> Finding | None:
    """F8: the first update on a rollout clips tokens, although the policy has not moved since it sampled them.

    In a healthy run it clips none, but for rounding, so that at most one step in ten is above the bound.
    """
    clipped, lag = history.now("clip/first"), history.now("rollout/lag_p95")
    if lag > 0 or not clipped > FIRST_CLIPPED or not history.often_above("clip/first", FIRST_CLIPPED, 0.1):
        return None
    return Finding(
        "error",
        f"{clipped:.1%} of the tokens are clipped in the first optimizer step on a rollout",
        "old log-probabilities are rounded in another way than those of the update, so these tokens teach nothing",
        "let the trainer compute them: set model.dtype to the engine's, or the engine's to float32",
        "docs/failures.md F8",
    )
