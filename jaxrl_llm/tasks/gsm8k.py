"""GSM8K (arXiv 2110.14168), whose rows have the columns question and answer: `convert`, and rewards for a number.

The number is written after "####", or last in the text: `method` has the names of veRL's scorer
(`verl/utils/reward_score/gsm8k.py`). Numbers are compared by value, so `1,000`, `$1000` and `1000.00` are equal; veRL
compares their text.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from jaxrl_llm.tasks import each_judged, reads, text_of

SYSTEM = "Reason step by step, and put the final answer within \\boxed{}."
# Characters at the end of a completion in which the answer is looked for, as in veRL.
LAST = 300
MINUS = str.maketrans("−–", "--")
# -5, $-5, -$5, .5, 1,000, 1,00,000. A hyphen behind a digit or a letter is no sign: "pages 2-3".
NUMBER = r"(?:(?<!\w)-)?(?:[$€£¥]-?)?(?:(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
ANYWHERE = re.compile(NUMBER)
AFTER_MARK = re.compile(rf"####[\s*`$:]*(?:\\boxed\s*\{{)?[\s*$]*({NUMBER})")
# What goes on as an expression, a time, a list or two answers is not the number that it begins with: 1/2, 10-5, 3 or 4.
GOES_ON = re.compile(r"[.:]?\d|[eE][-+]?\d|\s*(?:[-+*/^×÷=:,;]|\\times|\\cdot|or\b|and\b|to\b)\s*[$€£¥]?\d")


def convert(row: dict[str, Any]) -> dict[str, Any]:
    """{question, answer: "… #### 72"} -> {prompt: chat, answer: "72"}. Raises: KeyError, ValueError."""
    if "####" not in row["answer"]:
        raise ValueError("column 'answer' has no '#### result' at its end")
    # The rewards compare numbers without separators of thousands.
    result = row["answer"].split("####")[-1].strip().replace(",", "")
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": chat, "answer": result}


@reads(answer=lambda value: _expected_number(value))
def accuracy(
    completions: list[Any], answer: list[Any], *, method: Literal["strict", "flexible"] = "strict", **columns: Any
) -> list[float | None]:
    """1 where the number of the completion equals the answer of the row, which may be GSM8K's whole solution.

    method: "strict" takes the last number after "####", "flexible" the last number of the text.
    Raises: ValueError, if the answer of a row has no number.
    """
    find = _after_mark if method == "strict" else _last
    return each_judged(lambda text, right: find(text) == _expected_number(right), completions, answer)


def has_mark(completions: list[Any], **columns: Any) -> list[float]:
    """1 where a number follows "####" in the completion."""
    return [float(_after_mark(text_of(c)) is not None) for c in completions]


def _after_mark(text: str) -> Decimal | None:
    end = text[-LAST:].translate(MINUS)
    numbers = list(AFTER_MARK.finditer(end))
    return _value(numbers[-1][1]) if numbers and not GOES_ON.match(end, numbers[-1].end()) else None


def _last(text: str) -> Decimal | None:
    numbers = ANYWHERE.findall(text[-LAST:].translate(MINUS))
    return _value(numbers[-1]) if numbers else None


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[,$€£¥]", "", number))


def _expected_number(answer: Any) -> Decimal:
    try:
        return _value(str(answer).split("####")[-1].strip().translate(MINUS))
    except InvalidOperation:
        raise ValueError(f"column 'answer' is {answer!r}: make it a number (data.convert)") from None
