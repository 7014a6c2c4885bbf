"""Rules on the rewards: whether they teach, and whether what earns them is what they mean."""

from __future__ import annotations

from math import inf, isnan, sqrt

import numpy as np

from .. import noise
from ..finding import Finding, LogRecord, channels
from ..history import HELD_OUT_FALL, MOSTLY, History
from .bounds import (
    KL_ALONE,
    KL_COSTS,
    KL_PAYS,
    LITTLE,
    NO_SIGNAL,
    ODD,
    OF_THE_POLICY,
    REWARD_FALL,
    SEQUENCES,
    WITHIN_A_STEP,
)


def no_verdict(history: History) -> Finding | None:
    """F35: no completion of the step has a verdict, so that nothing is trained."""
    if not history.trains_nothing:
        return None
    return Finding(
        "error",
        "no completion of the step has a verdict, and nothing is trained",
        "every reward function with a weight abstains: a judge does not answer, or the rows lack what it reads",
        "start the judge again, look at the metrics of the reward functions, or mend the data",
        "docs/failures.md F35",
    )


def no_signal(history: History) -> Finding | None:
    """F10: in most groups all completions earn the same, so their advantages are 0.

    In a healthy run a part of the groups teaches, until the task is solved. How many is a share of a few groups, so its
    error is that of a binomial.
    """
    # A log of veRL has the share only where all rewards are equal, so a step without it is no missing value.
    if history.trains_nothing or history.lacks("groups/no_signal"):
        return None
    share = history.now("groups/no_signal")
    # The bound is 0.99 until the start is over, because a task that is solved at once looks like one without a signal.
    least = 0.99 if isnan(history.then("groups/no_signal")) else NO_SIGNAL
    if not share > least or history.solved:
        return None
    groups = history.now("groups/count")
    error = sqrt(NO_SIGNAL * (1 - NO_SIGNAL) / groups) if groups > 0 else 0.0
    if history.above("groups/no_signal", NO_SIGNAL, error=error) <= 1:
        return None
    kind, cause, fix = _without_signal(history)
    return Finding(
        "error" if share > 0.99 else "warning",
        f"in {share:.0%} of the groups all completions have the same reward{kind}",
        cause,
        fix,
        "arXiv 2503.14476",
    )


def _without_signal(history: History) -> tuple[str, str, str]:
    """Returns what groups without a signal have in common, its cause and its remedy."""
    easy = history.easy
    if isnan(easy):
        return (
            "",
            "the problems are too hard or too easy, or the reward cannot tell answers apart",
            "set rollout.resample_rounds, raise group_size or rollout.temperature, or look at completions.jsonl",
        )
    if easy > MOSTLY:
        return (
            f", and {easy:.0%} of these are all right",
            "the problems are too easy",
            "give harder problems, or set data.curriculum.skip or rollout.resample_rounds to pass over solved ones",
        )
    hard = 1 - easy
    return (
        f", and {hard:.0%} of these are all wrong",
        "the problems are too hard, or the reward does not see right answers"
        if hard > MOSTLY
        else "each problem is too hard or too easy",
        "look at completions.jsonl; give easier problems, begin with jaxrl sft, or raise group_size",
    )


def reward_collapse(history: History) -> Finding | None:
    """The reward has fallen far below what it was for a while: by half of its deviation at the start.

    In a healthy run it rises or stays, and what moves it back is the noise of its batches, or harder problems. These
    leave its held-out accuracy, or its entropy, lengths and gradients, as they were.
    """
    best, spread, now = history.best("reward/mean"), _spread(history), history.now("reward/mean")
    if not (best - now > REWARD_FALL * spread > 0 and history.fallen("reward/mean") > 1):
        return None
    since = history.near_best_until("reward/mean")
    before, within_a_step = _steepest(history, since)
    changes = {name: history.changed_since(name, before) for name in OF_THE_POLICY}
    signs = [name for name, factor in changes.items() if factor > OF_THE_POLICY[name]]
    looked = sum(not isnan(factor) for factor in changes.values())
    unchanged = not signs and (looked == len(OF_THE_POLICY) or bool(looked and within_a_step))
    if history.is_well_held_out(since) or unchanged or (not signs and _came_back(history, since, best - now)):
        return None
    told = f", while {', '.join(signs)} changed" if signs else ""
    return Finding(
        "error" if signs else "warning",
        f"the mean reward was {best:.3g} for {history.recent} steps, has fallen since step {since:,}, and is "
        f"{now:.3g}, which noise does not explain{told}",
        "the policy has been ruined since" if signs else "the policy has been ruined since, or the problems are harder",
        "go on from an earlier checkpoint with a lower optim.learning_rate or fewer optimizer steps on a rollout",
        "Search-R1 #97",
        since=since,
    )


def _spread(history: History) -> float:
    """Returns the deviation of the rewards at the start.

    Where a log has none, or one that a few odd rewards make, it is at most that of SEQUENCES rewards with the noise of
    the means. Other trainers log the lowest and the highest reward, which may be odd.
    """
    measured = history.then("reward/std")
    of_means = sqrt(SEQUENCES) * history.noise_of("reward/mean").deviation
    if 0 < measured < ODD * of_means and isnan(history.then("reward/std_bound")):
        return measured
    # Means that never differed have no noise: then half of their level is a fall.
    return min((x for x in (measured, of_means) if x > 0), default=abs(history.best("reward/mean")))


def _steepest(history: History, since: int) -> tuple[int, bool]:
    """Returns a step before the steepest part of a fall since a step, and whether this part is most of the fall.

    A policy does not fall within a step and go on with its entropy, its lengths and its gradients: the data may.
    """
    steps, values = history.column("reward/mean")
    means = _means_of_four(values)
    drops = means[:-4] - means[4:]
    # Only the last steps are searched, because over many steps lengths and entropy change in a healthy run too.
    since = max(since, int(steps[-1]) - 4 * history.recent)
    drops[: np.searchsorted(steps, since - history.recent)] = -inf
    steepest = int(np.argmax(drops))
    fall = values[max(steepest + 4 - history.recent, 0) : steepest + 4].mean() - history.now("reward/mean")
    return max(since, int(steps[steepest + 3]) - history.recent), bool(drops[steepest] > WITHIN_A_STEP * fall)


def _means_of_four(values: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(values, 4).mean(axis=1)


def _came_back(history: History, since: int, fall: float) -> bool:
    """Returns whether the reward has come back from as deep a fall before a step, as it does where problems recur."""
    steps, values = history.column("reward/mean")
    means = _means_of_four(values)[: np.searchsorted(steps, since)]
    fell = np.flatnonzero(np.maximum.accumulate(means) - means > WITHIN_A_STEP * fall)
    return len(fell) > 0 and means[fell[0] :].max() - means[fell[0] :].min() > WITHIN_A_STEP * fall


def held_out_falls(history: History) -> Finding | None:
    """F38: the reward in training has risen since an evaluation, and the accuracy on held-out problems has fallen.

    In a healthy run they rise together. The error of an accuracy p on N problems is that of a binomial, p (1 - p) / N.
    """
    judged = [r for r in history.records if r.get("eval/accuracy") is not None and r.get("eval/problems")]
    if len(judged) < 3:
        return None
    # The best is none of the last two evaluations, because an evaluation is not compared with itself.
    best, last = max(judged[:-2], key=lambda r: r["eval/accuracy"]), judged[-2:]
    accuracy, now = best["eval/accuracy"], float(np.mean([r["eval/accuracy"] for r in last]))
    middle = min(max((accuracy + now) / 2, 0.0), 1.0)
    # The variance of one evaluation and of the mean of two: 1 + 1/2 times that of one.
    error = sqrt(middle * (1 - middle) / best["eval/problems"] * 1.5)
    # The rule looks once per evaluation. The interval of the last two evaluations tells their number.
    looks = max(last[1]["step"] // max(last[1]["step"] - last[0]["step"], 1), 1)
    # The best of `looks` evaluations is the most extreme one by choice.
    fall = noise.strength(accuracy - now, error, noise.quantile(looks, 1e6, choices=looks))
    if accuracy - now <= HELD_OUT_FALL or fall <= 1 or not _rises_since(history, best["step"]):
        return None
    return Finding(
        "error",
        f"held-out accuracy {accuracy:.1%} to {now:.1%} since step {best['step']:,}, while the reward rises",
        "the policy earns by what the evaluation does not count: a hacked reward, or problems learned by heart",
        "look at completions.jsonl, and reward what the evaluation judges; go on from the best checkpoint",
        "docs/failures.md F38",
        since=best["step"],
    )


def _rises_since(history: History, step: int) -> bool:
    """Returns whether the reward is higher than around a step, by more than LITTLE and more than noise."""
    steps, values = history.column("reward/mean")
    # The steps around the evaluation: its own batch alone would be one draw.
    then, now, spread = values[np.abs(steps - step) <= 8], history.window("reward/mean"), history.column("reward/std")
    if not len(then) or not len(spread.values):
        return False
    deviation, freedom = history.noise_of("reward/mean")
    error = deviation * sqrt(noise.SPREAD * (1 / len(now) + 1 / len(then)))
    rise = noise.center(now) - noise.center(then)
    allowed = noise.quantile(history.records[-1]["step"], freedom)
    return rise > LITTLE * spread.values[0] and noise.strength(rise, error, allowed) > 1


def channels_diverge(history: History) -> Finding | None:
    """F17: one reward function earns more and another one less: the reward may be hacked.

    In a healthy run no function falls far while another rises, or the problems are harder: then the held-out accuracy
    has not fallen.
    """
    lost = set[str]()  # which have fallen to less than half
    spread, slopes = history.then("reward/std"), dict[str, float]()
    names = channels(history.latest[-1])
    for name in names:
        before, now = history.then(name), history.now(name)
        if not isnan(now - before):
            slopes[name.removeprefix("reward/")] = now - before
            # A function that pays little cannot fall by a part of the whole spread: for it, half of its own level
            # counts.
            lost |= {name.removeprefix("reward/")} if 0 <= now < before / 2 and before > 0.05 else set()
    if not spread > 0 or len(slopes) < 2:
        return None
    up, down = max(slopes, key=lambda name: slopes[name]), min(slopes, key=lambda name: slopes[name])
    down = min(lost, key=lambda name: slopes[name]) if lost else down
    if slopes[up] < 0.3 * spread or (slopes[down] > -0.3 * spread and not lost):
        return None
    # The largest rise and fall of all functions are looked at: each has its part of the level.

    def moved(name: str) -> float:
        return history.risen(f"reward/{name}", choices=len(names))

    if moved(up) <= 1 or moved(down) >= -1 or history.is_well_held_out():
        return None
    return Finding(
        "warning",
        f"reward {up} rose by {slopes[up]:.2g}, {down} fell by {-slopes[down]:.2g}",
        "the policy earns by one part of the reward at the cost of another",
        "give the first only where the second is earned, or change reward.weights",
        "docs/failures.md F17",
    )


def kl_alone(history: History) -> Finding | None:
    """F11: most of the KL penalty is on completions without an advantage.

    In a healthy run the reward rises meanwhile, or a fifth of the penalty is where the reward draws on, or the penalty
    is small, so that a completion loses less than KL_COSTS spreads of the rewards.
    """
    # loss/kl is a mean over tokens, and a reward belongs to a completion. The length converts between their units.
    alone, whole, length = (history.now(name) for name in ("loss/kl_alone", "loss/kl", "completion/length"))
    reward, before, spread = history.now("reward/mean"), history.then("reward/mean"), history.then("reward/std")
    costly = whole * length >= KL_COSTS * spread > 0
    if not (costly and alone > KL_ALONE * whole and history.typical(_alone) > KL_ALONE):
        return None
    if history.solved or not reward <= before + LITTLE * spread or history.risen("reward/mean") > 1:
        return None
    return Finding(
        "warning",
        f"{alone / whole:.0%} of the KL penalty is on completions without an advantage, and the reward does not rise",
        "the penalty draws the policy back where no reward draws it on",
        "set rollout.resample_rounds, or lower kl.coef",
        "docs/failures.md F11",
    )


def _alone(record: LogRecord) -> float | None:
    """Returns the share of the KL penalty that is on completions without an advantage."""
    alone, whole = record.get("loss/kl_alone"), record.get("loss/kl")
    return None if alone is None or not whole else alone / whole


def kl_pays(history: History) -> Finding | None:
    """F5: the KL term in the reward earns more, while the task earns less.

    In a healthy run the task earns more, and the term is a cost.
    """
    kl, kl_now = history.then("reward/kl"), history.now("reward/kl")
    task, task_now, spread = history.then("reward/mean"), history.now("reward/mean"), history.then("reward/std")
    if not (spread > 0 and kl_now > max(kl, 0.0) + KL_PAYS * spread and task_now < task - KL_PAYS * spread):
        return None
    if history.risen("reward/kl") <= 1 or history.risen("reward/mean") >= -1:
        return None
    return Finding(
        "warning",
        f"the KL term {kl:.2g} to {kl_now:.2g}, the task {task:.2g} to {task_now:.2g}",
        "k1 in the reward is signed: unlikely tokens earn",
        "set kl.placement = 'loss' with k3, or another kl.estimator",
        "docs/failures.md F5",
    )
