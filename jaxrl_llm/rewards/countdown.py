"""Rewards of `tasks.countdown`."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from typing import Any

from jaxrl_llm.rewards import abstaining, text_of

SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def accuracy(completions: list[Any], numbers: list[list[int]], target: list[int], **columns: Any) -> list[float | None]:
    """1 where the completion uses every number once and comes to the target."""

    def judge(*rows: list[Any]) -> list[float]:
        return [float(is_solution(text_of(c), n, t)) for c, n, t in zip(*rows, strict=True)]

    return abstaining(judge, completions, numbers, target)


def is_solution(text: str, numbers: list[int], target: int) -> bool:
    """Tells whether an expression uses every number once and comes to the target."""
    return value(text) == target and Counter(used(text)) == Counter(numbers)


def is_expression(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion is an expression of numbers with + - *."""
    return [float(value(text_of(c)) is not None) for c in completions]


def used(text: str) -> list[int]:
    """The numbers in an expression, with repetition."""
    return [int(n) for n in re.findall(r"\d+", text)]


def value(text: str) -> int | None:
    """What an expression of + - * and brackets comes to; None if it is not one."""
    # Digits, signs and brackets alone, and few of them: only then is the text parsed.
    if not re.fullmatch(r"[\d+\-*() ]{1,100}", text):
        return None
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    # No power and no division: both could make numbers of any length.
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not + - * of numbers")
