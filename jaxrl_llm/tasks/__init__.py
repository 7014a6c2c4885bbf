"""Tasks: one file each for rows, rewards and the environment, and files for what many tasks share.

A config names what is in these files as "file.function". What a function takes tells what it is:

| kind | is |
|---|---|
| source | `train() -> rows`: a row is a dict with "prompt", a chat or raw text, and the columns that rewards ask for |
| converter | `convert(row) -> row`, for the rows of a file; None drops the row |
| reward | `fn(prompts, completions, **columns)`, TRL's signature |
| environment | a class with `reset(row)` and `step(text)` (`protocol.py`) |
| tool | a function that a policy may call: `Args:` in its docstring explains its arguments |

Each argument of a reward has one entry per completion: the prompt (chat or text, as in the data), the completion (for
a chat, a list with one assistant message), every other column of the row, and `completion_ids`. The function returns
one number per completion (a list, an array, a generator), or None for a completion to abstain. It may be `async def`.
A reward of this package abstains where the row has nothing in a column that the reward needs (`is_empty`), as in a
mixture of sources.
With an environment, there are three more: `turns`, the episode as messages, `episode`, what was measured, and
`loss_mask`, which of the `completion_ids` the policy sampled.
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

from jaxrl_llm.config.names import Kind, marked

F = TypeVar("F", bound=Callable[..., Any])
__all__ = ()  # no function here is one that a config may name


def _parameters(function: Any) -> list[str] | None:
    return list(inspect.signature(function).parameters) if inspect.isfunction(function) else None


HERE = sys.modules[__name__]
SOURCES = Kind(HERE, lambda function: _parameters(function) == [])
CONVERTERS = Kind(HERE, lambda function: _parameters(function) == ["row"])
REWARDS = Kind(HERE, lambda function: bool({"completions", "completion_ids"} & set(_parameters(function) or ())))
ENVIRONMENTS = Kind(HERE, lambda kind: inspect.isclass(kind) and hasattr(kind, "reset") and hasattr(kind, "step"))
TOOLS = Kind(HERE, lambda function: inspect.isfunction(function) and "Args:" in (function.__doc__ or ""))
ANSWERS = Kind(HERE, lambda function: _parameters(function) == ["text"])  # find the answer in a completion

_deadline = inf
MARGIN = 0.1  # of the time limit of a batch: what a function needs beside its judging


def deadline() -> float:
    """Returns the time.monotonic() by which a function that waits should have judged its batch; inf: no limit."""
    return _deadline


def set_deadline(seconds: float) -> None:
    """Begins the time of a batch. seconds: its limit, config.reward.timeout; 0: none."""
    global _deadline
    # Earlier than the limit: a function that waits can then still return what it has.
    _deadline = time.monotonic() + (1 - MARGIN) * seconds if seconds else inf


def unlogged(name: str, value: float) -> None:
    """Stands for `log_metric` where a reward is called without it."""


# Column of rows whose prompt already begins the answer: the thought that a chat template opens, or opens and closes.
PREFILL = "assistant_prefill"


def text_of(completion: Any) -> str:
    """Returns the text of a completion, which for a chat is a list with one assistant message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def answer_texts(completions: list[Any], columns: Mapping[str, Any]) -> list[str]:
    """Returns the texts of completions behind what their prompts already say of the answer, such as <think>."""
    begun = columns.get(PREFILL) or [""] * len(completions)
    return [(start or "") + text_of(completion) for start, completion in zip(begun, completions, strict=True)]


def is_empty(value: Any) -> bool:
    """Whether a value of a column says nothing: None, NaN, blank text, or an empty list or object."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, (float, np.floating, Decimal)):
        # A number of Decimal may be a NaN that no comparison takes.
        return value.is_nan() if isinstance(value, Decimal) else isnan(value)
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


def reads(**readers: Callable[[Any], Any]) -> Callable[[F], F]:
    """Returns a decorator for a reward that reads columns of a row with these functions, which raise a ValueError.

    `data.columns.check` calls them for all rows, before a run begins.
    """
    return marked(reads=readers)


def asks(columns: Callable[..., dict[str, Callable[[Any], Any] | None]]) -> Callable[[F], F]:
    """Returns a decorator for a reward that takes columns(**its arguments) of the data from its `**columns`.

    columns: {name: function that reads the column, as for `reads`}. A function of None reads nothing, and the reward
    shows the row's value, also None.
    """
    return marked(asks=columns)


def abstaining(judge: Callable[..., list[float]], completions: list[Any], *columns: list[Any]) -> list[float | None]:
    """Returns judge(completions, *columns) of the rows with a value in each column, and None for the others."""
    rows = [i for i, values in enumerate(zip(*columns, strict=True)) if not any(map(is_empty, values))]
    scores = judge(*([column[i] for i in rows] for column in (completions, *columns))) if rows else []
    known = dict(zip(rows, scores, strict=True))
    return [known.get(i) for i in range(len(completions))]


def each_judged(judge: Callable[..., float], completions: list[Any], *columns: list[Any]) -> list[float | None]:
    """Returns judge(text, *values) of each completion with a value in each column, and None for the others."""

    def judge_all(*columns: list[Any]) -> list[float]:
        return [float(judge(*row)) for row in zip(*columns, strict=True)]

    return abstaining(judge_all, [text_of(completion) for completion in completions], *columns)


def policy_texts(turns: list[dict[str, str]]) -> list[str]:
    """Returns what the policy says in an episode, turn by turn."""
    return [turn["content"] for turn in turns if turn["role"] == "assistant"]


def sampled(completion_ids: list[list[int]], loss_mask: list[list[bool]] | None) -> list[list[int]]:
    """Returns the tokens that the policy sampled, without those of an environment. loss_mask: None without one."""
    if loss_mask is None:
        return completion_ids
    return [list(compress(ids, mask)) for ids, mask in zip(completion_ids, loss_mask, strict=True)]


def last_tagged(text: str, tag: str) -> str | None:
    """Returns the content of the last <tag> that </tag> closes; None if there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    # The search runs from the end, because an earlier pair, such as one in a thought, does not count.
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.find(closing, start)]
