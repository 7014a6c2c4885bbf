"""What [ … ], [[ … ]] and (( … )) say of texts. A text that is not known has a $, and then the answer is None."""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase

COMPARISONS = {"=": operator.eq, "==": operator.eq, "-eq": operator.eq, "!=": operator.ne, "-ne": operator.ne}
COMPARISONS |= {"<": operator.lt, "-lt": operator.lt, "<=": operator.le, "-le": operator.le}
COMPARISONS |= {">": operator.gt, "-gt": operator.gt, ">=": operator.ge, "-ge": operator.ge}


def status(words: list[str], *, is_pattern: bool) -> bool | None:
    """Returns the status of a test. is_pattern: the right side of = is a pattern, as in [[ … ]]."""
    words = words[:-1] if words[-1:] in (["]"], ["]]"]) else words
    # The weaker sign first: a || b && c is a || (b && c).
    for sign, other in (("||", "-o"), ("&&", "-a")):
        at = next((i for i, word in enumerate(words) if i and word in (sign, other)), None)
        if at is not None:
            sides = status(words[:at], is_pattern=is_pattern), status(words[at + 1 :], is_pattern=is_pattern)
            # A true side decides ||, a false one &&, also where the other side is not known.
            decisive = sign == "||"
            return decisive if decisive in sides else None if None in sides else not decisive
    if words[:1] == ["!"]:
        return agrees(status(words[1:], is_pattern=is_pattern), False)
    if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
        return agrees(_is_set(words[-1]), words[0] != "-z" or len(words) == 1)
    return compared(*words, is_pattern=is_pattern) if len(words) == 3 else None


def agrees(known: bool | None, wanted: bool) -> bool | None:
    return None if known is None else known == wanted


def compared(first: str, sign: str, second: str, *, is_pattern: bool = False) -> bool | None:
    """Returns whether a comparison holds."""
    compare = COMPARISONS.get(sign)
    by_text = compare in (operator.eq, operator.ne)
    # A comparison with the empty text asks whether a variable is set, and that is known of one that the script never
    # sets.
    if by_text and "" in (first, second) and "$" in first + second:
        return agrees(_is_set(first or second), compare is operator.ne)
    if not compare or "$" in first + second:
        return None
    # 08 and 8 are equal.
    if all(re.fullmatch(r"\s*-?\d+\s*", side) for side in (first, second)):
        return compare(int(first), int(second))
    same = fnmatchcase(first, second) if is_pattern else first == second
    return same == (compare is operator.eq) if by_text else None


def _is_set(text: str) -> bool | None:
    """Whether a text is not empty. A variable that the script does not set is: the environment has none here."""
    if re.fullmatch(r"\$(\w+|\{\w+\})", text):
        return False
    return None if "$" in text else bool(text)
