"""Countdown: make a target from three numbers, each used once, with + - * (a small form of arXiv 2503.01307's game).

The rows are 20,000 problems with the columns numbers, target and answer, about a tenth of them held out. The reward
`accuracy` is 1 for a solution, and `is_expression` for any expression.
"""

from __future__ import annotations

import ast
import operator
import re
import zlib
from collections import Counter
from functools import cache
from typing import Any

import numpy as np

from jaxrl_llm.tasks import each_judged, text_of
from jaxrl_llm.tasks.calculator import compute

PROBLEMS, DRAWS = 20_000, 120_000
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# Power and division are not allowed, because both could make numbers of any length.
ALLOWED = (ast.Add, ast.Sub, ast.Mult)


def train() -> list[dict[str, Any]]:
    """Returns about nine tenths of the problems, in a fixed random order."""
    return [row for row in _problems() if not _is_held_out(row)]


def held_out() -> list[dict[str, Any]]:
    """Returns about a tenth of the problems. No set of numbers with its target is in both splits."""
    return [row for row in _problems() if _is_held_out(row)]


def accuracy(completions: list[Any], numbers: list[list[int]], target: list[int], **columns: Any) -> list[float | None]:
    """Returns 1 if the completion uses every number once and has the target as its value, else 0."""
    return each_judged(_is_solution, completions, numbers, target)


def is_expression(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1 if the completion is an expression of numbers with + - *, else 0."""
    return [float(_evaluated(text_of(c)) is not None) for c in completions]


def _is_held_out(row: dict[str, Any]) -> bool:
    # The sorted numbers are hashed, so that a problem with another order of its numbers stays in its split.
    return zlib.crc32(repr((sorted(row["numbers"]), row["target"])).encode()) % 10 == 0


@cache
def _problems() -> list[dict[str, Any]]:
    """Draws solutions (x op y) op z, and keeps one for each set of numbers and each target from 1 to 199."""
    rng, known_problems, rows = np.random.default_rng(0), set(), []
    drawn, signs = rng.integers(1, 30, (DRAWS, 3)).tolist(), rng.choice(list(SIGNS), (DRAWS, 2)).tolist()
    for (x, y, z), (first, second) in zip(drawn, signs, strict=True):
        target, numbers = SIGNS[second](SIGNS[first](x, y), z), sorted((x, y, z))
        key = (*numbers, target)
        if not 0 < target < 200 or key in known_problems:
            continue
        known_problems.add(key)
        row = {"prompt": _chat(numbers, target), "numbers": numbers, "target": target}
        rows.append(row | {"answer": f"({x}{first}{y}){second}{z}"})
        if len(rows) == PROBLEMS:
            break
    return rows


def _chat(numbers: list[int], target: int) -> list[dict[str, str]]:
    listed = ", ".join(map(str, numbers))
    text = f"Make {target} from the numbers {listed}. Use each number once, and only + - * and brackets. "
    return [{"role": "user", "content": text + "Answer with the expression alone."}]


def _is_solution(text: str, numbers: list[int], target: int) -> bool:
    return _evaluated(text) == target and Counter(map(int, re.findall(r"\d+", text))) == Counter(numbers)


def _evaluated(text: str) -> int | None:
    """Returns the value of an expression of + - * and brackets; None for any other text."""
    # Only a short text of digits, signs and brackets is parsed, so that parsing is safe.
    if not re.fullmatch(r"[\d+\-*() ]{1,100}", text):
        return None
    try:
        return int(compute(ast.parse(text.strip(), mode="eval").body, ALLOWED))
    except (SyntaxError, ValueError, RecursionError):
        return None
