"""What ${name%pattern} and its relatives make of a value."""

from __future__ import annotations

import re
from fnmatch import translate


def transformed(text: str, rest: str) -> str | None:
    """Returns ${name…} for the text of a name and what is behind it; None: that is not known here.

    rest: %, %%, # and ## with a pattern, ^, ^^, a comma or two, or :offset:length.
    """
    if rest in ("^^", ",,"):
        return text.upper() if rest == "^^" else text.lower()
    if rest in ("^", ","):
        return (text[:1].upper() if rest == "^" else text[:1].lower()) + text[1:]
    if match := re.fullmatch(r":\s*(-?\d+)(?::(-?\d+))?", rest):
        start = int(match[1]) if int(match[1]) >= 0 else max(len(text) + int(match[1]), 0)
        if match[2] is None:
            return text[start:]
        return text[start : start + int(match[2])] if int(match[2]) >= 0 else text[start : int(match[2])]
    if rest[0] in "%#":
        greedy = rest[:2] in ("%%", "##")
        return _cut(text, rest[1 + greedy :], end=rest[0] == "%", longest=greedy)
    return None


def replaced(text: str, pattern: str, by: str, *, every: bool) -> str:
    """Returns a text with the first match of a pattern, or every one, replaced: # and % are the ends of the text."""
    if not pattern:
        return text
    if not every and pattern[0] in "#%":
        rest = _cut(text, pattern[1:], end=pattern[0] == "%", longest=True)
        same = rest == text and pattern[1:]
        return text if same else f"{by}{rest}" if pattern[0] == "#" else f"{rest}{by}"
    # A function, because in a text re.sub reads backslashes of its own.
    return re.sub(_expression(pattern), lambda _: by, text, count=0 if every else 1)


def _expression(pattern: str) -> str:
    # fnmatch.translate matches a whole text; without its ends the expression is found within one.
    return translate(pattern).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")


def _cut(text: str, pattern: str, *, end: bool, longest: bool) -> str:
    """Cuts the shortest or longest match of a pattern from the beginning or the end."""
    sizes = range(len(text), -1, -1) if longest else range(len(text) + 1)
    for size in sizes:
        part = text[len(text) - size :] if end else text[:size]
        if re.fullmatch(_expression(pattern), part, re.DOTALL):
            return text[: len(text) - size] if end else text[size:]
    return text
