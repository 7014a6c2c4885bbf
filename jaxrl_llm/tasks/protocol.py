"""The interface of an environment, to which the policy talks in an episode of several turns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

__all__: tuple[str, ...] = ()  # nothing here is for a config to name


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a turn of the policy."""

    # Text that follows the turn; "": nothing, and the policy goes on. Or the results of the turn's calls of tools, for
    # which the chat template makes messages of the role "tool".
    observation: str | tuple[str, ...] = ""
    done: bool = False  # True: the episode ends here
    metrics: dict[str, float] = field(default_factory=dict)  # summed over the turns of an episode


class OwnError(Exception):
    """A tool raises it if the policy's own program or call is wrong. episode/own_errors counts it."""


class Environment(Protocol):
    """The environment of one episode. A config names its class, and gives the arguments of its constructor."""

    stops: tuple[str, ...]  # strings that end a turn, beside the model's stop tokens

    def reset(self, row: dict[str, Any]) -> None:
        """Begins the episode of a data row, with all its columns."""
        ...

    def step(self, text: str) -> Reply:
        """Answers a turn. text: the policy's text of this turn, without special tokens."""
        ...


def checked(reply: Any) -> Reply:
    """Returns what a `step` returned. Raises: TypeError, ValueError, if it is no reply with text and numbers."""
    if not isinstance(reply, Reply):
        raise TypeError(f"step returned {type(reply).__name__}, not a Reply")
    texts = [reply.observation] if isinstance(reply.observation, str) else reply.observation
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise TypeError("the observation is neither text nor a tuple of texts")
    return replace(reply, metrics={name: float(value) for name, value in reply.metrics.items()})
