"""Completions of a run by reward: the best and the worst of the first, the middle and the last step in the log."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxrl_llm.report.runs import Run

MOST = 3000  # characters of a text on the page


class Completion(NamedTuple):
    label: str
    text: str


class Group(NamedTuple):
    """The completions of a prompt at a step."""

    step: int
    prompt: str
    mean: float  # of the rewards
    of: int  # number of completions
    shown: list[Completion]


def groups(run: Run) -> list[Group]:
    """Returns the first, the middle and the last group in the log of a run."""
    logged = [line for line in run.completions if line["completions"]]
    picked = sorted({0, len(logged) // 2, len(logged) - 1}) if logged else []
    return [_group(logged[at]) for at in picked]


def _group(line: dict[str, Any]) -> Group:
    pairs = list(zip(line["rewards"], line["completions"], strict=True))
    best, worst = max(pairs, key=lambda pair: pair[0]), min(pairs, key=lambda pair: pair[0])
    shown = [Completion(f"best, reward {best[0]:.3g}", cut(best[1]))]
    if worst[0] < best[0]:
        shown.append(Completion(f"worst, reward {worst[0]:.3g}", cut(worst[1])))
    else:
        shown = [Completion(f"one of them: all have reward {best[0]:.3g}", cut(best[1]))]
    mean = sum(line["rewards"]) / len(pairs)
    return Group(line["step"], cut(prompt_text(line["prompt"])), mean, len(pairs), shown)


def prompt_text(prompt: Any) -> str:
    """Returns a prompt as text. A chat of several messages has the role before each."""
    if not isinstance(prompt, list):
        return str(prompt)
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def cut(text: str) -> str:
    """Returns the beginning of a text that is too long."""
    more = len(text) - MOST
    return text if more <= 0 else f"{text[:MOST]}… ({more:,} more characters)"
