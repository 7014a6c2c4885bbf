"""Completions of a run by reward: best and worst of the first, the middle and the last group in the log."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxrl_llm.data.image_columns import chat_text
from jaxrl_llm.tools.report.runs import ReportedRun

MAX_CHARACTERS = 3000  # characters of a text on the page


class LabelledCompletion(NamedTuple):
    """A completion on the page, with the reason why it is shown, such as "best, reward 1"."""

    label: str
    text: str


class Group(NamedTuple):
    """Completions of a prompt at a step, as the page shows them."""

    step: int
    prompt: str
    images: list[tuple[str, str]]  # name and data URL of each image
    rewards: str  # mean reward, and number of completions without a verdict
    shown: list[LabelledCompletion]


def groups(run: ReportedRun) -> list[Group]:
    """Returns the first, the middle and the last group in the log of a run."""
    return [_group(line) for line in run.groups]


def _group(line: dict[str, Any]) -> Group:
    """Returns what the report shows of a group. line: a line of completions.jsonl."""
    # Pairs of a reward, None without a verdict, and its completion. The judged pairs are sorted by their rewards.
    pairs = list(zip(line["rewards"], line["completions"], strict=True))
    judged = sorted((pair for pair in pairs if pair[0] is not None), key=lambda pair: pair[0])
    unjudged = len(pairs) - len(judged)
    count = f"{len(pairs)} completions" + (f", {unjudged} without a verdict" if unjudged else "")
    if not judged:
        shown, rewards = [LabelledCompletion("one of them: no verdict", cut(pairs[0][1]))], count
    else:
        (low, worst), (high, best) = judged[0], judged[-1]
        shown = [
            LabelledCompletion(f"best, reward {high:.3g}", cut(best)),
            LabelledCompletion(f"worst, reward {low:.3g}", cut(worst)),
        ]
        # One completion is shown if all rewards are equal, because none is best or worst.
        if low == high:
            shown = [LabelledCompletion(f"one of them: all have reward {high:.3g}", cut(best))]
        rewards = f"mean reward {sum(reward for reward, _ in judged) / len(judged):.3g} of {count}"
    images = list(zip(_image_names(line["prompt"]), line.get("pictures", ()), strict=False))
    return Group(line["step"], cut(chat_text(line["prompt"])), images, rewards, shown)


def _image_names(prompt: Any) -> list[str]:
    """Returns the names of the images of a prompt in the log."""
    contents = [message["content"] for message in prompt] if isinstance(prompt, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part.get("name", "") for part in parts if part["type"] == "image"]


def cut(text: str) -> str:
    """Returns a text, of which at most MAX_CHARACTERS characters are kept."""
    hidden = len(text) - MAX_CHARACTERS
    return text if hidden <= 0 else f"{text[:MAX_CHARACTERS]}… ({hidden:,} more characters)"
