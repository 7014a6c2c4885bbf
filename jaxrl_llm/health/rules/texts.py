"""Health rules on the text of completions: repetition, truncation and length."""

from __future__ import annotations

from math import isnan, sqrt

from ..finding import Finding, channel_metrics
from ..history import HELD_OUT_FALL, History
from .bounds import ANSWER_TOKENS, LENGTH_SHARE, LITTLE_CHANGE, NEVER_STOPS, REPEATED, TRUNCATED


def repeats(history: History) -> Finding | None:
    """Rule F18: completions repeat their own text far more than at the start of the run."""
    start_share, share = history.start_mean("completion/repeated"), history.recent_mean("completion/repeated")
    if not (share > max(REPEATED[0] * start_share, REPEATED[1]) and history.rise_strength("completion/repeated") > 1):
        return None
    return Finding(
        "warning",
        evidence=f"{share:.0%} of the tokens repeat earlier text of their completion ({start_share:.0%} at the start)",
        cause="the text degenerates, and the reward function does not penalize it",
        fix="read completions.jsonl, and add a penalty for repetition to the reward",
        reference="docs/failures.md F18",
    )


def truncated(history: History) -> Finding | None:
    """Rule F15: more completions reach the token limit, and the reward falls.

    In a healthy run more completions may reach the limit, but the reward rises or the held-out accuracy stays.
    """
    truncated_share, start_share = (
        history.recent_mean("completion/truncated"),
        history.start_mean("completion/truncated"),
    )
    reward, start_reward, start_deviation = (
        history.recent_mean("reward/mean"),
        history.start_mean("reward/mean"),
        history.start_mean("reward/std"),
    )
    if not (
        start_deviation > 0
        and truncated_share > max(TRUNCATED[0] * start_share, TRUNCATED[1])
        and reward < start_reward - LITTLE_CHANGE * start_deviation
    ):
        return None
    if (
        history.rise_strength("completion/truncated") <= 1
        or history.rise_strength("reward/mean") >= -1
        or history.keeps_held_out_accuracy()
    ):
        return None
    rewards = f"the reward fell from {start_reward:.2g} to {reward:.2g}"
    return Finding(
        "warning",
        evidence=f"{truncated_share:.0%} of the completions reach the token limit ({start_share:.0%} at the start), "
        f"and {rewards}",
        cause="truncated completions count as wrong, or the loss favors long completions",
        fix="raise rollout.max_completion_tokens, or set reward.overlong_tokens, mask.truncated or token_mean",
        reference="arXiv 2503.14476",
    )


def never_stops(history: History) -> Finding | None:
    """Rule F14: nearly all completions reach the token limit. In a healthy run at most half of them do."""
    truncated_share = history.recent_mean("completion/truncated")
    # NEVER_STOPS is below 1, because TRL counts a completion whose last token is padding as ended.
    if not truncated_share >= NEVER_STOPS or history.strength_above("completion/truncated", 0.5) <= 1:
        return None
    return Finding(
        "error",
        evidence=f"{truncated_share:.0%} of the completions reach the token limit",
        cause="the model does not end its answers: its stop token is missing or was never trained, or the limit is "
        "too low",
        fix="check the chat template and generation_config.json, or raise rollout.max_completion_tokens",
        reference="docs/failures.md F14",
    )


def length_collapse(history: History) -> Finding | None:
    """Rule F16: completions have become very short, without being better answers.

    In a healthy run a verbose model may become brief and right. Then its held-out accuracy stays or, without an
    evaluation, its reward rises with completions that are long enough to be answers.
    """
    start_length, length = history.start_mean("completion/length"), history.recent_mean("completion/length")
    start_reward, reward = history.start_mean("reward/mean"), history.recent_mean("reward/mean")
    if not length < LENGTH_SHARE * start_length or isnan(reward - start_reward):
        return None
    # Logarithms are compared, because lengths vary by factors.
    if history.rise_strength("completion/length", logarithmic=True) >= -1 or _brief_answers_are_right(history):
        return None
    return Finding(
        "warning",
        evidence=f"completions have {length:.3g} tokens ({start_length:.3g} at the start), and the reward went from "
        f"{start_reward:.2g} to {reward:.2g}",
        cause="the policy earns reward without answering"
        if reward >= start_reward
        else "the policy stops before it has answered",
        fix="read completions.jsonl, and give a reward only for answers",
        reference="docs/failures.md F16",
    )


def _brief_answers_are_right(history: History) -> bool:
    """Returns whether short completions are right answers, by the held-out accuracy or else by a rising reward."""
    histories = history, history.with_longer_means()  # A small batch shows a change only in means of many steps.
    evaluations = [r for r in history.records if r.get("eval/accuracy") is not None]
    short_length = 2 * LENGTH_SHARE * history.start_mean("completion/length")
    # An evaluation counts only if its completions were short too.
    if len(evaluations) > 1 and (evaluations[-1].get("completion/length") or 0.0) < short_length:
        first_accuracy, last_accuracy = evaluations[0]["eval/accuracy"], evaluations[-1]["eval/accuracy"]
        pooled = min(max((first_accuracy + last_accuracy) / 2, 0.0), 1.0)
        # The bound is three standard errors of the difference of two binomial shares on the same number of problems.
        error = 3 * sqrt(2 * pooled * (1 - pooled) / (evaluations[-1].get("eval/problems") or 100))
        # If the reward rises but the accuracy does not, the reward is hacked, unless most answers were right before.
        hacked = last_accuracy <= 0.5 and any(one_history.rise_strength("reward/mean") > 1 for one_history in histories)
        kept_level = first_accuracy - last_accuracy <= HELD_OUT_FALL and last_accuracy > error and not hacked
        return last_accuracy - first_accuracy > error or kept_level
    # If a reward function falls, another one pays for short completions.
    channel_falls = any(
        one_history.rise_strength(name) < -1
        for one_history in histories
        for name in channel_metrics(history.last_records[-1])
    )
    # The rises need not exceed the noise, because with small batches even a real improvement does not.
    rises = [
        one_history.recent_mean("reward/mean") - one_history.start_mean("reward/mean") for one_history in histories
    ]
    reward_rises = any(rise > LITTLE_CHANGE * history.start_mean("reward/std") for rise in rises)
    return history.recent_mean("completion/length") >= ANSWER_TOKENS and reward_rises and not channel_falls
