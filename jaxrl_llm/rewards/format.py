"""Rewards for the form of a completion: tags for thoughts and for the answer."""

from __future__ import annotations

import re
from typing import Any

from jaxrl_llm.rewards import text_of

THINK = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)
THINK_ANSWER = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
THINK_BOXED = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def think(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion begins with <think>, has no second one, and closes it: TRL's `think_format_reward`."""
    return _matches(THINK, completions)


def think_answer(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion is `<think>...</think><answer>...</answer>`, as EasyR1's r1v and DeepSeek-R1 want it."""
    return _matches(THINK_ANSWER, completions)


def think_boxed(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion begins with <think>, closes it, and has a \\boxed{} after it: EasyR1's math."""
    return _matches(THINK_BOXED, completions)


def _matches(pattern: re.Pattern[str], completions: list[Any]) -> list[float]:
    return [float(bool(pattern.fullmatch(text_of(c)))) for c in completions]
