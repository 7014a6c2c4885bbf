"""Rewards of EasyR1's examples: (1 - format_weight) accuracy + format_weight format.

Answers are compared by math-verify (`math.accuracy`), where EasyR1 uses mathruler. Accuracy and format are logged.
`math.accuracy` and `format.think_boxed` as two reward functions with two weights give the same reward.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jaxrl_llm.config.schema import Share
from jaxrl_llm.tasks import answer_texts, reads, text_of, unlogged
from jaxrl_llm.tasks import format as forms
from jaxrl_llm.tasks import math as maths

# The look-behind lets a match begin once in a run of spaces, so that the time is linear.
AROUND_TAGS = re.compile(r"(?<!\s)\s+(?=[<>/])|(?<=[<>/])\s+")


@reads(answer=maths.expected_text)
def math(
    completions: list[Any],
    answer: list[Any],
    log_metric: Callable[[str, float], None] = unlogged,
    *,
    format_weight: Share = 0.1,
    **columns: Any,
) -> list[float | None]:
    """Returns the reward of EasyR1's `math.py`: the last \\boxed{}, in the format `<think>...</think>...\\boxed{}`."""
    # Spaces around tags are removed, because Qwen2.5-VL writes them.
    texts = [AROUND_TAGS.sub("", text) for text in answer_texts(completions, columns)]
    return _mixed(maths.accuracy(texts, answer), forms.think_boxed(texts), format_weight, log_metric)


@reads(answer=maths.expected_text)
def r1v(
    completions: list[Any],
    answer: list[Any],
    log_metric: Callable[[str, float], None] = unlogged,
    *,
    format_weight: Share = 0.5,
    **columns: Any,
) -> list[float | None]:
    """Returns the reward of EasyR1's `r1v.py`, whose answer is the first <answer> in one line, or the whole text."""
    texts = [text_of(c) for c in completions]
    right = maths.equal([_answer(text) for text in texts], answer)
    return _mixed(right, forms.think_answer(completions, **columns), format_weight, log_metric)


def _answer(text: str) -> str:
    """Returns the content of the first <answer> that ends in its line; the whole text if it has none."""
    # The tags are searched one by one, because a pattern with ".*?" takes quadratic time if a tag is repeated.
    for line in text.split("\n"):
        start = line.find("<answer>")
        end = line.find("</answer>", start)
        if 0 <= start < end:
            return line[start + len("<answer>") : end]
    return text


def _mixed(
    right: list[float | None], formed: list[float], weight: float, log_metric: Callable[[str, float], None]
) -> list[float | None]:
    """Returns (1 - weight) right + weight formed for each completion, and logs both means; None where right is None."""
    judged = [(r, form) for r, form in zip(right, formed, strict=True) if r is not None]
    if judged:
        log_metric("accuracy", sum(r for r, _ in judged) / len(judged))
        log_metric("format", sum(form for _, form in judged) / len(judged))
    return [None if r is None else (1 - weight) * r + weight * form for r, form in zip(right, formed, strict=True)]
