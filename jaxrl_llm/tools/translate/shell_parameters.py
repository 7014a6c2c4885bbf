"""What ${name%pattern} and its relatives make of a value."""

from __future__ import annotations

import re
from fnmatch import translate

CASES = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


def transformed(text: str, rest: str) -> str | None:
    """Returns ${name…} for the text of a name and what is behind it; None: that is not known here.

    rest: %, %%, # and ## with a pattern, ^, ^^, a comma or two, or :offset:length.
    """
    if rest in CASES:
        return CASES[rest](text)
    if match := re.fullmatch(r":\s*(-?\d+)(?::(-?\d+))?", rest):
        return text[int(match[1]) :][: int(match[2]) if match[2] else None]
    if match := re.fullmatch(r"(%%|%|##|#)(.*)", rest, re.DOTALL):
        return _cut(text, match[2], end=match[1][0] == "%", longest=len(match[1]) == 2)
    return None


def replaced(text: str, pattern: str, by: str, *, every: bool) -> str:
    """Returns a text with the first match of a pattern, or every one, replaced: # and % are the ends of the text."""
    if not every and pattern[:1] in ("#", "%"):
        at_end = pattern[0] == "%"
        rest = _cut(text, pattern[1:], end=at_end, longest=True)
        same = rest == text and pattern[1:]
        return text if same else f"{rest}{by}" if at_end else f"{by}{rest}"
    # A function, because in a text re.sub reads backslashes of its own.
    return re.sub(_expression(pattern), lambda _: by, text, count=0 if every else 1) if pattern else text


def _expression(pattern: str) -> str:
    # fnmatch.translate matches a whole text; without its ends the expression is found within one.
    return translate(pattern).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")


def _cut(text: str, pattern: str, *, end: bool, longest: bool) -> str:
    """Cuts the shortest or longest match of a pattern from the beginning or the end."""
    for size in sorted(range(len(text) + 1), reverse=longest):
        cut, rest = (text[len(text) - size :], text[: len(text) - size]) if end else (text[:size], text[size:])
        if re.fullmatch(_expression(pattern), cut, re.DOTALL):
            return rest
    return text
