"""Rewards: plain Python functions with TRL's signature, `fn(prompts, completions, **columns)`.

A function sees one entry a completion: the prompt (chat or text, as in the data), the
completion (for a chat, a list with one assistant message), every other column of the
row, and `completion_ids`. It returns as many numbers; None where it has nothing to say.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxrl_llm.errors import UserError, describe

Reward: TypeAlias = Callable[..., Sequence[float | None]]
Score: TypeAlias = Callable[[list[dict[str, Any]], list[list[str]], list[list[list[int]]]], dict[str, np.ndarray]]


def make_score(functions: dict[str, Reward], weights: Sequence[float]) -> Score:
    """`score(rows, texts, ids)` -> named channels [B, G] and their weighted sum "total" [B, G].

    rows: B data rows; texts and ids: B x G completions. Where a function said None its
    channel is NaN and adds nothing. Raises: UserError, naming the function, the row and the completion.
    """

    def score(rows: list[dict[str, Any]], texts: list[list[str]], ids: list[list[list[int]]]) -> dict[str, np.ndarray]:
        shape = (len(rows), len(texts[0]))
        flat_rows = [row for row, group in zip(rows, texts, strict=True) for _ in group]
        flat_texts = [text for group in texts for text in group]
        flat_ids = [tokens for group in ids for tokens in group]
        channels = {
            name: np.asarray(call(name, function, flat_rows, flat_texts, flat_ids), np.float32).reshape(shape)
            for name, function in functions.items()
        }
        weighted = [w * np.nan_to_num(c) for w, c in zip(weights, channels.values(), strict=True)]
        return channels | {"total": np.asarray(np.sum(weighted, axis=0), np.float32)}

    return score


def call(
    name: str, function: Reward, rows: list[dict[str, Any]], texts: list[str], ids: list[list[int]]
) -> list[float]:
    """One reward function over a flat list of completions, its answer checked; None becomes NaN."""
    try:
        values = function(**_arguments(name, function, rows, texts, ids))
    except UserError:
        raise
    except Exception as error:
        i = _culprit(name, function, rows, texts, ids)
        raise UserError(f"reward {name} raised {describe(error)} on {_show(rows[i], texts[i])}") from error
    if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != len(texts):
        got = f"{type(values).__name__} of {len(values)}" if hasattr(values, "__len__") else repr(values)
        raise UserError(
            f"reward {name} returned {got} for {len(texts)} completions: return a list with one number each, "
            f"the first of them for {_show(rows[0], texts[0])}"
        )
    return [_number(name, value, row, text) for value, row, text in zip(values, rows, texts, strict=True)]


def _number(name: str, value: Any, row: dict[str, Any], text: str) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"reward {name} returned {value!r} for {_show(row, text)}: return a finite number, or None to abstain"
        )
    return number


def _arguments(
    name: str, function: Reward, rows: list[dict[str, Any]], texts: list[str], ids: list[list[int]]
) -> dict[str, Any]:
    """What the function asks for by name, or everything if it takes **kwargs."""
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    prompts, said = zip(*(_said(row["prompt"], text) for row, text in zip(rows, texts, strict=True)), strict=True)
    columns.pop("prompt")
    offered = columns | {"prompts": list(prompts), "completions": list(said), "completion_ids": ids}
    wanted = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in wanted.values()):
        chosen = offered
    else:
        chosen = {key: offered[key] for key in wanted if key in offered}
    for key, parameter in wanted.items():
        variadic = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if not variadic and parameter.default is inspect.Parameter.empty and key not in chosen:
            there = ", ".join(sorted(offered))
            raise UserError(f"reward {name} asks for column {key!r}, which the data does not have; there is {there}")
    return chosen


def _said(prompt: Any, text: str) -> tuple[Any, Any]:
    """Prompt and completion as TRL gives them: an answer that the prompt began is part of the completion."""
    if isinstance(prompt, str):
        return prompt, text
    if prompt[-1]["role"] == "assistant":
        *prompt, begun = prompt
        text = begun["content"] + text
    return prompt, [{"role": "assistant", "content": text}]


def _culprit(name: str, function: Reward, rows: list[dict[str, Any]], texts: list[str], ids: list[list[int]]) -> int:
    """Index of the first completion that makes the function raise by itself; 0 if none does."""
    for i in range(len(rows)):
        try:
            function(**_arguments(name, function, rows[i : i + 1], texts[i : i + 1], ids[i : i + 1]))
        except Exception:
            return i
    return 0


def _show(row: dict[str, Any], text: str) -> str:
    """The row and the completion, short enough for one line."""
    shown = {key: value for key, value in row.items() if key != "prompt"} or row["prompt"]
    return f"row {str(shown)[:200]}, completion {text[:200]!r}"
