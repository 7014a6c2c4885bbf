"""What the banner says about prompts: chats in the form of text, text that is no chat, and answers that they begin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from jaxrl_llm.data.formats import Row
from jaxrl_llm.tasks import PREFILL

CALL = "data.format_prompt = '{{ content }}' makes it the message of a user"


def notes_of(rows: Sequence[Row], numbers: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    """Returns one line for each way in which prompts may be other than they were meant.

    numbers: numbers of the rows in their source.
    """
    prompts = [row["prompt"] for row in rows]
    marks = _mark_finder(tokenizer)
    json_chats = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) and _holds_messages(prompt)]
    plain = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) and not marks(prompt)]
    formatted = [
        i
        for i, prompt in enumerate(prompts)
        if not isinstance(prompt, str) and any(marks(str(message.get("content") or "")) for message in prompt)
    ]
    notes = [
        _note(json_chats, numbers, "the JSON text of messages, which the model gets as text: data.convert can read it"),
        _note(formatted, numbers, "chats with special tokens in a message: the chat template formats them once more"),
    ]
    if tokenizer.chat_template and not json_chats:
        notes.append(_note(plain, numbers, f"plain text, which the chat template does not format: {CALL}"))
    begun = {row[PREFILL]: None for row in rows if PREFILL in row}
    if begun:
        ends = " or ".join(map(repr, begun))
        notes.append(
            f"prompts end with {ends}, which rewards of the package read, and other rewards get as {PREFILL!r}"
        )
    return tuple(filter(None, notes))


def _note(places: Sequence[int], numbers: Sequence[int], what: str) -> str:
    share = f"{len(places):,} of {len(numbers):,} prompts, from row" if places else ""
    return f"{share} {numbers[places[0]]:,} on, are {what}" if places else ""


def _mark_finder(tokenizer: Any) -> Callable[[str], bool]:
    """Returns whether a text holds a special token other than the one with which a text begins."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special -= {tokenizer.bos_token, tokenizer.unk_token, None}
    firsts = {text[0] for text in special if text}
    pattern = re.compile("|".join(map(re.escape, filter(None, special))) or "(?!)")
    # Most texts have no such letter, and a vocabulary may have hundreds of special tokens.
    return lambda text: any(first in text for first in firsts) and bool(pattern.search(text))


def _holds_messages(text: str) -> bool:
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return False
    with suppress(ValueError, RecursionError):
        messages = json.loads(text)
        return all(isinstance(message, dict) and "role" in message for message in messages)
    return False
