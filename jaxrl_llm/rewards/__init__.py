"""Rewards: plain Python functions with TRL's signature, `fn(prompts, completions, **columns)`.

Each argument has one entry per completion: the prompt (chat or text, as in the data), the completion (for a chat, a
list with one assistant message), every other column of the row, and `completion_ids`. The function returns one number
per completion (a list, an array, a generator), or None for a completion to abstain. It may be `async def`.
With an environment, there are two more: `turns`, the episode as messages, and `episode`, what was measured.
docs/rewards.md describes where functions run, and which answers `math.accuracy` accepts.
"""

from __future__ import annotations

from typing import Any

__all__ = ()  # no function here is a reward that a config may name


def text_of(completion: Any) -> str:
    """Returns the text of a completion, which for a chat is a list with one assistant message."""
    return completion if isinstance(completion, str) else completion[0]["content"]
