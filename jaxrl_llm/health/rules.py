"""Health rules: pure functions that find a problem in a run's records, with its cause and remedy.

A rule gets the records of metrics.jsonl, oldest first, and returns a finding or None. Its keyword arguments are
fields of `config.health`. docs/health.md lists the rules. If it gives no source for a bound, the bound was calibrated
on the runs named there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from jaxrl_llm.config.names import keywords
from jaxrl_llm.config.schema import Count, MayChange

Record: TypeAlias = dict[str, Any]
WINDOW = 16  # number of records that rules get, at most


@dataclass(frozen=True)
class Finding:
    """A problem that a rule found."""

    id: str
    severity: str  # "look" or "bad"
    evidence: str
    cause: str
    fix: str
    reference: str
    action: str = "warn"  # or "stop", which ends the run

    def line(self) -> str:
        return f"health {self.id} ({self.severity}): {self.evidence}: {self.cause}; {self.fix} [{self.reference}]"

    record = asdict


def findings(history: Sequence[Record], bounds: Mapping[str, Any]) -> list[Finding]:
    """Applies all rules to the latest records; bounds: the `health` section of a config."""
    latest = [_finite_values(record) for record in history[-WINDOW:]]
    if not latest:
        return []
    found = [rule(latest, **{name: bounds[name] for name in keywords(rule)}) for rule in RULES]
    return [finding for finding in found if finding]


def _finite_values(record: Record) -> Record:
    """Removes non-finite values (null in metrics.jsonl) from a record, and lists their names in "not_finite"."""
    names = sorted(name for name, x in record.items() if x is None)
    return {name: x for name, x in record.items() if x is not None} | {"not_finite": names}


def sampler_mismatch(history: Sequence[Record]) -> Finding | None:
    """F7: sampler and trainer compute different distributions, too different for the correction."""
    r = history[-1]
    if not {"importance/kl", "importance/mean", "importance/ess", "rollout/lag_p95"} <= r.keys():
        return None
    kl, mean, ess, stale = r["importance/kl"], r["importance/mean"], r["importance/ess"], r["rollout/lag_p95"] > 0
    signs = [f"KL(sampler || trainer) {kl:.1e}"] if kl > 1e-3 and not stale else []  # older weights must differ
    signs += [f"mean weight {mean:.2f}"] if not 0.5 <= mean <= 2 else []
    signs += [f"effective sample size {ess:.0%}"] if ess < 0.3 else []
    if not signs:
        return None
    bad = kl > 1e-2 or not 0.5 <= mean <= 2 or ess < 0.3
    return Finding(
        "sampler_mismatch",
        "bad" if bad else "look",
        ", ".join(signs),
        "the weights that sampled are too old" if stale else "the engine does not compute what the trainer computes",
        "lower rollout.max_lag or optim.learning_rate"
        if stale
        else "set importance.action = 'truncate', and model.dtype to the server's",
        "arXiv 2505.24298, 2510.18855",
    )


def stale_weights(history: Sequence[Record]) -> Finding | None:
    """F23: after a push, the servers still answer with the previous weights."""
    last = [r for r in history if "weight_check/gap_before" in r][-3:]
    if len(last) < 3 or not all(r["weight_check/gap"] >= r["weight_check/gap_before"] > 0 for r in last):
        return None
    if max(r["weight_check/gap"] for r in last) < 1e-5:  # the weights hardly change
        return None
    r = last[-1]
    return Finding(
        "stale_weights",
        "bad",
        f"gap {r['weight_check/gap']:.1e} after a push, {r['weight_check/gap_before']:.1e} to the weights before",
        "pushed weights did not arrive",
        "start the servers again and resume",
        "TRL #5312",
    )


def engine_drift(history: Sequence[Record]) -> Finding | None:
    """F24: the mismatch grows although the weights do not change."""
    still = [r for r in history if r.get("update_norm", 0.0) == 0.0 and "sampler/gap_mean" in r]
    if len(still) < 8 or len(still) < len(history):
        return None
    first, last = (sum(r["sampler/gap_mean"] for r in part) / 4 for part in (still[:4], still[-4:]))
    if last <= 3 * first or last < 1e-5:
        return None
    return Finding(
        "engine_drift",
        "bad",
        f"mean gap {first:.1e} to {last:.1e} with weights that did not change",
        "the engine drifts",
        "start the server again and resume",
        "measured here",
    )


def stale_samples(history: Sequence[Record]) -> Finding | None:
    """F30: samples are too old for the correction."""
    r = history[-1]
    lag, weight = r.get("rollout/lag_p95", 0), r.get("importance/mean", 1.0)
    if not lag or abs(weight - 1) <= 0.1:
        return None
    return Finding(
        "stale_samples",
        "look",
        f"95 % of the tokens are at most {lag:g} steps old, their mean weight is {weight:.2f}",
        "rollouts are too far off-policy",
        "lower rollout.max_lag",
        "arXiv 2505.24298",
    )


def updates_skipped(history: Sequence[Record], *, max_skipped: MayChange[Count]) -> Finding | None:
    """F27: many updates in a row are skipped, and the model does not change."""
    r = history[-1]
    counts = [int(x) for name, x in r.items() if name.endswith("updates/skipped_in_a_row")]
    if not max_skipped or max(counts, default=0) < max_skipped:
        return None
    names = [name for name in r["not_finite"] if not name.endswith(("_min", "_max"))]
    lower = "a lower optim.learning_rate or with model.dtype = 'float32'"
    longer = "other limits: config.mask and rollout.max_completion_tokens decide which tokens are trained"
    return Finding(
        "updates_skipped",
        "bad",
        f"{max(counts)} updates in a row were skipped, and the model stands still",
        f"their gradients are not finite ({', '.join(names[:5])})" if names else "no token in them is trained",
        f"begin a new run with {lower if names else longer}, or raise config.health.max_skipped (0: never stop)",
        "FAILURES F27",
        "stop",
    )


RULES: tuple[Callable[..., Finding | None], ...] = (
    sampler_mismatch,
    stale_weights,
    engine_drift,
    stale_samples,
    updates_skipped,
)
