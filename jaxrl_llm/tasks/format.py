"""Rewards for the form of a completion: tags for thoughts and for the answer.

A <think> that the chat template has written into the prompt counts as a part of the completion.
"""

from __future__ import annotations

import re
from typing import Any

from jaxrl_llm.tasks import answer_texts

BETWEEN = re.compile(r"</think>\s*<answer>")


def think(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion begins with <think>, has no second one, and closes it: TRL's `think_format_reward`."""
    texts = answer_texts(completions, columns)
    return [float(text.count("<think>") == 1 and _in_order(text, "<think>", "</think>")) for text in texts]


def think_answer(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion is `<think>...</think><answer>...</answer>`, as EasyR1's r1v and DeepSeek-R1 want it."""
    return [float(_has_answer(text)) for text in answer_texts(completions, columns)]


def think_boxed(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion begins with <think>, closes it, and has a \\boxed{} after it: EasyR1's math."""
    marks = ("<think>", "</think>", "\\boxed{", "}")
    return [float(_in_order(text, *marks)) for text in answer_texts(completions, columns)]


def _in_order(text: str, first: str, *marks: str) -> bool:
    """Tells whether the text begins with `first`, and has the other marks one behind the other.

    It looks at the text once. A regular expression of several ".*" takes cubic time where a mark is repeated.
    """
    place = len(first) if text.startswith(first) else -1
    for mark in marks:
        start = text.find(mark, place) if place >= 0 else -1
        place = start + len(mark) if start >= 0 else -1
    return place >= 0


def _has_answer(text: str) -> bool:
    end = len(text) - len("</answer>")
    return text.startswith("<think>") and text.endswith("</answer>") and bool(BETWEEN.search(text, len("<think>"), end))
