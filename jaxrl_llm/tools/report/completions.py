"""Completions of a run by reward: the best and the worst of the first, the middle and the last step in the log."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxrl_llm.data.image_columns import chat_text
from jaxrl_llm.tools.report.runs import ReportedRun

MOST = 3000  # characters of a text on the page


class LabelledCompletion(NamedTuple):
    label: str
    text: str


class Group(NamedTuple):
    """The completions of a prompt at a step."""

    step: int
    prompt: str
    images: list[tuple[str, str]]  # name and data URL of each
    rewards: str  # their mean, and how many have none
    shown: list[LabelledCompletion]


def groups(run: ReportedRun) -> list[Group]:
    """Returns the first, the middle and the last group in the log of a run."""
    return [_group(line) for line in run.groups]


def _group(line: dict[str, Any]) -> Group:
    pairs = list(zip(line["rewards"], line["completions"], strict=True))
    judged = sorted((pair for pair in pairs if pair[0] is not None), key=lambda pair: pair[0])  # None: no verdict
    without = len(pairs) - len(judged)
    of = f"{len(pairs)} completions" + (f", {without} without a verdict" if without else "")
    if not judged:
        shown, rewards = [LabelledCompletion("one of them: no verdict", cut(pairs[0][1]))], of
    else:
        (low, worst), (high, best) = judged[0], judged[-1]
        shown = [
            LabelledCompletion(f"best, reward {high:.3g}", cut(best)),
            LabelledCompletion(f"worst, reward {low:.3g}", cut(worst)),
        ]
        # Best and worst of equal rewards would be two texts that nothing tells apart.
        if low == high:
            shown = [LabelledCompletion(f"one of them: all have reward {high:.3g}", cut(best))]
        rewards = f"mean reward {sum(reward for reward, _ in judged) / len(judged):.3g} of {of}"
    images = list(zip(_image_names(line["prompt"]), line.get("pictures", ()), strict=False))
    return Group(line["step"], cut(chat_text(line["prompt"])), images, rewards, shown)


def _image_names(prompt: Any) -> list[str]:
    """Returns the names of the images of a prompt in the log."""
    contents = [message["content"] for message in prompt] if isinstance(prompt, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part.get("name", "") for part in parts if part["type"] == "image"]


def cut(text: str) -> str:
    """Returns the beginning of a text that is too long."""
    more = len(text) - MOST
    return text if more <= 0 else f"{text[:MOST]}… ({more:,} more characters)"
