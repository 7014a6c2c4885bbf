"""Question answering in `<answer>` tags: exact match and F1 after SQuAD's normalization (arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
INSIDE = r"(?:(?!</?(?:think|search|information|answer)>).)*"  # text without a tag of the protocol
THOUGHT = rf"\s*<think>{INSIDE}</think>\s*"
SEARCHES = re.compile(rf"{THOUGHT}<search>{INSIDE}</search>\s*", re.DOTALL)
ANSWERS = re.compile(rf"{THOUGHT}<answer>{INSIDE}</answer>\s*", re.DOTALL)


def exact_match(
    completions: list[Any], answer: list[Any], turns: list[Any] | None = None, **columns: Any
) -> list[float]:
    """1 where the last answer of the policy is one of the row's answers."""
    said = _said(completions, turns)
    return [float(any(normal(text) == normal(x) for x in _all(a))) for text, a in zip(said, answer, strict=True)]


def f1(completions: list[Any], answer: list[Any], turns: list[Any] | None = None, **columns: Any) -> list[float]:
    """The largest F1 of words, between the last answer of the policy and one of the row's answers."""
    said = _said(completions, turns)
    return [max(_f1(normal(text), normal(x)) for x in _all(a)) for text, a in zip(said, answer, strict=True)]


def answered(completions: list[Any], turns: list[Any] | None = None, **columns: Any) -> list[float]:
    """1 where the policy gives an answer."""
    return [float(bool(text)) for text in _said(completions, turns)]


def with_format(completions: list[Any], answer: list[Any], turns: list[Any], **columns: Any) -> list[float]:
    """The reward of Search-R1 v0.3 (arXiv 2505.15117): exact match, and a part of it for episodes in its format.

    Right 1, or 0.8 without the format; wrong 0.2 in the format, or 0.1 with an answer at least; else 0.
    In the format, each turn but the last thinks and then searches, and the last thinks and then answers.
    """
    right = exact_match(completions, answer, turns)
    said, well = _said(completions, turns), [_has_format(one) for one in turns]
    wrong = [0.2 if form else 0.1 if text else 0.0 for text, form in zip(said, well, strict=True)]
    return [(1.0 if form else 0.8) if match else less for match, less, form in zip(right, wrong, well, strict=True)]


def _has_format(turns: list[Any]) -> bool:
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    found = [turn["content"] for turn in turns if turn["role"] != "assistant"]
    if not said or not all("<information>" in text for text in found):
        return False
    return all(map(SEARCHES.fullmatch, said[:-1])) and bool(ANSWERS.fullmatch(said[-1]))


def normal(text: str) -> str:
    """Returns a text in lower case, without punctuation, articles and more than one space."""
    return " ".join(ARTICLES.sub(" ", str(text).lower().translate(PUNCTUATION)).split())


def _said(completions: list[Any], turns: list[Any] | None) -> list[str]:
    """Returns the last answer of each episode, "" if there is none. What an environment said is no answer."""
    if turns is None:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    else:
        texts = ["".join(turn["content"] for turn in one if turn["role"] == "assistant") for one in turns]
    return [(ANSWER.findall(text) or [""])[-1].strip() for text in texts]


def _all(answer: Any) -> list[str]:
    return [answer] if isinstance(answer, str) else list(answer)


def _f1(said: str, answer: str) -> float:
    words, wanted = said.split(), answer.split()
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted)) if common else 0.0
