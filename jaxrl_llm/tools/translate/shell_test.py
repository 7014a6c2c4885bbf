"""What [ … ], [[ … ]] and (( … )) say of texts. A text that is not known has a $, and then the answer is None."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


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
        known = status(words[1:], is_pattern=is_pattern)
        return None if known is None else not known
    if len(words) == 1:
        return _is_set(words[0])
    if len(words) == 2 and words[0] in ("-n", "-z"):
        known = _is_set(words[1])
        return None if known is None else known == (words[0] == "-n")
    if len(words) == 3:
        return compared(words[0], NUMBERS.get(words[1], words[1]), words[2], is_pattern=is_pattern)
    return None


def compared(first: str, sign: str, second: str, *, is_pattern: bool = False) -> bool | None:
    """Returns whether a comparison holds."""
    # A comparison with the empty text asks whether a variable is set, and that is known of one that the script never
    # sets.
    if sign in ("=", "==", "!=") and "" in (first, second):
        known = _is_set(first or second)
        return None if known is None else known == (sign == "!=")
    if "$" in first + second:
        return None
    if sign in ("=", "==", "!="):
        same = fnmatchcase(first, second) if is_pattern else first == second
        # -eq has become == here, so 08 and 8 are equal.
        if _whole(first) and _whole(second):
            same = int(first) == int(second)
        return same == (sign != "!=")
    if sign in ("<", "<=", ">", ">=") and _whole(first) and _whole(second):
        low, high = (int(first), int(second)) if sign[0] == "<" else (int(second), int(first))
        return low <= high if sign.endswith("=") else low < high
    return None


def _whole(text: str) -> bool:
    return re.fullmatch(r"\s*-?\d+\s*", text) is not None


def _is_set(text: str) -> bool | None:
    """Whether a text is not empty. A variable that the script does not set is: the environment has none here."""
    if re.fullmatch(r"\$(\w+|\{\w+\})", text):
        return False
    return None if "$" in text else bool(text)
