"""Health rules: pure functions that find a problem in a run's records, with its cause and remedy.

A rule gets the `History` of a run and returns a finding or None. Its keyword arguments are fields of `config.health`.
Each file has the rules on one subject. docs/health.md lists them all. If it gives no source for a bound, the bound was
calibrated on the runs named there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ..finding import Finding, LogRecord, Needs
from ..history import FEW, RECENT, TREND, WINDOW, History
from . import engine, environment, policy, rewards, texts


def findings(history: History, bounds: Mapping[str, Any]) -> list[Finding]:
    """Applies all rules; bounds: the `health` section of a config."""
    if not history.records:
        return []
    slowly = history.slowly()

    def apply(rule: Callable[..., Finding | None]) -> Finding | None:
        arguments = {name: bounds[name] for name in _arguments(rule)}
        # The short means come first: what they show is told with the numbers of the last steps.
        finding = rule(history, **arguments) or rule(slowly, **arguments)
        return finding and replace(finding, id=rule.__name__)

    return [finding for finding in map(apply, RULES) if finding]


@cache
def _arguments(rule: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of a rule's keyword-only arguments."""
    return tuple(p.name for p in inspect.signature(rule).parameters.values() if p.kind is p.KEYWORD_ONLY)


def blind(records: Sequence[LogRecord]) -> dict[str, str]:
    """Returns {rule: missing metric or gap} for the rules that can judge none of the records."""
    lacking = {rule.__name__: needs.lacks(records) or _gaps(needs, records) for rule, needs in RULES.items()}
    return {name: lacks for name, lacks in lacking.items() if lacks}


def _gaps(needs: Needs, records: Sequence[LogRecord]) -> str:
    """Returns which metric of a rule of means has too many gaps for every window of `History`; "": none has."""
    for name in needs.metrics if needs.records >= RECENT else ():
        steps = [number for number, record in enumerate(records) if record.get(name) is not None and record["step"]]
        if all(last - first >= 2 * RECENT for first, last in zip(steps, steps[RECENT - 1 :], strict=False)):
            return f"most records lack {name}"
    return ""


AFTER_START = FEW + RECENT + 1  # records from which on `History.then` has a value
# What a rule reads, besides numbers that only its evidence has. Without it the doctor says that it could not look.
RULES: dict[Callable[..., Finding | None], Needs] = {
    engine.sampler_mismatch: Needs(("importance/kl",)),
    engine.stale_weights: Needs(("weight_check/gap", "weight_check/gap_before"), 3),
    engine.engine_drift: Needs(("sampler/gap_mean",), RECENT),
    engine.stale_samples: Needs(("rollout/lag_p95", "importance/mean")),
    rewards.no_verdict: Needs(("reward/no_verdict",)),
    policy.updates_skipped: Needs(("updates/skipped_in_a_row",)),
    engine.phantom_clipping: Needs(("clip/first",), RECENT),
    rewards.no_signal: Needs(("groups/no_signal",), RECENT),
    policy.entropy_collapse: Needs(("entropy",), AFTER_START),
    policy.entropy_explosion: Needs(("entropy",), 2 * RECENT),
    rewards.reward_collapse: Needs(("reward/mean",), AFTER_START),
    rewards.held_out_falls: Needs(("eval/accuracy", "eval/problems", "reward/mean", "reward/std"), 3),
    policy.gradient_climb: Needs(("grad_norm", "clip/fraction"), WINDOW),
    policy.gradient_spike: Needs(("grad_norm",), RECENT + 1),
    policy.good_fades: Needs(("reward/mean", "reward/std", "logprobs/good"), AFTER_START),
    texts.repeats: Needs(("completion/repeated",), AFTER_START),
    rewards.kl_alone: Needs(
        ("reward/mean", "reward/std", "loss/kl_alone", "loss/kl", "completion/length"), AFTER_START
    ),
    rewards.kl_pays: Needs(("reward/mean", "reward/std", "reward/kl"), AFTER_START),
    texts.truncated: Needs(("reward/mean", "reward/std", "completion/truncated"), AFTER_START),
    texts.never_stops: Needs(("completion/truncated",), RECENT),
    texts.length_collapse: Needs(("reward/mean", "completion/length"), AFTER_START),
    rewards.channels_diverge: Needs(("reward/std",), AFTER_START, functions=2),
    policy.critic_lags: Needs(("critic/explained_variance",), TREND),
    environment.tools_unused: Needs(("episode/turns",), RECENT),
    environment.tool_down: Needs(("episode/errors", "episode/turns")),
    environment.tool_errors: Needs(("episode/errors", "episode/turns"), RECENT),
}
