"""Rules on the engine: whether it samples from what the trainer computes."""

from __future__ import annotations

from jaxrl_llm.health.finding import Finding, History
from jaxrl_llm.health.rules.bounds import FIRST_CLIPPED, IMPORTANCE_KL, MEAN_WEIGHT, SAMPLE_SIZE


def sampler_mismatch(history: History) -> Finding | None:
    """F7: sampler and trainer compute different distributions, too different for the correction."""
    if history.trains_nothing:
        return None
    r = {name: x for name, x in history.latest[-1].items() if x is not None}
    if not {"importance/kl", "importance/mean", "importance/ess", "rollout/lag_p95"} <= r.keys():
        return None
    kl, weight, ess, stale = r["importance/kl"], r["importance/mean"], r["importance/ess"], r["rollout/lag_p95"] > 0
    signs = (
        [f"KL(sampler || trainer) {kl:.1e}"] if kl > IMPORTANCE_KL and not stale else []
    )  # older weights must differ
    low, high = MEAN_WEIGHT
    signs += [f"mean weight {weight:.2f}"] if not low <= weight <= high else []
    signs += [f"effective sample size {ess:.0%}"] if ess < SAMPLE_SIZE else []
    if not signs:
        return None
    return Finding(
        "sampler_mismatch",
        "error" if kl > 10 * IMPORTANCE_KL or not low <= weight <= high or ess < SAMPLE_SIZE else "warning",
        ", ".join(signs),
        "the weights that sampled are too old" if stale else "the engine does not compute what the trainer computes",
        "lower rollout.max_lag or optim.learning_rate"
        if stale
        else "set importance.action = 'truncate', and model.dtype to the server's",
        "arXiv 2505.24298, 2510.18855",
    )


def stale_weights(history: History) -> Finding | None:
    """F23: after a push, the servers still answer with the previous weights."""
    both = "weight_check/gap", "weight_check/gap_before"
    last = [r for r in history.latest if all(r.get(name) is not None for name in both)][-3:]
    if len(last) < 3 or not all(r["weight_check/gap"] >= r["weight_check/gap_before"] > 0 for r in last):
        return None
    if max(r["weight_check/gap"] for r in last) < 1e-5:  # the weights hardly change
        return None
    r = last[-1]
    return Finding(
        "stale_weights",
        "error",
        f"gap {r['weight_check/gap']:.1e} after a push, {r['weight_check/gap_before']:.1e} to the weights before",
        "pushed weights did not arrive",
        "start the servers again and resume",
        "TRL #5312",
    )


def engine_drift(history: History) -> Finding | None:
    """F24: the mismatch grows although the weights do not change."""
    still = [r for r in history.latest if not r.get("update_norm") and r.get("sampler/gap_mean") is not None]
    if len(still) < 8 or len(still) < len(history.latest):
        return None
    first, last = (sum(r["sampler/gap_mean"] for r in part) / 4 for part in (still[:4], still[-4:]))
    if last <= 3 * first or last < 1e-5:
        return None
    return Finding(
        "engine_drift",
        "error",
        f"mean gap {first:.1e} to {last:.1e} with weights that did not change",
        "the engine drifts",
        "start the server again and resume",
        "measured here",
    )


def stale_samples(history: History) -> Finding | None:
    """F30: samples are too old for the correction."""
    r = history.latest[-1]
    lag, weight = r.get("rollout/lag_p95") or 0, r.get("importance/mean") or 1.0
    if not lag or abs(weight - 1) <= 0.1:
        return None
    return Finding(
        "stale_samples",
        "warning",
        f"95 % of the tokens are at most {lag:g} steps old, their mean weight is {weight:.2f}",
        "rollouts are too far off-policy",
        "lower rollout.max_lag",
        "arXiv 2505.24298",
    )


def phantom_clipping(history: History) -> Finding | None:
    """F8: the first update on a rollout clips tokens, although the policy has not moved since it sampled them."""
    clipped, lag = history.now("clip/first"), history.now("rollout/lag_p95")
    if clipped is None or lag or clipped <= FIRST_CLIPPED:
        return None
    return Finding(
        "phantom_clipping",
        "error",
        f"{clipped:.1%} of the tokens are clipped in the first optimizer step on a rollout",
        "old log-probabilities are rounded in another way than those of the update, so these tokens teach nothing",
        "let the trainer compute them: set model.dtype to the engine's, or the engine's to float32",
        "docs/failures.md F8",
    )
