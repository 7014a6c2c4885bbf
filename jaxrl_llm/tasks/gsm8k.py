"""GSM8K (arXiv 2110.14168): `convert` for its rows with the columns question and answer, and rewards for a number.

The number is after "####", or the last one of the text; the values of `method` are those of veRL's scorer
(`verl/utils/reward_score/gsm8k.py`). Numbers are compared by value, so that `1,000`, `$1000` and `1000.00` are equal;
veRL compares their text.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from jaxrl_llm.tasks import each_judged, reads, text_of

SYSTEM = "Reason step by step, and put the final answer within \\boxed{}."
LAST_CHARACTERS = 300  # characters at the end of a completion that are searched for the answer, as in veRL
MINUS = str.maketrans("−–", "--")
# Numbers such as -5, $-5, -$5, .5, 1,000 and 1,00,000. A hyphen after a digit or a letter, as in "2-3", is no sign.
NUMBER = r"(?:(?<!\w)-)?(?:[$€£¥]-?)?(?:(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
ANYWHERE = re.compile(NUMBER)
AFTER_MARK = re.compile(rf"####[\s*`$:]*(?:\\boxed\s*\{{)?[\s*$]*({NUMBER})")
# A number that begins an expression, a time, a list or two answers, as in 1/2, 10-5 or "3 or 4", is no answer.
CONTINUATION = re.compile(r"[.:]?\d|[eE][-+]?\d|\s*(?:[-+*/^×÷=:,;]|\\times|\\cdot|or\b|and\b|to\b)\s*[$€£¥]?\d")


def convert(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row {question, answer: "… #### 72"} as {prompt: chat, answer: "72"}. Raises: KeyError, ValueError."""
    if "####" not in row["answer"]:
        raise ValueError("column 'answer' must end with '#### result'")
    # Separators of thousands are removed, because rewards compare plain numbers.
    result = row["answer"].split("####")[-1].strip().replace(",", "")
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": chat, "answer": result}


@reads(answer=lambda value: _expected_number(value))
def accuracy(
    completions: list[Any], answer: list[Any], *, method: Literal["strict", "flexible"] = "strict", **columns: Any
) -> list[float | None]:
    """Returns 1 if the number of the completion equals the answer of the row, else 0.

    The answer of the row may be GSM8K's whole solution. method: "strict" for the last number after "####", "flexible"
    for the last number of the text. Raises: ValueError, if the answer of a row has no number.
    """
    find_number = _number_after_mark if method == "strict" else _last_number
    return each_judged(lambda text, right: find_number(text) == _expected_number(right), completions, answer)


def has_mark(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1 if a number follows "####" in the completion, else 0."""
    return [float(_number_after_mark(text_of(c)) is not None) for c in completions]


def _number_after_mark(text: str) -> Decimal | None:
    """Returns the number after the last "####" of a text; None if no single number follows it."""
    text_end = text[-LAST_CHARACTERS:].translate(MINUS)
    numbers = list(AFTER_MARK.finditer(text_end))
    return _value(numbers[-1][1]) if numbers and not CONTINUATION.match(text_end, numbers[-1].end()) else None


def _last_number(text: str) -> Decimal | None:
    """Returns the last number of a text; None if it has none."""
    numbers = ANYWHERE.findall(text[-LAST_CHARACTERS:].translate(MINUS))
    return _value(numbers[-1]) if numbers else None


def _value(number: str) -> Decimal:
    """Returns the value of a number that may have a sign of currency and separators of thousands."""
    return Decimal(re.sub(r"[,$€£¥]", "", number))


def _expected_number(answer: Any) -> Decimal:
    """Returns the number of a row's answer, which may be after "####". Raises: ValueError, if it has none."""
    try:
        return _value(str(answer).split("####")[-1].strip().translate(MINUS))
    except InvalidOperation:
        raise ValueError(f"column 'answer' is {answer!r}, but must be a number (set data.convert)") from None
