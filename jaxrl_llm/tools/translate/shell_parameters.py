"""What ${name%pattern} and its relatives make of a value."""

from __future__ import annotations

import re
from fnmatch import translate

# The text behind a name is the sign of an operation and its argument.
OPERATION = re.compile(r"(:?[-=+?]|//|/|%%|%|##|#|\^\^|\^|,,|,|:)(.*)", re.DOTALL)
CASES = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


def transformed(text: str, sign: str, pattern: str, by: str = "") -> str | None:
    """Returns what an operation makes of a text; None: that is not known here.

    sign: %, %%, # and ## with a pattern, / and // with a pattern and what comes instead, ^, ^^, a comma or two, or a
    colon with offset:length.
    """
    if sign in CASES:
        return None if pattern else CASES[sign](text)
    if sign == ":":
        match = re.fullmatch(r"\s*(-?\d+)(?::(-?\d+))?", pattern)
        return text[int(match[1]) :][: int(match[2]) if match[2] else None] if match else None
    if sign in ("//", "/") and (sign == "//" or pattern[:1] not in ("#", "%")):
        # A function, because in a text re.sub reads backslashes of its own.
        return re.sub(_expression(pattern), lambda _: by, text, count=len(sign) % 2) if pattern else text
    # A # or % before the pattern of / is the end of the text at which the pattern must match.
    end, pattern = (pattern[0], pattern[1:]) if sign == "/" else (sign[0], pattern)
    rest = _cut(text, pattern, end=end == "%", longest=sign not in ("#", "%"))
    if rest is None:
        return text
    return f"{rest}{by}" if end == "%" else f"{by}{rest}"


def _expression(pattern: str) -> str:
    # fnmatch.translate matches a whole text; without its ends the expression is found within one.
    return translate(pattern).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")


def _cut(text: str, pattern: str, *, end: bool, longest: bool) -> str | None:
    """Cuts the shortest or longest match of a pattern from the beginning or the end; None: there is no match."""
    for size in sorted(range(len(text) + 1), reverse=longest):
        cut, rest = (text[len(text) - size :], text[: len(text) - size]) if end else (text[:size], text[size:])
        if re.fullmatch(_expression(pattern), cut, re.DOTALL):
            return rest
    return None
