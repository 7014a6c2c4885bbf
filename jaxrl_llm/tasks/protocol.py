"""Interface of an environment, with which the policy interacts in an episode of several turns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jaxrl_llm.errors import printable

__all__: tuple[str, ...] = ()  # a config may name no function of this file


# Advantages square rewards in float32, whose largest number is 3e38. Larger rewards would overflow it.
MAX_REWARD = 1e15
COLUMN = "environment"  # column of a row that names one of several environments
FINAL_SCORE = "final_score"  # metric of an episode: its last `Reply.score`


@dataclass(frozen=True)
class Reply:
    """Answer of an environment to a turn of the policy."""

    # Text after the turn, "" for none; or the results of the turn's tool calls, for which the chat template makes
    # messages of the role "tool".
    observation: str | tuple[str, ...] = ""
    done: bool = False  # whether the episode ends with this turn
    metrics: dict[str, float] = field(default_factory=dict)  # metrics, which are summed over the turns of an episode
    reward: float | None = None  # reward of the turn; None if the environment does not judge it
    # Score of the episode after the turn, which starts at 0. Its change is a reward of the turn. None: no change.
    score: float | None = None


class OwnError(Exception):
    """Error that a tool raises if the policy's own program or call is wrong; episode/own_errors counts such errors."""


class ServerError(Exception):
    """Failure of a server that an environment uses. `metric` is the name under which it is counted."""

    def __init__(self, metric: str, reason: str):
        super().__init__(printable(reason[:300]))
        self.metric = metric


class Environment(Protocol):
    """Environment of one episode. A config names its class, and sets the arguments of its constructor.

    A class may have three more members, which `rollout.environments` looks for:
    `schemas`, the JSON schemas of its tools, for the chat template;
    `prepare_row(row) -> row`, which adds a text to the prompt of a row or a column with tools, when rows are loaded;
    `finish() -> metrics`, which is called once after an episode, also after one that a limit has cut.
    """

    stops: tuple[str, ...]  # strings that end a turn, in addition to the model's stop tokens

    def reset(self, row: dict[str, Any]) -> None:
        """Starts the episode of a data row. row: all columns of the row."""
        ...

    def step(self, text: str) -> Reply:
        """Answers a turn. text: text of the policy in this turn, without special tokens."""
        ...


def checked(reply: Any) -> Reply:
    """Returns the reply of a `step`. Raises: TypeError, ValueError, unless it is a Reply with text and numbers."""
    if not isinstance(reply, Reply):
        raise TypeError(f"step returned {type(reply).__name__}, but must return a Reply")
    texts = [reply.observation] if isinstance(reply.observation, str) else reply.observation
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise TypeError("the observation must be text or a tuple of texts")
    reward, score = (None if x is None else float(x) for x in (reply.reward, reply.score))
    if not all(abs(x) <= MAX_REWARD for x in (reward or 0.0, score or 0.0)):
        raise ValueError(f"reward {reward} and score {score} of a turn must be finite, at most {MAX_REWARD:g}")
    if FINAL_SCORE in reply.metrics:
        raise ValueError(f"the metric {FINAL_SCORE!r} holds Reply.score: give the metric another name")
    metrics = {name: float(value) for name, value in reply.metrics.items()}
    return replace(reply, metrics=metrics, reward=reward, score=score)
