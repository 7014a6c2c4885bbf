"""Texts with which environments begin their episodes, at the end of prompts."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.errors import UserError

__all__: tuple[str, ...] = ()  # a config may name no function of this file
TEXT_COLUMN = "environment_text"  # column with the text at the end of a prompt; None without a text


def append_text(row: dict[str, Any], text: Any) -> dict[str, Any]:
    """Returns a row whose last message ends with the text of a reset, None for no text.

    Raises: UserError, if the prompt is text; TypeError, if `text` is none.
    """
    if isinstance(row["prompt"], str):
        raise UserError(
            "config.env: the environment has tools and needs prompts that are lists of messages, but a prompt is text: "
            "set data.convert, or use a chat"
        )
    if text is None:
        return row | {TEXT_COLUMN: None}
    if not isinstance(text, str):
        raise TypeError(f"reset returned {type(text).__name__}, but must return text or None")
    *earlier, last = row["prompt"]
    added = text if isinstance(last["content"], str) else [{"type": "text", "text": text}]
    return row | {TEXT_COLUMN: text, "prompt": [*earlier, last | {"content": last["content"] + added}]}


def prompt_without_text(row: dict[str, Any]) -> Any:
    """Returns the prompt of a row as its source has it."""
    if (text := row.get(TEXT_COLUMN)) is None:
        return row["prompt"]
    *earlier, last = row["prompt"]
    content = last["content"]
    content = content.removesuffix(text) if isinstance(content, str) else content[:-1]
    return [*earlier, last | {"content": content}]
