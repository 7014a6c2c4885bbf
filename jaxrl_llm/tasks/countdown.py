"""Countdown: make a target from three numbers, each used once, with + - * (the game of arXiv 2503.01307, small).

Rows: 20,000 problems with the columns numbers, target and answer, about a tenth of them held out. Rewards: `accuracy`,
the expression is a solution; `is_expression`, it is an expression at all.
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
# No power and no division: both could make numbers of any length.
ALLOWED = (ast.Add, ast.Sub, ast.Mult)


def train() -> list[dict[str, Any]]:
    """About nine tenths of the problems, in a fixed random order."""
    return [row for row in _problems() if not _is_held_out(row)]


def held_out() -> list[dict[str, Any]]:
    """About a tenth of the problems. The numbers of a problem, with its target, are in one split only."""
    return [row for row in _problems() if _is_held_out(row)]


def accuracy(completions: list[Any], numbers: list[list[int]], target: list[int], **columns: Any) -> list[float | None]:
    """1 where the completion uses every number once and comes to the target."""
    return each_judged(_is_solution, completions, numbers, target)


def is_expression(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the completion is an expression of numbers with + - *."""
    return [float(_evaluated(text_of(c)) is not None) for c in completions]


def _is_held_out(row: dict[str, Any]) -> bool:
    # The hash is that of the sorted numbers, so that a problem in another order stays in its split.
    return zlib.crc32(repr((sorted(row["numbers"]), row["target"])).encode()) % 10 == 0


@cache
def _problems() -> list[dict[str, Any]]:
    """Draws solutions (x op y) op z, and keeps one of each set of numbers with each target from 1 to 199."""
    rng, seen, rows = np.random.default_rng(0), set(), []
    drawn, signs = rng.integers(1, 30, (DRAWS, 3)).tolist(), rng.choice(list(SIGNS), (DRAWS, 2)).tolist()
    for (x, y, z), (first, second) in zip(drawn, signs, strict=True):
        target, numbers = SIGNS[second](SIGNS[first](x, y), z), sorted((x, y, z))
        key = (*numbers, target)
        if not 0 < target < 200 or key in seen:
            continue
        seen.add(key)
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
    """Returns what an expression of + - * and brackets comes to; None if it is not one."""
    # Digits, signs and brackets alone, and few of them: only then is the text parsed.
    if not re.fullmatch(r"[\d+\-*() ]{1,100}", text):
        return None
    try:
        return int(compute(ast.parse(text.strip(), mode="eval").body, ALLOWED))
    except (SyntaxError, ValueError, RecursionError):
        return None
