"""Computes the status of the tests [ … ] and [[ … ]] of a shell script, which decide what shell.py follows.

The status is None if it is unknown. A text with a $ in it is unknown, because the script does not say the variable.
"""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase

# {operator of a test: comparison of two numbers, or of two texts}
COMPARISONS = {"=": operator.eq, "==": operator.eq, "-eq": operator.eq, "!=": operator.ne, "-ne": operator.ne}
COMPARISONS |= {"-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge}


def status(words: list[str]) -> bool | None:
    """Returns the status of a test, which is known for one text, -n or -z with a text, and a comparison.

    words: all words of the test, from [, [[ or `test` on.
    """
    sides = words[1:-1] if words[-1] in ("]", "]]") else words[1:]
    match sides:
        case [text] | ["-n", text]:
            return is_set(text)
        case ["-z", text]:
            return negated(is_set(text))
        case [first, sign, second]:
            return compared(first, sign, second, is_pattern=words[0] == "[[")
    return None


def negated(status: bool | None) -> bool | None:
    """Returns the opposite of a status; None if the status is unknown."""
    return None if status is None else not status


def compared(first: str, sign: str, second: str, *, is_pattern: bool = False) -> bool | None:
    """Returns whether a comparison holds. is_pattern: the second side is a pattern with * and ?."""
    compare = COMPARISONS.get(sign)
    is_equal = compare is operator.eq
    # A comparison with the empty text asks whether a variable is set. A variable that the script never sets is unset.
    if compare in (operator.eq, operator.ne) and "" in (first, second) and "$" in first + second:
        known_status = is_set(first or second)
        return negated(known_status) if is_equal else known_status
    if not compare or "$" in first + second:
        return None
    # 08 and 8 are equal.
    if all(re.fullmatch(r"\s*-?\d+\s*", side) for side in (first, second)):
        return compare(int(first), int(second))
    is_same = fnmatchcase(first, second) if is_pattern else first == second
    return is_same == is_equal if compare in (operator.eq, operator.ne) else None


def is_set(text: str) -> bool | None:
    """Whether a text is not empty; None if unknown. A variable that the script never sets counts as empty."""
    if re.fullmatch(r"\$(\w+|\{\w+\})", text):
        return False
    return None if "$" in text else bool(text)
