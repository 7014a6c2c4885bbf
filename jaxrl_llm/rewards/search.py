"""Question answering in `<answer>` tags: exact match and F1 after SQuAD's normalization (arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PUNCTUATION = str.maketrans("", "", string.punctuation)


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


def normal(text: str) -> str:
    """Returns a text in lower case, without punctuation, articles and more than one space."""
    words = str(text).lower().translate(PUNCTUATION).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


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
