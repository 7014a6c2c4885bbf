"""Text of models and data for a terminal: no character of it may move the cursor or reach the clipboard."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Returns the text with escapes such as \\x1b for all characters that cannot be seen, but newlines and tabs."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
