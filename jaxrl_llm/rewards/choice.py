"""Rewards for multiple choice: the letter that a completion chooses."""

from __future__ import annotations

import re
from typing import Any

from jaxrl_llm.rewards import text_of
from jaxrl_llm.rewards.math import last_box

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SAID = re.compile(r"\b(?:answer|choice|option)\b(?:\s+is)?\s*[:=]?\s*\**\(?([A-Z])\b(?!['’])", re.IGNORECASE)
ALONE = re.compile(r"\(([A-Z])\)|\b([A-Z])[.):]?\s*$")
# B, (B), B., **B**, \text{B}, $B$, Option B
LETTER = re.compile(
    r"\s*\$?\s*(?:\\(?:text|math)\w*\{)?\s*\**(?:(?:option|choice)\s+)?\(?([A-Z])(?:[.):}*$]|\s|$)", re.IGNORECASE
)

__all__ = ["accuracy", "is_given"]


def accuracy(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """1 where the completion chooses the letter of the row.

    The letter is the content of the last \\boxed{}; without a box, of the last <answer> tag; without a tag, what
    follows the last "answer is", "answer:", "choice" or "option"; without these, the last "(B)", or a "B" at the end.
    The answer of a row is a letter, as "B" or "(B)", or a number that counts from 0 (MMLU).
    Raises: ValueError, if it is neither.
    """
    wanted = [_wanted(a) for a in answer]
    return [float(_chosen(text_of(c)) == w) for c, w in zip(completions, wanted, strict=True)]


def is_given(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion chooses a letter."""
    return [float(bool(_chosen(text_of(c)))) for c in completions]


def _chosen(text: str) -> str:
    """Returns the letter that a text chooses, in upper case; "" if there is none."""
    box, tags = last_box(text), TAGGED.findall(text)
    if box is not None or tags:
        found = LETTER.match(tags[-1] if box is None else box)
        return found[1].upper() if found else ""
    said = [letter for letter in SAID.findall(text) if letter.isupper()]
    if said:
        return said[-1]
    alone = [bracketed or last for bracketed, last in ALONE.findall(text.strip())]
    return alone[-1] if alone else ""


def _wanted(answer: Any) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < 26:
        return chr(ord("A") + answer)
    found = re.fullmatch(r"\s*\(?([A-Za-z])[.)]?\s*", str(answer))
    if not found:
        raise ValueError(f"column 'answer' is {answer!r}: make it a letter, or a number that counts from 0")
    return found[1].upper()
