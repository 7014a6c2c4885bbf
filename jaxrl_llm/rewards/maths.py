"""Rewards for mathematics with a known answer, judged by math-verify."""

from __future__ import annotations

from typing import Any

from math_verify import LatexExtractionConfig, parse, verify


def accuracy(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last \\boxed{} of the completion equals the answer as mathematics."""
    return [float(_equal(_text(c), a)) for c, a in zip(completions, answer, strict=True)]


def is_boxed(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion has a \\boxed{} at all."""
    return [float("\\boxed{" in _text(c)) for c in completions]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def _equal(text: str, answer: str) -> bool:
    if "\\boxed{" not in text:
        return False
    boxed = LatexExtractionConfig(boxed_match_priority=0)
    found = parse(text, extraction_config=[boxed])
    wanted = parse(f"\\boxed{{{answer}}}", extraction_config=[boxed])
    return bool(found) and verify(wanted, found)
