"""Health rules on the policy and the critic: entropy, gradients, skipped updates, explained variance."""

from __future__ import annotations

from math import isnan

import numpy as np

from .. import noise
from ..finding import Finding
from ..history import RECENT_STEPS, TINY, WINDOW, History
from .bounds import CLIPPED, ENTROPY, EXPLAINED, GRADIENT, LITTLE_CHANGE, SPIKE_FACTOR


def updates_skipped(history: History, *, max_skipped: int) -> Finding | None:
    """Rule F27: so many updates in a row are skipped that the model no longer changes.

    max_skipped: number of skipped updates that fires the rule, 0 = never. In the log of another trainer, updates
    without a finite gradient count: such a trainer skips them, or they destroy its weights.
    """
    record = history.last_records[-1]
    skipped_counts = [
        int(x) for name, x in record.items() if name.endswith("updates/skipped_in_a_row") and x is not None
    ]
    if not max_skipped or max(skipped_counts, default=0) < max_skipped:
        return None
    # A record has None for values that are not finite. Minima and maxima over no token are infinite without a fault.
    not_finite = [name for name in sorted(record) if record[name] is None and not name.endswith(("_min", "_max"))]
    skipping_rules = [
        name.removeprefix("skip/") for name in sorted(record) if name.startswith("skip/") and record[name]
    ]
    cause = "these updates have no trained token"
    fix = "start a new run in which some tokens are trained (see config.mask and rollout.max_completion_tokens)"
    if history.trains_nothing:
        cause, fix = "no completion has a verdict", "start a new run with a judge that answers"
    elif not_finite:
        cause = f"the gradients have infinite or NaN values (not finite: {', '.join(not_finite[:5])})"
        fix = "start a new run with a lower optim.learning_rate, or with model.dtype = 'float32'"
    elif skipping_rules:
        cause = f"the rule {skipping_rules[0]!r} in config.health.skip skips them"
        fix = "start a new run with a lower optim.learning_rate, or remove the rule from health.skip"
    if "at" in record:  # Only records of other trainers have this key.
        event, alternative = "had no finite gradient, so the model does not change or is destroyed", ""
    else:
        event = "were skipped, so the model does not change"
        alternative = "; to continue anyway, raise config.health.max_skipped (0 = unlimited)"
    return Finding(
        "error",
        evidence=f"{max(skipped_counts)} updates in a row {event}",
        cause=cause,
        fix=f"{fix}{alternative}",
        reference="docs/failures.md F27",
    )


def entropy_collapse(history: History) -> Finding | None:
    """Rule F12: the entropy has fallen to a tenth of its start although the task is not solved.

    In a healthy run the entropy falls as the task is learned, and so far only when the task is nearly solved.
    """
    start_entropy, entropy = history.start_mean("entropy"), history.recent_mean("entropy")
    if not entropy < ENTROPY[0] * start_entropy or history.is_solved:
        return None
    # Logarithms are compared, because entropy falls by factors, and near 0 all differences are small.
    if history.rise_strength("entropy", logarithmic=True) >= -1:
        return None
    distinct = history.recent_mean("completion/distinct")
    variety = "" if isnan(distinct) else f"; {distinct:.0%} of the completions of a group are distinct"
    return Finding(
        "warning",
        evidence=f"the entropy fell from {start_entropy:.2g} at the start to {entropy:.2g}{variety}",
        cause="the policy nearly always gives the same answer, so it explores no other",
        fix="raise loss.clip_high or rollout.temperature, lower optim.learning_rate, or set entropy.adaptive",
        reference="arXiv 2505.22617",
    )


def entropy_explosion(history: History) -> Finding | None:
    """Rule F13: the entropy has risen to a multiple of its start and still rises.

    In a healthy run the entropy may rise at first, but not so far.
    """
    start_entropy, entropy, previous_entropy = (
        history.start_mean("entropy"),
        history.recent_mean("entropy"),
        history.previous_mean("entropy"),
    )
    if not (
        entropy > ENTROPY[1] * start_entropy > 0
        and entropy > previous_entropy
        and history.rise_strength("entropy", logarithmic=True) > 1
    ):
        return None
    compressed, start_compressed = (
        history.recent_mean("completion/compressed"),
        history.start_mean("completion/compressed"),
    )
    # Random text does not compress. This tells random text from a choice among many good texts.
    compression = (
        f"; compression reduces the text to {compressed:.0%} ({start_compressed:.0%} at the start)"
        if compressed * start_compressed > 0
        else ""
    )
    return Finding(
        "error",
        evidence=f"the entropy rose from {start_entropy:.2g} at the start to {entropy:.2g}, and still "
        f"rises{compression}",
        cause="the policy becomes random",
        fix="lower entropy.coef, loss.clip_high or optim.learning_rate, and resume from an earlier checkpoint",
        reference="Search-R1 #162",
    )


def gradient_climb(history: History) -> Finding | None:
    """Rule F6: the gradient norm climbs, either very far or together with the share of clipped tokens.

    In a healthy run the norm falls as the task is learned. Logarithms are compared, because norms vary by factors.
    """
    start_norm, norm = history.start_mean("grad_norm"), history.recent_mean("grad_norm")
    start_clipped, clipped = history.start_mean("clip/fraction"), history.recent_mean("clip/fraction")
    both_climb = clipped > max(CLIPPED[0] * start_clipped, CLIPPED[1]) and history.rise_strength("clip/fraction") > 1
    if (
        not norm > GRADIENT[0 if both_climb else 1] * start_norm
        or not history.rise_strength("grad_norm", logarithmic=True) > 1
    ):
        return None
    if len(history.last_records) < WINDOW or isnan(start_clipped) or isnan(clipped):
        return None
    return Finding(
        "warning",
        evidence=f"the gradient norm rose from {start_norm:.2g} to {norm:.2g}, and the share of clipped tokens went "
        f"from {start_clipped:.1%} to {clipped:.1%}",
        cause="each update moves the policy further away from the one that sampled",
        fix="set importance.action; if this does not help, epochs = 1, then a small kl.coef; resume from an earlier "
        "checkpoint",
        reference="TRL #2980",
    )


def gradient_spike(history: History) -> Finding | None:
    """Rule F6: the gradient norm of a step is far larger than the norms of the steps before.

    In a healthy run the logarithms of norms above the mean are about normal. Those below the mean are not, because on a
    nearly solved task most batches have a norm near 0. So the norm is compared with the larger of two means, of all
    norms and of the last ones, and the standard deviation is that of the norms above it.
    """
    last_norms = np.array([r["grad_norm"] for r in history.last_records[:-1] if r.get("grad_norm")])
    norm, all_norms = history.last_records[-1].get("grad_norm"), history.column("grad_norm").values[:-1]
    if (
        not norm
        or len(last_norms) < RECENT_STEPS
        or norm <= SPIKE_FACTOR * max(last_norms.mean(), all_norms.mean())
        or norm <= 3 * last_norms.max()
    ):
        return None
    usual_norm = max(last_norms.mean(), all_norms.mean())
    log_excess = np.maximum(np.log(np.maximum(all_norms, TINY) / usual_norm), 0.0)
    # Half of the excesses of a normal logarithm are 0, so their mean square is half of the variance.
    allowed = noise.quantile(history.records[-1]["step"] - RECENT_STEPS, len(all_norms) - 1)
    if noise.strength(float(np.log(norm / usual_norm)), float(np.sqrt(2 * np.mean(log_excess**2))), allowed) <= 1:
        return None
    return Finding(
        "warning",
        evidence=f"the gradient norm is {norm:.2g}, but was at most {last_norms.max():.2g} in the {len(last_norms)} "
        "steps before",
        cause="this batch differs from all others, or the last update damaged the policy",
        fix="read the completions and rewards of this step; optim.clip_norm limits such gradients, and health.skip "
        "= ('gradient_spike',) skips such updates",
        reference="TRL #2980",
    )


def good_fades(history: History) -> Finding | None:
    """Rule F19: completions with a positive advantage become less likely, and the reward falls.

    In a healthy run such completions become more likely, except where only hard problems are left.
    """
    # The median is used, because even in a healthy run one batch may have good completions of a new, unlikely kind.
    best_logprob, logprob = history.best_mean("logprobs/good"), history.recent_median("logprobs/good")
    if not logprob < min(2 * best_logprob, best_logprob - 0.05) or history.fall_strength("logprobs/good") <= 1:
        return None
    # The reward must fall too: while it rises, perhaps only the completions of hard problems have an advantage.
    best_reward, reward, deviation = (
        history.best_mean("reward/mean"),
        history.recent_mean("reward/mean"),
        history.start_mean("reward/std"),
    )
    if not (best_reward - reward > LITTLE_CHANGE * deviation and history.fall_strength("reward/mean") > 1):
        return None
    return Finding(
        "warning",
        evidence=f"the mean log-probability of tokens in completions with a positive advantage fell to {logprob:.2g} "
        f"(best: {best_logprob:.2g})",
        cause="the updates against bad completions also lower the probability of tokens that good completions share",
        fix="lower optim.learning_rate, or use fewer optimizer steps per rollout",
        reference="arXiv 2512.04220",
    )


def critic_lags(history: History) -> Finding | None:
    """Rule F32: the critic predicts the returns worse than a constant would (negative explained variance).

    A healthy critic is better than a constant after TREND_STEPS steps, or still improves. The critic's loss is no sign,
    because it falls with the variance of the rewards. Once a task is solved, the rule is silent: where nearly all
    completions earn the same, a batch may have an explained variance of -1,000.
    """
    explained_variance, metric = history.recent_median("critic/explained_variance"), "critic/explained_variance"
    # A rising trend of more than one standard error silences the rule; for a useless critic, one step in six has one.
    if not explained_variance < EXPLAINED or not history.trend_strength(metric) <= 1 or history.is_solved:
        return None
    start_deviation, deviation = history.start_mean("reward/std"), history.recent_mean("reward/std")
    # The explained variance is 1 - error / variance of the returns, which means nothing where the returns hardly vary.
    if deviation < 0.3 * start_deviation:
        return None
    if history.strength_above(metric, EXPLAINED) >= -1:
        return None
    return Finding(
        "warning",
        evidence=f"the critic's explained variance was {explained_variance:.2f} in the last {history.recent_steps} "
        "steps, which is worse than predicting a constant",
        cause="the critic does not keep up with the policy, so the advantages are mostly noise",
        fix="raise critic.warmup_steps or critic.optim.learning_rate",
        reference="docs/failures.md F32",
    )
