"""The rewards of EasyR1's examples: (1 - format_weight) accuracy + format_weight format.

Answers are compared by math-verify (`math.accuracy`), where EasyR1 uses mathruler. Accuracy and format are logged.
Two functions with two weights do the same: `math.accuracy` and `format.think_boxed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jaxrl_llm.config.schema import Share
from jaxrl_llm.rewards import format as forms
from jaxrl_llm.rewards import math as maths
from jaxrl_llm.rewards import text_of

__all__ = ["math", "r1v"]

ANSWER = re.compile(r"<answer>(.*?)</answer>")
AROUND_TAGS = re.compile(r"\s*(<|>|/)\s*")


def math(
    completions: list[Any],
    answer: list[Any],
    log_metric: Callable[[str, float], None],
    *,
    format_weight: Share = 0.1,
    **columns: Any,
) -> list[float]:
    """The answer is the last \\boxed{}, the format `<think>...</think>...\\boxed{}`: `reward_function/math.py`."""
    texts = [AROUND_TAGS.sub(r"\1", text_of(c)) for c in completions]  # Qwen2.5-VL puts spaces around tags
    return _mixed(maths.accuracy(texts, answer), forms.think_boxed(texts), format_weight, log_metric)


def r1v(
    completions: list[Any],
    answer: list[Any],
    log_metric: Callable[[str, float], None],
    *,
    format_weight: Share = 0.5,
    **columns: Any,
) -> list[float]:
    """The answer is the first <answer>, or else the whole text: `reward_function/r1v.py`."""
    texts = [text_of(c) for c in completions]
    found = [ANSWER.search(text) for text in texts]
    boxed = [f"\\boxed{{{(f[1] if f else text).strip()}}}" for f, text in zip(found, texts, strict=True)]
    return _mixed(maths.accuracy(boxed, answer), forms.think_answer(texts), format_weight, log_metric)


def _mixed(
    right: list[float], formed: list[float], weight: float, log_metric: Callable[[str, float], None]
) -> list[float]:
    log_metric("accuracy", sum(right) / len(right))
    log_metric("format", sum(formed) / len(formed))
    return [(1 - weight) * a + weight * f for a, f in zip(right, formed, strict=True)]
