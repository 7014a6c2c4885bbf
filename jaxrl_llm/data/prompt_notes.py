"""Notes in the banner on prompts whose form may be unintended: chats stored as text, text without a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from jaxrl_llm.data.formats import Row
from jaxrl_llm.tasks import PREFILL

FORMAT_HINT = "data.format_prompt = '{{ content }}' makes each text the message of a user"


def notes_of(rows: Sequence[Row], numbers: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    """Returns one line for each way in which prompts may have an unintended form.

    numbers: number of each row in its source, from 1.
    """
    prompts = [row["prompt"] for row in rows]
    has_special_token = _special_token_finder(tokenizer)
    json_chats = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) and _holds_messages(prompt)]
    plain = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) and not has_special_token(prompt)]
    formatted = [
        i
        for i, prompt in enumerate(prompts)
        if not isinstance(prompt, str) and any(has_special_token(str(one.get("content") or "")) for one in prompt)
    ]
    notes = [
        _note(json_chats, numbers, "messages as JSON text, which the model reads as plain text; set data.convert"),
        _note(formatted, numbers, "chats whose messages have special tokens, although the chat template adds its own"),
    ]
    if tokenizer.chat_template and not json_chats:
        notes.append(_note(plain, numbers, f"plain text, which the chat template does not format; {FORMAT_HINT}"))
    prefills = {row[PREFILL]: None for row in rows if PREFILL in row}
    if prefills:
        listed = " or ".join(map(repr, prefills))
        notes.append(
            f"prompts end with {listed}; rewards of the package count this text as part of the answer, and your own "
            f"rewards get it as {PREFILL!r}"
        )
    return tuple(filter(None, notes))


def _note(indices: Sequence[int], numbers: Sequence[int], description: str) -> str:
    """Returns a note on the prompts at `indices`, with their count and the first row; "" if the list is empty."""
    if not indices:
        return ""
    return f"{len(indices):,} of {len(numbers):,} prompts (first: row {numbers[indices[0]]:,}) are {description}"


def _special_token_finder(tokenizer: Any) -> Callable[[str], bool]:
    """Returns a function that says whether a text holds a special token other than the begin token."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special -= {tokenizer.bos_token, tokenizer.unk_token, None}
    first_letters = {text[0] for text in special if text}
    pattern = re.compile("|".join(map(re.escape, filter(None, special))) or "(?!)")
    # First letters are searched before tokens, because most texts have none, and a vocabulary has hundreds of tokens.
    return lambda text: any(letter in text for letter in first_letters) and bool(pattern.search(text))


def _holds_messages(text: str) -> bool:
    """Returns whether a text is the JSON of a list of messages."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return False
    with suppress(ValueError, RecursionError):
        messages = json.loads(text)
        return all(isinstance(message, dict) and "role" in message for message in messages)
    return False
