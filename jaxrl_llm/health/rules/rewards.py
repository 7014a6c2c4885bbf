"""Rules on the rewards: whether they teach, and whether what earns them is what they mean."""

from __future__ import annotations

from jaxrl_llm.health.finding import RECENT, Finding, History, channels
from jaxrl_llm.health.rules.bounds import KL_PAYS, NO_SIGNAL, REWARD_FALL


def no_verdict(history: History) -> Finding | None:
    """F35: no completion of the step has a verdict, so that nothing is trained."""
    if not history.trains_nothing:
        return None
    return Finding(
        "no_verdict",
        "error",
        "no completion of the step has a verdict, and nothing is trained",
        "every reward function with a weight abstains: a judge does not answer, or the rows lack what it reads",
        "start the judge again, look at the metrics of the reward functions, or mend the data",
        "docs/failures.md F35",
    )


def no_signal(history: History) -> Finding | None:
    """F10: in most groups all completions earn the same, so their advantages are 0."""
    if history.trains_nothing:
        return None
    share = history.now("groups/no_signal")
    # Before the start is over, a task that is solved at once looks like one without a signal.
    least = NO_SIGNAL if history.then("groups/no_signal") is not None else 0.99
    if share is None or share <= least or history.solved:
        return None
    return Finding(
        "no_signal",
        "error" if share > 0.99 else "warning",
        f"in {share:.0%} of the groups all completions have the same reward",
        "the problems are too hard or too easy, or the reward cannot tell answers apart",
        "set rollout.resample_rounds, raise group_size or rollout.temperature, or look at completions.jsonl",
        "arXiv 2503.14476",
    )


def reward_collapse(history: History) -> Finding | None:
    """The reward has fallen far below what it was for a while: by half of its deviation at the start."""
    best, spread, now = history.best("reward/mean"), history.then("reward/std"), history.now("reward/mean")
    if now is None or best is None or not spread or best - now <= REWARD_FALL * spread:
        return None
    return Finding(
        "reward_collapse",
        "error",
        f"the mean reward was {best:.3g} for {RECENT} steps, and is {now:.3g}",
        "the policy has been ruined since",
        "go on from an earlier checkpoint with a lower optim.learning_rate or fewer optimizer steps on a rollout",
        "Search-R1 #97",
    )


def channels_diverge(history: History) -> Finding | None:
    """F17: one reward function earns more and another one less: the reward may be hacked."""
    lost = set[str]()  # which have fallen to less than half
    spread, slopes = history.then("reward/std"), dict[str, float]()
    for name in channels(history.latest[-1]):
        before, now = history.then(name), history.now(name)
        if before is not None and now is not None:
            slopes[name.removeprefix("reward/")] = now - before
            lost |= {name.removeprefix("reward/")} if 0 <= now < before / 2 and before > 0.05 else set()
    if not spread or len(slopes) < 2:
        return None
    up, down = max(slopes, key=lambda name: slopes[name]), min(slopes, key=lambda name: slopes[name])
    down = min(lost, key=lambda name: slopes[name]) if lost else down
    if slopes[up] < 0.3 * spread or (slopes[down] > -0.3 * spread and not lost):
        return None
    return Finding(
        "channels_diverge",
        "warning",
        f"reward {up} rose by {slopes[up]:.2g}, {down} fell by {-slopes[down]:.2g}",
        "the policy earns by one part of the reward at the cost of another",
        "give the first only where the second is earned, or change reward.weights",
        "docs/failures.md F17",
    )


def kl_alone(history: History) -> Finding | None:
    """F11: most of the KL penalty is on completions without an advantage."""
    alone, whole, coef = history.now("loss/kl_alone"), history.now("loss/kl"), history.now("kl/coef")
    reward, before, spread = history.now("reward/mean"), history.then("reward/mean"), history.then("reward/std")
    if alone is None or not whole or not coef or reward is None or before is None or spread is None:
        return None
    if alone <= 0.8 * whole or history.solved or reward > before + 0.1 * spread:
        return None
    return Finding(
        "kl_alone",
        "warning",
        f"{alone / whole:.0%} of the KL penalty is on completions without an advantage, and the reward does not rise",
        "the penalty draws the policy back where no reward draws it on",
        "set rollout.resample_rounds, or lower kl.coef",
        "docs/failures.md F11",
    )


def kl_pays(history: History) -> Finding | None:
    """F5: the KL term in the reward earns more, while the task earns less."""
    kl, kl_now = history.then("reward/kl"), history.now("reward/kl")
    task, task_now, spread = history.then("reward/mean"), history.now("reward/mean"), history.then("reward/std")
    if kl is None or kl_now is None or task is None or task_now is None or not spread:
        return None
    if kl_now <= max(kl, 0.0) + KL_PAYS * spread or task_now >= task - KL_PAYS * spread:
        return None
    return Finding(
        "kl_pays",
        "warning",
        f"the KL term {kl:.2g} to {kl_now:.2g}, the task {task:.2g} to {task_now:.2g}",
        "k1 in the reward is signed: unlikely tokens earn",
        "set kl.placement = 'loss' with k3, or another kl.estimator",
        "docs/failures.md F5",
    )
