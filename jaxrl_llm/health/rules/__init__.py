"""Health rules: pure functions that find a problem in a run's records, with its cause and remedy.

A rule gets the `History` of a run, and returns a `Finding` or None. Its keyword-only arguments are fields of
`config.health`. Each file holds the rules on one subject, and docs/health.md lists all rules. Bounds without a source
there were calibrated on the runs that it names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ..finding import Finding, LogRecord, RuleInputs
from ..history import RECENT_STEPS, START_STEPS, TREND_STEPS, WINDOW, History
from . import engine, environment, policy, rewards, texts


def findings(history: History, bounds: Mapping[str, Any]) -> list[Finding]:
    """Returns the findings of all rules on a history. bounds: fields of the config section `health`."""
    if not history.records:
        return []
    longer_history = history.with_longer_means()

    def apply(rule: Callable[..., Finding | None]) -> Finding | None:
        arguments = {name: bounds[name] for name in _arguments(rule)}
        # Short means come first, so that a finding shows the numbers of the last steps where these are enough.
        finding = rule(history, **arguments) or rule(longer_history, **arguments)
        return finding and replace(finding, id=rule.__name__)

    return [finding for finding in map(apply, RULES) if finding]


@cache
def _arguments(rule: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of a rule's keyword-only arguments."""
    return tuple(p.name for p in inspect.signature(rule).parameters.values() if p.kind is p.KEYWORD_ONLY)


def unjudged_rules(records: Sequence[LogRecord]) -> dict[str, str]:
    """Returns {rule: missing metrics} for the rules that could judge none of the records."""
    missing = {
        rule.__name__: inputs.missing_input(records) or _metric_with_gaps(inputs, records)
        for rule, inputs in RULES.items()
    }
    return {name: input_name for name, input_name in missing.items() if input_name}


def _metric_with_gaps(inputs: RuleInputs, records: Sequence[LogRecord]) -> str:
    """Returns which metric of a rule has too many gaps in all windows of `History`; "" if none has.

    inputs: metrics of the rule; only rules that average several records can fail by gaps.
    """
    if inputs.records < RECENT_STEPS:
        return ""
    for name in inputs.metrics:
        # Step 0 is an evaluation before the first step, whose record has no metrics of a step.
        present_at = [
            number for number, record in enumerate(records) if record.get(name) is not None and record["step"]
        ]
        # Distances between the first and the last of RECENT_STEPS values that follow one another.
        spans = [last - first for first, last in zip(present_at, present_at[RECENT_STEPS - 1 :], strict=False)]
        if all(span >= 2 * RECENT_STEPS for span in spans):
            return f"most records lack {name}"
    return ""


RECORDS_AFTER_START = START_STEPS + RECENT_STEPS + 1  # number of records from which on `History.start_mean` has a value
# {rule: its inputs}. Where the records lack an input, the doctor reports that the rule could not judge the run. Metrics
# that only the evidence of a finding shows are left out.
RULES: dict[Callable[..., Finding | None], RuleInputs] = {
    engine.sampler_mismatch: RuleInputs(("importance/kl",)),
    engine.stale_weights: RuleInputs(("weight_check/gap", "weight_check/gap_before"), 3),
    engine.engine_drift: RuleInputs(("sampler/gap_mean",), RECENT_STEPS),
    engine.stale_samples: RuleInputs(("rollout/lag_p95", "importance/mean")),
    rewards.no_verdict: RuleInputs(("reward/no_verdict",)),
    policy.updates_skipped: RuleInputs(("updates/skipped_in_a_row",)),
    engine.phantom_clipping: RuleInputs(("clip/first",), RECENT_STEPS),
    rewards.no_signal: RuleInputs(("groups/no_signal",), RECENT_STEPS),
    policy.entropy_collapse: RuleInputs(("entropy",), RECORDS_AFTER_START),
    policy.entropy_explosion: RuleInputs(("entropy",), 2 * RECENT_STEPS),
    rewards.reward_collapse: RuleInputs(("reward/mean",), RECORDS_AFTER_START),
    rewards.held_out_falls: RuleInputs(("eval/accuracy", "eval/problems", "reward/mean", "reward/std"), 3),
    policy.gradient_climb: RuleInputs(("grad_norm", "clip/fraction"), WINDOW),
    policy.gradient_spike: RuleInputs(("grad_norm",), RECENT_STEPS + 1),
    policy.good_fades: RuleInputs(("reward/mean", "reward/std", "logprobs/good"), RECORDS_AFTER_START),
    texts.repeats: RuleInputs(("completion/repeated",), RECORDS_AFTER_START),
    rewards.kl_alone: RuleInputs(
        ("reward/mean", "reward/std", "loss/kl_alone", "loss/kl", "completion/length"), RECORDS_AFTER_START
    ),
    rewards.kl_pays: RuleInputs(("reward/mean", "reward/std", "reward/kl"), RECORDS_AFTER_START),
    texts.truncated: RuleInputs(("reward/mean", "reward/std", "completion/truncated"), RECORDS_AFTER_START),
    texts.never_stops: RuleInputs(("completion/truncated",), RECENT_STEPS),
    texts.length_collapse: RuleInputs(("reward/mean", "completion/length"), RECORDS_AFTER_START),
    rewards.channels_diverge: RuleInputs(("reward/std",), RECORDS_AFTER_START, functions=2),
    policy.critic_lags: RuleInputs(("critic/explained_variance",), TREND_STEPS),
    environment.tools_unused: RuleInputs(("episode/turns",), RECENT_STEPS),
    environment.tool_down: RuleInputs(("episode/errors", "episode/turns")),
    environment.tool_errors: RuleInputs(("episode/errors", "episode/turns"), RECENT_STEPS),
}
