"""Rules on the policy and its critic: whether updates move them as they should."""

from __future__ import annotations

from math import isnan

import numpy as np

from .. import noise
from ..finding import Finding
from ..history import RECENT, TINY, WINDOW, History
from .bounds import CLIPPED, ENTROPY, EXPLAINED, GRADIENT, LITTLE, SPIKE


def updates_skipped(history: History, *, max_skipped: int) -> Finding | None:
    """F27: many updates in a row are skipped, and the model does not change.

    In the log of another trainer these are gradients that are not finite: it skips them, or they ruin the weights.
    """
    r = history.latest[-1]
    counts = [int(x) for name, x in r.items() if name.endswith("updates/skipped_in_a_row") and x is not None]
    if not max_skipped or max(counts, default=0) < max_skipped:
        return None
    # The record has None for what is not finite. An extreme of no token is infinite too, and is no fault.
    names = [name for name in sorted(r) if r[name] is None and not name.endswith(("_min", "_max"))]
    refused = [name.removeprefix("skip/") for name in sorted(r) if name.startswith("skip/") and r[name]]
    cause = "no token in them is trained"
    fix = "other limits: config.mask and rollout.max_completion_tokens decide which tokens are trained"
    if history.trains_nothing:
        cause, fix = "no completion has a verdict", "a judge that answers"
    elif names:
        cause = f"their gradients are not finite ({', '.join(names[:5])})"
        fix = "a lower optim.learning_rate or with model.dtype = 'float32'"
    elif refused:
        cause = f"config.health.skip has {refused[0]!r}"
        fix = "a lower optim.learning_rate, or without this in health.skip"
    if "at" in r:  # the log of another trainer
        what, else_do = "had no finite gradient, and the model stands still or is ruined", ""
    else:
        what = "were skipped, and the model stands still"
        else_do = ", or raise config.health.max_skipped (0: never stop)"
    return Finding(
        "error",
        f"{max(counts)} updates in a row {what}",
        cause,
        f"begin a new run with {fix}{else_do}",
        "docs/failures.md F27",
    )


def entropy_collapse(history: History) -> Finding | None:
    """F12: the policy has become nearly certain, and has not solved the task.

    In a healthy run the entropy falls with what is left to learn: a tenth of it is enough only where little is left.
    """
    before, now = history.then("entropy"), history.now("entropy")
    if not now < ENTROPY[0] * before or history.solved:
        return None
    # The logarithm is compared, because entropy falls by factors, and near 0 no difference would be large.
    if history.risen("entropy", log=True) >= -1:
        return None
    distinct = history.now("completion/distinct")
    same = "" if isnan(distinct) else f"; {distinct:.0%} of a group's completions differ"
    return Finding(
        "warning",
        f"entropy {now:.2g}, {before:.2g} at the start{same}",
        "the policy has settled on one answer, and tries no other",
        "raise loss.clip_high or rollout.temperature, lower optim.learning_rate, or set entropy.adaptive",
        "arXiv 2505.22617",
    )


def entropy_explosion(history: History) -> Finding | None:
    """F13: the policy becomes random.

    In a healthy run the entropy may rise at first, but not to a multiple of its start.
    """
    before, now, earlier = history.then("entropy"), history.now("entropy"), history.earlier("entropy")
    if not (now > ENTROPY[1] * before > 0 and now > earlier and history.risen("entropy", log=True) > 1):
        return None
    size, size_before = history.now("completion/compressed"), history.then("completion/compressed")
    # Noise does not compress: so a reader sees whether the text or only the choice among good ones has become random.
    text = f"; the text compresses to {size:.0%}, {size_before:.0%} at the start" if size * size_before > 0 else ""
    return Finding(
        "error",
        f"entropy {now:.2g}, {before:.2g} at the start, and it rises{text}",
        "the policy turns to noise",
        "lower entropy.coef, loss.clip_high or optim.learning_rate, and go on from an earlier checkpoint",
        "Search-R1 #162",
    )


def gradient_climb(history: History) -> Finding | None:
    """F6: the norm of the gradient climbs, far or together with the share of clipped tokens.

    In a healthy run it falls with what is left to learn. Its noise is that of a factor, so its logarithm is judged.
    """
    before, now = history.then("grad_norm"), history.now("grad_norm")
    clipped, clips = history.then("clip/fraction"), history.now("clip/fraction")
    together = clips > max(CLIPPED[0] * clipped, CLIPPED[1]) and history.risen("clip/fraction") > 1
    if not now > GRADIENT[0 if together else 1] * before or not history.risen("grad_norm", log=True) > 1:
        return None
    if len(history.latest) < WINDOW or isnan(clipped) or isnan(clips):
        return None
    return Finding(
        "warning",
        f"gradient norm {before:.2g} to {now:.2g}, clipped tokens {clipped:.1%} to {clips:.1%}",
        "the policy leaves what was sampled faster and faster",
        "in this order: set importance.action, epochs = 1, a small kl.coef; go on from an earlier checkpoint",
        "TRL #2980",
    )


def gradient_spike(history: History) -> Finding | None:
    """F6: the gradient of a step is far larger than those before it.

    In a healthy run the norms of batches differ by a factor, whose logarithm is about normal above its mean. Below it
    is not: where a task is nearly solved, most batches teach nothing and their norm is near 0. So the mean of all
    norms counts, if it is larger than that of the last ones, and the deviation is that of norms above it.
    """
    last = np.array([r["grad_norm"] for r in history.latest[:-1] if r.get("grad_norm")])
    now, every = history.latest[-1].get("grad_norm"), history.column("grad_norm").values[:-1]
    if not now or len(last) < RECENT or now <= SPIKE * max(last.mean(), every.mean()) or now <= 3 * last.max():
        return None
    usual = max(last.mean(), every.mean())
    excess = np.maximum(np.log(np.maximum(every, TINY) / usual), 0.0)
    # A normal logarithm has as many excesses of 0 as above 0, so their mean square is half of the variance.
    allowed = noise.quantile(history.records[-1]["step"] - RECENT, len(every) - 1)
    if noise.strength(float(np.log(now / usual)), float(np.sqrt(2 * np.mean(excess**2))), allowed) <= 1:
        return None
    return Finding(
        "warning",
        f"gradient norm {now:.2g}, {last.max():.2g} at most in the {len(last)} steps before",
        "this batch differs from all others, or the policy has just been damaged",
        "look at its completions and rewards; optim.clip_norm limits it, health.skip = ('gradient_spike',) skips it",
        "TRL #2980",
    )


def good_fades(history: History) -> Finding | None:
    """F19: completions with a positive advantage become less likely, and the reward is past its best.

    In a healthy run they become likelier, but for those of the hard problems that are left.
    """
    # The median: in a healthy run, the good completions of a batch may be a new kind that is still unlikely.
    best, now = history.best("logprobs/good"), history.typical("logprobs/good")
    if not now < min(2 * best, best - 0.05) or history.fallen("logprobs/good") <= 1:
        return None
    # While the reward rises, it may be only the hard problems that are left: with remax they alone have an advantage.
    earned, earns, spread = history.best("reward/mean"), history.now("reward/mean"), history.then("reward/std")
    if not (earned - earns > LITTLE * spread and history.fallen("reward/mean") > 1):
        return None
    return Finding(
        "warning",
        f"log-probability of a token in good completions {now:.2g}, {best:.2g} at best",
        "negative gradients of bad completions act on the tokens that they share with good ones",
        "lower optim.learning_rate, or have fewer optimizer steps on a rollout",
        "arXiv 2512.04220",
    )


def critic_lags(history: History) -> Finding | None:
    """F32: the critic predicts worse than a constant would.

    A healthy critic is better than that after TREND steps, or still gets better, as one that needs 100 steps does. Its
    loss is no sign, because the loss of a useless critic falls with the variance of the rewards. Where a task is
    solved, there is nothing to predict: a batch in which nearly all earn the same may have the value -1,000.
    """
    explained, name = history.typical("critic/explained_variance"), "critic/explained_variance"
    # A trend of more than one standard error: chance delays the finding about a useless critic in one step of six.
    if not explained < EXPLAINED or not history.trend(name) <= 1 or history.solved:
        return None
    spread, spreads = history.then("reward/std"), history.now("reward/std")
    # The explained variance is 1 - error / variance of the returns: it means nothing where these hardly vary.
    if spreads < 0.3 * spread:
        return None
    if history.above(name, EXPLAINED) >= -1:
        return None
    return Finding(
        "warning",
        f"explained variance {explained:.2f} over {history.recent} steps",
        "the critic does not follow the policy, so the advantages are noise",
        "raise critic.warmup_steps or critic.optim.learning_rate",
        "docs/failures.md F32",
    )
