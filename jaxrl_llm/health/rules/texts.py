"""Rules on what the policy writes: its length, its end and its repetitions."""

from __future__ import annotations

from math import isnan, sqrt

from ..finding import Finding, channels
from ..history import HELD_OUT_FALL, History
from .bounds import ANSWER, LENGTH, LITTLE, NEVER_STOPS, REPEATED, TRUNCATED


def repeats(history: History) -> Finding | None:
    """F18: completions repeat themselves.

    In a healthy run they do so as much as at the start.
    """
    before, now = history.then("completion/repeated"), history.now("completion/repeated")
    if not (now > max(REPEATED[0] * before, REPEATED[1]) and history.risen("completion/repeated") > 1):
        return None
    return Finding(
        "warning",
        f"{now:.0%} of the tokens of a completion continue what it has said before, {before:.0%} at the start",
        "the text degenerates, and the reward does not see it",
        "look at completions.jsonl, and let the reward see the text: a penalty for repetition",
        "docs/failures.md F18",
    )


def truncated(history: History) -> Finding | None:
    """F15: completions reach the limit and the reward falls.

    In a healthy run more may reach it, while the reward rises, or the held-out accuracy has not fallen.
    """
    cut, at_first = history.now("completion/truncated"), history.then("completion/truncated")
    reward, before, spread = history.now("reward/mean"), history.then("reward/mean"), history.then("reward/std")
    if not (spread > 0 and cut > max(TRUNCATED[0] * at_first, TRUNCATED[1]) and reward < before - LITTLE * spread):
        return None
    if history.risen("completion/truncated") <= 1 or history.risen("reward/mean") >= -1 or history.is_well_held_out():
        return None
    rewards = f"reward {before:.2g} to {reward:.2g}"
    return Finding(
        "warning",
        f"{cut:.0%} of the completions reach the limit, {at_first:.0%} at the start; {rewards}",
        "what the limit cuts is judged as wrong, or the loss favors long completions",
        "raise rollout.max_completion_tokens, or set reward.overlong_tokens, mask.truncated or token_mean",
        "arXiv 2503.14476",
    )


def never_stops(history: History) -> Finding | None:
    """F14: no completion ends by itself.

    In a healthy run at least half of them do.
    """
    cut = history.now("completion/truncated")
    # NEVER_STOPS is below 1, because TRL takes a last token that is padding for an end.
    if not cut >= NEVER_STOPS or history.above("completion/truncated", 0.5) <= 1:
        return None
    return Finding(
        "error",
        f"{cut:.0%} of the completions reach the limit",
        "the model never ends an answer: its stop token is missing or never trained, or the limit is too low",
        "check the chat template and generation_config.json, or raise rollout.max_completion_tokens",
        "docs/failures.md F14",
    )


def length_collapse(history: History) -> Finding | None:
    """F16: completions have become very short, and do not answer better than long ones.

    In a healthy run a model that rambles may become brief and right: then it answers as many held-out problems or,
    without an evaluation, earns more with what is still an answer.
    """
    before, now = history.then("completion/length"), history.now("completion/length")
    reward, earned = history.then("reward/mean"), history.now("reward/mean")
    if not now < LENGTH * before or isnan(earned - reward):
        return None
    # Lengths differ by factors, so their logarithm is judged.
    if history.risen("completion/length", log=True) >= -1 or _brief_and_right(history):
        return None
    return Finding(
        "warning",
        f"completions have {now:.3g} tokens, {before:.3g} at the start; reward {reward:.2g} to {earned:.2g}",
        "the policy earns by not answering" if earned >= reward else "the policy stops before it has answered",
        "look at completions.jsonl, and reward only answers",
        "docs/failures.md F16",
    )


def _brief_and_right(history: History) -> bool:
    """Returns whether brief completions answer: by the held-out accuracy, or by a reward that is up."""
    means = history, history.slowly()  # what a small batch hides in few steps it shows in many
    judged = [r for r in history.records if r.get("eval/accuracy") is not None]
    short = 2 * LENGTH * history.then("completion/length")
    # An evaluation from before completions were short says nothing of short ones.
    if len(judged) > 1 and (judged[-1].get("completion/length") or 0.0) < short:
        first, last = judged[0]["eval/accuracy"], judged[-1]["eval/accuracy"]
        chance = min(max((first + last) / 2, 0.0), 1.0)
        # Three standard errors of the difference of two binomial shares on the same number of problems.
        error = 3 * sqrt(2 * chance * (1 - chance) / (judged[-1].get("eval/problems") or 100))
        # A reward that rises beside an accuracy that does not is hacked, unless most answers were right before.
        hacked = last <= 0.5 and any(mean.risen("reward/mean") > 1 for mean in means)
        kept_level = first - last <= HELD_OUT_FALL and last > error and not hacked
        return last - first > error or kept_level
    # Where a reward function falls, another one pays for brevity.
    falls = any(mean.risen(name) < -1 for mean in means for name in channels(history.latest[-1]))
    # The rises are not tested for noise, because such a test would hide that a small batch answers better.
    rises = [mean.now("reward/mean") - mean.then("reward/mean") for mean in means]
    risen = any(rise > LITTLE * history.then("reward/std") for rise in rises)
    return history.now("completion/length") >= ANSWER and risen and not falls
