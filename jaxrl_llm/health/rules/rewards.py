"""Health rules on the rewards: whether they give a signal, fall, or are hacked."""

from __future__ import annotations

from math import inf, isnan, sqrt

import numpy as np

from .. import noise
from ..finding import Finding, LogRecord, channel_metrics
from ..history import HELD_OUT_FALL, MOST_GROUPS, History
from .bounds import (
    KL_ALONE,
    KL_COSTS,
    KL_PAYS,
    LITTLE_CHANGE,
    NO_SIGNAL,
    ODD_FACTOR,
    POLICY_CHANGES,
    REWARD_FALL,
    SEQUENCES,
    SUDDEN_SHARE,
)


def no_verdict(history: History) -> Finding | None:
    """Rule F35: no completion of the step has a reward, so the step trains nothing."""
    if not history.trains_nothing:
        return None
    evidence = "no completion of the step has a reward, so nothing is trained"
    if (history.last_records[-1].get("episode/errors") or 0.0) >= 1:
        return Finding(
            "error",
            evidence=f"{evidence}; every episode has an error",
            cause="the agent or environment raises an error, or an agent ends without a request to the policy "
            "(episode/without_calls)",
            fix="mend what the warning of the step says about the agent or environment",
            reference="docs/failures.md F35",
        )
    return Finding(
        "error",
        evidence=evidence,
        cause="every reward function with a weight returned None: a judge does not answer, or the rows lack a "
        "column that the function reads",
        fix="restart the judge, or add the column to the data; the metrics of the reward functions tell which one "
        "abstains",
        reference="docs/failures.md F35",
    )


def no_signal(history: History) -> Finding | None:
    """Rule F10: in most groups all completions have the same reward, so their advantages are 0.

    In a healthy run some groups have different rewards until the task is solved. The share of groups without a signal
    has the standard error of a binomial.
    """
    # veRL logs the share only if it is 1, so a step without this metric may have had a signal.
    if history.trains_nothing or history.misses_recent("groups/no_signal"):
        return None
    share = history.recent_mean("groups/no_signal")
    # During the first steps the bound is 0.99, because a task that is solved from the start looks the same.
    bound = 0.99 if isnan(history.start_mean("groups/no_signal")) else NO_SIGNAL
    if not share > bound or history.is_solved:
        return None
    groups = history.recent_mean("groups/count")
    error = sqrt(NO_SIGNAL * (1 - NO_SIGNAL) / groups) if groups > 0 else 0.0
    if history.strength_above("groups/no_signal", NO_SIGNAL, known_error=error) <= 1:
        return None
    kind, cause, fix = _without_signal(history)
    return Finding(
        "error" if share > 0.99 else "warning",
        evidence=f"in {share:.0%} of the groups all completions have the same reward{kind}",
        cause=cause,
        fix=fix,
        reference="arXiv 2503.14476",
    )


def _without_signal(history: History) -> tuple[str, str, str]:
    """Explains groups without a signal. Returns what they have in common (end of the evidence), cause and remedy."""
    solved_share = history.solved_share
    if isnan(solved_share):
        return (
            "",
            "the problems are too hard or too easy, or the reward function gives right and wrong answers the same "
            "reward",
            "set rollout.resample_rounds, raise group_size or rollout.temperature, or read completions.jsonl",
        )
    if solved_share > MOST_GROUPS:
        return (
            f", and in {solved_share:.0%} of these groups all are right",
            "the problems are too easy",
            "use harder problems, or set data.curriculum.skip or rollout.resample_rounds to skip solved problems",
        )
    unsolved_share = 1 - solved_share
    return (
        f", and in {unsolved_share:.0%} of these groups all are wrong",
        "the problems are too hard, or the reward function does not recognize right answers"
        if unsolved_share > MOST_GROUPS
        else "each problem is either too hard or too easy",
        "read completions.jsonl; use easier problems, start from a model that jaxrl sft has trained, or raise "
        "group_size",
    )


def reward_collapse(history: History) -> Finding | None:
    """Rule: the mean reward has fallen by half of its standard deviation at the start, or more.

    In a healthy run the mean reward falls only by the noise of batches, or because problems become harder. Harder
    problems leave the held-out accuracy, or the entropy, the lengths and the gradients, unchanged.
    """
    best_reward, deviation, reward = (
        history.best_mean("reward/mean"),
        _start_deviation(history),
        history.recent_mean("reward/mean"),
    )
    if not (best_reward - reward > REWARD_FALL * deviation > 0 and history.fall_strength("reward/mean") > 1):
        return None
    since = history.last_step_near_best("reward/mean")
    step_before, within_a_step = _steepest_fall(history, since)
    changes = {name: history.factor_since(name, step_before) for name in POLICY_CHANGES}
    changed = [name for name, factor in changes.items() if factor > POLICY_CHANGES[name]]
    compared = sum(not isnan(factor) for factor in changes.values())
    unchanged = not changed and (compared == len(POLICY_CHANGES) or bool(compared and within_a_step))
    if (
        history.keeps_held_out_accuracy(since)
        or unchanged
        or (not changed and _recovered_before(history, since, best_reward - reward))
    ):
        return None
    change_text = f", while {', '.join(changed)} changed" if changed else ""
    return Finding(
        "error" if changed else "warning",
        evidence=f"the mean reward fell from {best_reward:.3g} (mean of {history.recent_steps} steps) to "
        f"{reward:.3g} since step {since:,}, which is more than noise explains{change_text}",
        cause="updates have damaged the policy since then"
        if changed
        else "updates have damaged the policy since then, or the problems have become harder",
        fix="resume from an earlier checkpoint with a lower optim.learning_rate or fewer optimizer steps per rollout",
        reference="Search-R1 #97",
        since=since,
    )


def _start_deviation(history: History) -> float:
    """Returns the standard deviation of the rewards at the start of the run.

    The log may lack the deviation, and a few extreme rewards may inflate it. Then it is estimated from the noise of the
    mean rewards: if a mean is over SEQUENCES rewards, its noise is the deviation divided by the root of SEQUENCES.
    """
    measured = history.start_mean("reward/std")
    deviation_of_means = sqrt(SEQUENCES) * history.step_noise("reward/mean").deviation
    # Logs with `reward/std_bound` hold only the lowest and highest reward, which bound the deviation from above.
    if 0 < measured < ODD_FACTOR * deviation_of_means and isnan(history.start_mean("reward/std_bound")):
        return measured
    # If the mean rewards have no noise either, a fall is measured in units of the best mean reward.
    return min((x for x in (measured, deviation_of_means) if x > 0), default=abs(history.best_mean("reward/mean")))


def _steepest_fall(history: History, since: int) -> tuple[int, bool]:
    """Returns a step before the steepest part of a fall of the reward, and whether this part is most of the fall.

    since: step since which the reward has fallen. The caller needs both to tell new data from a damaged policy: if most
    of the fall is sudden, and entropy, lengths and gradients do not change, the data have changed.
    """
    steps, values = history.column("reward/mean")
    means = _means_of_four(values)
    drops = means[:-4] - means[4:]
    # Only the last steps are searched, because over many steps lengths and entropy also change in a healthy run.
    since = max(since, int(steps[-1]) - 4 * history.recent_steps)
    drops[: np.searchsorted(steps, since - history.recent_steps)] = -inf
    steepest = int(np.argmax(drops))
    fall = values[max(steepest + 4 - history.recent_steps, 0) : steepest + 4].mean() - history.recent_mean(
        "reward/mean"
    )
    return max(since, int(steps[steepest + 3]) - history.recent_steps), bool(drops[steepest] > SUDDEN_SHARE * fall)


def _means_of_four(values: np.ndarray) -> np.ndarray:
    """Returns the moving averages over four steps, of which the first is over the first four steps."""
    return np.lib.stride_tricks.sliding_window_view(values, 4).mean(axis=1)


def _recovered_before(history: History, since: int, fall: float) -> bool:
    """Returns whether the reward has recovered from an equally deep fall before, because hard problems recur.

    since: step of the present fall. fall: depth of the present fall.
    """
    steps, values = history.column("reward/mean")
    means = _means_of_four(values)[: np.searchsorted(steps, since)]
    fell = np.flatnonzero(np.maximum.accumulate(means) - means > SUDDEN_SHARE * fall)
    return len(fell) > 0 and means[fell[0] :].max() - means[fell[0] :].min() > SUDDEN_SHARE * fall


def held_out_falls(history: History) -> Finding | None:
    """Rule F38: since an evaluation, the reward in training has risen and the held-out accuracy has fallen.

    In a healthy run both rise. The variance of an accuracy p on N problems is that of a binomial, p (1 - p) / N.
    """
    evaluations = [r for r in history.records if r.get("eval/accuracy") is not None and r.get("eval/problems")]
    if len(evaluations) < 3:
        return None
    # The last two evaluations cannot be the best one, because they are compared with the best one.
    best_evaluation, last_two = max(evaluations[:-2], key=lambda r: r["eval/accuracy"]), evaluations[-2:]
    best_accuracy, accuracy = best_evaluation["eval/accuracy"], float(np.mean([r["eval/accuracy"] for r in last_two]))
    pooled = min(max((best_accuracy + accuracy) / 2, 0.0), 1.0)
    # The difference of one evaluation and the mean of two has 1 + 1/2 times the variance of one evaluation.
    error = sqrt(pooled * (1 - pooled) / best_evaluation["eval/problems"] * 1.5)
    # The rule tests once per evaluation. The log may lack early evaluations, so their number follows from the step and
    # from the number of steps between the last two.
    evaluation_count = max(last_two[1]["step"] // max(last_two[1]["step"] - last_two[0]["step"], 1), 1)
    # The best of several evaluations is high partly by chance, so the bound grows with the number of evaluations.
    fall = noise.strength(
        best_accuracy - accuracy, error, noise.quantile(evaluation_count, 1e6, choices=evaluation_count)
    )
    if (
        best_accuracy - accuracy <= HELD_OUT_FALL
        or fall <= 1
        or not _reward_rises_since(history, best_evaluation["step"])
    ):
        return None
    return Finding(
        "error",
        evidence=f"the held-out accuracy fell from {best_accuracy:.1%} to {accuracy:.1%} since step "
        f"{best_evaluation['step']:,}, while the reward in training rose",
        cause="the policy exploits the reward function (reward hacking), or memorizes the training problems",
        fix="read completions.jsonl, reward what the evaluation measures, and resume from the best checkpoint",
        reference="docs/failures.md F38",
        since=best_evaluation["step"],
    )


def _reward_rises_since(history: History, step: int) -> bool:
    """Returns whether the reward is higher than around a step, by more than LITTLE_CHANGE and by more than noise."""
    steps, values = history.column("reward/mean")
    # Rewards of 8 steps before and after `step` are averaged, because the reward of a single batch is noisy.
    rewards_then, recent_rewards, deviations = (
        values[np.abs(steps - step) <= 8],
        history.recent_values("reward/mean"),
        history.column("reward/std"),
    )
    if not len(rewards_then) or not len(deviations.values):
        return False
    deviation, freedom = history.step_noise("reward/mean")
    error = deviation * sqrt(noise.SPREAD * (1 / len(recent_rewards) + 1 / len(rewards_then)))
    rise = noise.center(recent_rewards) - noise.center(rewards_then)
    allowed = noise.quantile(history.records[-1]["step"], freedom)
    return rise > LITTLE_CHANGE * deviations.values[0] and noise.strength(rise, error, allowed) > 1


def channels_diverge(history: History) -> Finding | None:
    """Rule F17: one reward function rises while another falls, so the reward may be hacked.

    In a healthy run no reward function falls far while another rises. If it does because problems become harder, the
    held-out accuracy has not fallen.
    """
    halved = set[str]()  # names of reward functions that have fallen to less than half
    start_deviation, changes = history.start_mean("reward/std"), dict[str, float]()
    metrics = channel_metrics(history.last_records[-1])
    for name in metrics:
        start_mean, mean = history.start_mean(name), history.recent_mean(name)
        if not isnan(mean - start_mean):
            changes[name.removeprefix("reward/")] = mean - start_mean
            # A function with small rewards cannot fall by a share of the total deviation, so half of its level counts.
            halved |= {name.removeprefix("reward/")} if 0 <= mean < start_mean / 2 and start_mean > 0.05 else set()
    if not start_deviation > 0 or len(changes) < 2:
        return None
    risen, fallen = max(changes, key=lambda name: changes[name]), min(changes, key=lambda name: changes[name])
    fallen = min(halved, key=lambda name: changes[name]) if halved else fallen
    if changes[risen] < 0.3 * start_deviation or (changes[fallen] > -0.3 * start_deviation and not halved):
        return None
    # The rule picks the largest rise and fall among all reward functions, so the test of each is stricter the more
    # functions the run has.

    def rise_strength(name: str) -> float:
        return history.rise_strength(f"reward/{name}", choices=len(metrics))

    if rise_strength(risen) <= 1 or rise_strength(fallen) >= -1 or history.keeps_held_out_accuracy():
        return None
    return Finding(
        "warning",
        evidence=f"the reward function {risen} rose by {changes[risen]:.2g}, and {fallen} fell by "
        f"{-changes[fallen]:.2g}",
        cause=f"the policy earns more from {risen} at the cost of {fallen}",
        fix=f"let {risen} pay only where {fallen} does, or change reward.weights",
        reference="docs/failures.md F17",
    )


def kl_alone(history: History) -> Finding | None:
    """Rule F11: most of the KL penalty falls on completions without an advantage, and the reward does not rise.

    In a healthy run the reward rises, or at least a fifth of the penalty falls on completions with an advantage, or the
    penalty costs a completion less than KL_COSTS standard deviations of the rewards.
    """
    # `loss/kl` is a mean over tokens, but a reward belongs to a completion. So `costly` multiplies the penalty by the
    # length of completions.
    penalty_alone, penalty, length = (
        history.recent_mean(name) for name in ("loss/kl_alone", "loss/kl", "completion/length")
    )
    reward, start_reward, start_deviation = (
        history.recent_mean("reward/mean"),
        history.start_mean("reward/mean"),
        history.start_mean("reward/std"),
    )
    costly = penalty * length >= KL_COSTS * start_deviation > 0
    if not (costly and penalty_alone > KL_ALONE * penalty and history.recent_median(_share_alone) > KL_ALONE):
        return None
    if (
        history.is_solved
        or not reward <= start_reward + LITTLE_CHANGE * start_deviation
        or history.rise_strength("reward/mean") > 1
    ):
        return None
    return Finding(
        "warning",
        evidence=f"{penalty_alone / penalty:.0%} of the KL penalty falls on completions without an advantage, and "
        "the reward does not rise",
        cause="on these completions the penalty pulls the policy back to the reference, and no reward counteracts it",
        fix="set rollout.resample_rounds, or lower kl.coef",
        reference="docs/failures.md F11",
    )


def _share_alone(record: LogRecord) -> float | None:
    """Returns the share of a step's KL penalty on completions without an advantage; None if the record lacks it."""
    penalty_alone, penalty = record.get("loss/kl_alone"), record.get("loss/kl")
    return None if penalty_alone is None or not penalty else penalty_alone / penalty


def kl_pays(history: History) -> Finding | None:
    """Rule F5: the KL term in the reward rises above its start, while the reward of the task falls.

    In a healthy run the reward of the task rises, and the KL term is a cost.
    """
    start_kl, kl = history.start_mean("reward/kl"), history.recent_mean("reward/kl")
    start_task, task, start_deviation = (
        history.start_mean("reward/mean"),
        history.recent_mean("reward/mean"),
        history.start_mean("reward/std"),
    )
    if not (
        start_deviation > 0
        and kl > max(start_kl, 0.0) + KL_PAYS * start_deviation
        and task < start_task - KL_PAYS * start_deviation
    ):
        return None
    if history.rise_strength("reward/kl") <= 1 or history.rise_strength("reward/mean") >= -1:
        return None
    return Finding(
        "warning",
        evidence=f"the KL term in the reward rose from {start_kl:.2g} to {kl:.2g}, and the reward of the task fell "
        f"from {start_task:.2g} to {task:.2g}",
        cause="the k1 estimate in the reward can be negative, so tokens that the policy finds less likely than the "
        "reference does earn reward",
        fix="set kl.placement = 'loss' and kl.estimator = 'k3', or another kl.estimator than k1",
        reference="docs/failures.md F5",
    )
