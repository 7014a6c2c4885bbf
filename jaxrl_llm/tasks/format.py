"""Rewards for the form of a completion: tags for thoughts and for the answer.

A <think> that the chat template has written into the prompt counts as a part of the completion.
"""

from __future__ import annotations

import re
from typing import Any

from jaxrl_llm.tasks import answer_texts

BETWEEN = re.compile(r"</think>\s*<answer>")


def think(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1 if the completion begins with its only <think> and closes it (TRL's `think_format_reward`), else 0."""
    texts = answer_texts(completions, columns)
    return [float(text.count("<think>") == 1 and _in_order(text, "<think>", "</think>")) for text in texts]


def think_answer(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1 if the completion is `<think>...</think><answer>...</answer>`, as in EasyR1's r1v, else 0."""
    return [float(_has_answer(text)) for text in answer_texts(completions, columns)]


def think_boxed(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1 if the completion begins with <think>, closes it, and then has a \\boxed{} (EasyR1's math), else 0."""
    marks = ("<think>", "</think>", "\\boxed{", "}")
    return [float(_in_order(text, *marks)) for text in answer_texts(completions, columns)]


def _in_order(text: str, first: str, *marks: str) -> bool:
    """Returns whether the text begins with `first`, and has `marks` after it in this order.

    The text is searched once, because a regular expression of several ".*" takes cubic time if a mark is repeated.
    """
    end = len(first) if text.startswith(first) else -1
    for mark in marks:
        start = text.find(mark, end) if end >= 0 else -1
        end = start + len(mark) if start >= 0 else -1
    return end >= 0


def _has_answer(text: str) -> bool:
    """Returns whether a text is a thought, directly followed by an answer."""
    end = len(text) - len("</answer>")
    return text.startswith("<think>") and text.endswith("</answer>") and bool(BETWEEN.search(text, len("<think>"), end))
