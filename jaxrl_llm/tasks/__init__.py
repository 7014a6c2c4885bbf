"""Tasks: one file each for rows, rewards and the environment, and files for what many tasks share.

A config names the functions of these files as "file.function". The arguments of a function tell its kind:

| kind | form |
|---|---|
| source | `train() -> rows`: a row is a dict with "prompt", a chat or raw text, and the columns that rewards need |
| converter | `convert(row) -> row`, for the rows of a file; None drops the row |
| reward | `fn(prompts, completions, **columns)`, TRL's signature |
| environment | a class with `reset(row)` and `step(text)` (`protocol.py`) |
| tool | a function that a policy may call, whose docstring explains its arguments under `Args:` |

A config sets keyword-only arguments of a source or a reward by a call: `"gym.rows(make='my_game.make', size=100)"`.
Each argument of a reward has one entry per completion: the prompt (chat or text, as in the data), the completion (for
a chat, a list with one assistant message), every other column of the row, and `completion_ids`. The function returns
one number per completion (a list, an array, a generator), or None for a completion to abstain. It may be `async def`.
A reward of this package abstains where a column that it needs is empty (`is_empty`), as happens in mixtures of sources.
Runs with an environment have three more arguments: `turns`, the episode as messages; `episode`, its metrics; and
`loss_mask`, which says which of the `completion_ids` the policy sampled.
docs/rewards.md describes where functions run, and which answers `math.accuracy` accepts.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import compress
from math import inf, isnan
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm.config.names import Kind, keyword_only, marked

F = TypeVar("F", bound=Callable[..., Any])
__all__ = ()  # a config may name no function of this file


def _parameters(function: Any) -> list[str] | None:
    """Returns the names of a function's arguments; None if the value is no function."""
    return list(inspect.signature(function).parameters) if inspect.isfunction(function) else None


def owns_loop(kind: Any) -> bool:
    """Returns whether a class that a section `env` names stands for agents (`tasks.agents`)."""
    return getattr(kind, "owns_loop", False)


# Each kind: the package in which names without a module are looked up, and a test of what a function of the kind is.
HERE = sys.modules[__name__]
SOURCES = Kind(HERE, lambda function: _parameters(function) == [*keyword_only(function)])
CONVERTERS = Kind(HERE, lambda function: _parameters(function) == ["row"])
REWARDS = Kind(HERE, lambda function: bool({"completions", "completion_ids"} & set(_parameters(function) or ())))
ENVIRONMENTS = Kind(
    HERE, lambda kind: inspect.isclass(kind) and ((hasattr(kind, "reset") and hasattr(kind, "step")) or owns_loop(kind))
)
TOOLS = Kind(HERE, lambda function: inspect.isfunction(function) and "Args:" in (function.__doc__ or ""))
ANSWERS = Kind(HERE, lambda function: _parameters(function) == ["text"])  # functions that find an answer in a text

_deadline = inf
MARGIN = 0.1  # share of a batch's time limit that is left for other work than waiting


def deadline() -> float:
    """Returns the time.monotonic() by which a waiting reward function should have judged its batch; inf = no limit."""
    return _deadline


def set_deadline(seconds: float) -> None:
    """Starts the time of a batch. seconds: its limit, config.reward.timeout; 0 = no limit."""
    global _deadline
    # The deadline is before the limit, so that a waiting function can still return its results.
    _deadline = time.monotonic() + (1 - MARGIN) * seconds if seconds else inf


def unlogged(name: str, value: float) -> None:
    """Ignores a metric; the default of `log_metric` for rewards that are called without it."""


# Column with the text that ends a prompt and begins the answer: a thought that the chat template opens.
PREFILL = "assistant_prefill"


def text_of(completion: Any) -> str:
    """Returns the text of a completion: text, or for a chat a list with one assistant message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def answer_texts(completions: list[Any], columns: Mapping[str, Any]) -> list[str]:
    """Returns the texts of completions, each after the begin of the answer in its prompt, such as <think>."""
    prefills = columns.get(PREFILL) or [""] * len(completions)
    return [(prefill or "") + text_of(completion) for prefill, completion in zip(prefills, completions, strict=True)]


def is_empty(value: Any) -> bool:
    """Returns whether a value of a column is empty: None, NaN, blank text, or an empty list or object."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, (float, np.floating, Decimal)):
        # A signaling NaN of Decimal raises an error in comparisons.
        return value.is_nan() if isinstance(value, Decimal) else isnan(value)
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


def reads(**readers: Callable[[Any], Any]) -> Callable[[F], F]:
    """Returns a decorator for a reward that reads columns of a row with `readers`, {column: function}.

    A reader raises ValueError for a wrong value; `data.columns.check` calls it for all rows before a run starts.
    """
    return marked(reads=readers)


def asks(columns: Callable[..., dict[str, Callable[[Any], Any] | None]]) -> Callable[[F], F]:
    """Returns a decorator for a reward whose arguments in a config decide which columns of a row it needs.

    columns: function of these arguments that returns {column: its reader, as for `reads`}; a reader of None means that
    the reward accepts any value, also None.
    """
    return marked(asks=columns)


def abstaining(judge: Callable[..., list[float]], completions: list[Any], *columns: list[Any]) -> list[float | None]:
    """Returns judge(completions, *columns) for the rows without an empty column, and None for all other rows."""
    rows = [i for i, values in enumerate(zip(*columns, strict=True)) if not any(map(is_empty, values))]
    scores = judge(*([column[i] for i in rows] for column in (completions, *columns))) if rows else []
    score_of_row = dict(zip(rows, scores, strict=True))
    return [score_of_row.get(i) for i in range(len(completions))]


def each_judged(judge: Callable[..., float], completions: list[Any], *columns: list[Any]) -> list[float | None]:
    """Returns judge(text, *values) for each completion without an empty column, and None for all others."""

    def judge_all(*columns: list[Any]) -> list[float]:
        return [float(judge(*row)) for row in zip(*columns, strict=True)]

    return abstaining(judge_all, [text_of(completion) for completion in completions], *columns)


def policy_texts(turns: list[dict[str, str]]) -> list[str]:
    """Returns the texts of the policy in an episode, one per turn."""
    return [turn["content"] for turn in turns if turn["role"] == "assistant"]


def sampled(completion_ids: list[list[int]], loss_mask: list[list[bool]] | None) -> list[list[int]]:
    """Returns the tokens that the policy sampled. loss_mask: None if the run has no environment."""
    if loss_mask is None:
        return completion_ids
    return [list(compress(ids, mask)) for ids, mask in zip(completion_ids, loss_mask, strict=True)]


def last_tagged(text: str, tag: str) -> str | None:
    """Returns the content of the last <tag> that </tag> closes; None if there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    # The search runs from the end, because earlier pairs of tags, for example in a thought, do not count.
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.find(closing, start)]
