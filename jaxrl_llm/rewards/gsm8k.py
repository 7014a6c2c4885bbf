"""Rewards for GSM8K (arXiv 2110.14168): the answer is a number, written after "####" or last in the text.

The two ways to find it have the names of veRL's scorer (`verl/utils/reward_score/gsm8k.py`). Numbers are compared by
value, so `1,000`, `$1000` and `1000.00` are equal; veRL compares their text.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from jaxrl_llm.rewards import text_of

LAST = 300  # characters at the end of a completion in which the answer is looked for, as in veRL
NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
AFTER_MARK = re.compile(rf"####\s*({NUMBER})")
ANYWHERE = re.compile(NUMBER)


def accuracy(
    completions: list[Any], answer: list[Any], *, method: Literal["strict", "flexible"] = "strict", **columns: Any
) -> list[float]:
    """1 where the number of the completion equals the answer of the row, which may be GSM8K's whole solution.

    method: "strict" takes the last number after "####", "flexible" the last number of the text.
    Raises: ValueError, if the answer of a row has no number.
    """
    pattern = AFTER_MARK if method == "strict" else ANYWHERE
    wanted = [_wanted(a) for a in answer]
    return [float(_number(pattern, text_of(c)) == w) for c, w in zip(completions, wanted, strict=True)]


def has_mark(completions: list[Any], **columns: Any) -> list[float]:
    """1 where a number follows "####" in the completion."""
    return [float(_number(AFTER_MARK, text_of(c)) is not None) for c in completions]


def _number(pattern: re.Pattern[str], text: str) -> Decimal | None:
    found = pattern.findall(text[-LAST:])
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def _wanted(answer: Any) -> Decimal:
    text = str(answer).split("####")[-1].strip().replace(",", "").replace("$", "")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"column 'answer' is {answer!r}: make it a number (data.convert)") from None
