"""Calls a reward function and checks its result. Processes of reward functions import this module, and no JAX."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from jaxrl_llm import tasks
from jaxrl_llm.config.names import USER_FUNCTIONS, split_call
from jaxrl_llm.data.image_columns import printable_value
from jaxrl_llm.errors import UserError, describe
from jaxrl_llm.tasks.protocol import MAX_REWARD
from jaxrl_llm.tasks.signatures import bound

__all__: tuple[str, ...] = ()  # no function here is a reward that a config may name

Reward: TypeAlias = Callable[..., Any]
# If a function fails within this time, it is called again on single completions for at most this time.
SEARCH_SECONDS = 1.0


def call_in_time(seconds: float, name: str, text: str, *batch: Any) -> FunctionRewards:
    tasks.set_deadline(seconds)
    return call_reward(name, bound(text), *batch)


def load_function(text: str, code: bytes) -> None:
    """Imports a reward function in its process. code: the pickled function, b"" if its name can be imported."""
    if code:
        USER_FUNCTIONS[split_call(text)[0]] = pickle.loads(code)
    bound(text)


class FlatBatch(NamedTuple):
    """Completions of a batch in one list, each with its data row."""

    rows: list[dict[str, Any]]
    texts: list[str]
    ids: list[list[int]]


class FunctionRewards(NamedTuple):
    """Results of a reward function for a flat list of completions."""

    values: list[float]  # NaN if the function returned None
    metrics: dict[str, float]  # name -> value that the function gave to `log_metric`


def call_reward(
    name: str, function: Reward, rows: list[dict[str, Any]], texts: list[str], ids: list[list[int]]
) -> FunctionRewards:
    """Calls one reward function on a flat list of completions and checks the result."""
    metrics, batch = dict[str, float](), FlatBatch(rows, texts, ids)
    arguments = _arguments(name, function, batch, metrics.__setitem__)
    start, is_slow = time.monotonic(), False
    try:
        returned = function(**arguments)
        if is_slow := inspect.isawaitable(returned):
            returned = _event_loop().run(_await(returned))
        values = _as_list(returned, len(texts))
    except UserError:
        raise
    except Exception as error:
        # A slow function is not called again, because the search could take hours.
        is_slow = is_slow or time.monotonic() - start > SEARCH_SECONDS
        i = None if is_slow else _find_failing_completion(name, function, batch)
        where = _describe_completion(rows[i or 0], texts[i or 0])
        if i is None:
            where = f"a batch of {len(texts)} completions, which starts with {where}"
        raise UserError(f"reward function {name} raised {describe(error)} on {where}") from error
    if not isinstance(values, list) or len(values) != len(texts):
        raise UserError(
            f"reward function {name} returned {_describe_result(returned, values)} for {len(texts)} completions; "
            "it must return a list with one number for each; the first of these completions is "
            f"{_describe_completion(rows[0], texts[0])}"
        )
    numbers = [_checked_number(name, value, row, text) for value, row, text in zip(values, rows, texts, strict=True)]
    return FunctionRewards(numbers, {str(key): float(value) for key, value in metrics.items()})


@cache
def _event_loop() -> asyncio.Runner:
    """Returns one event loop for all batches, because a module's HTTP client is tied to the loop of its first use."""
    return asyncio.Runner()


async def _await(values: Any) -> Any:
    return await values


def _as_list(values: Any, count: int) -> Any:
    """Returns a sequence, an array [N] or an iterator as a list, and any other value unchanged."""
    if hasattr(values, "tolist"):
        # Arrays of NumPy, JAX, PyTorch and pandas have this method.
        return values.tolist()
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set)):
        # An iterator may be endless. One value more than `count` shows that it is too long.
        return list(values if isinstance(values, Sequence) else islice(values, count + 1))
    return values


def _describe_result(returned: Any, values: Any) -> str:
    """Describes the result of a function in a few words."""
    kind = type(returned).__name__
    if len(getattr(returned, "shape", ())) > 1:
        return f"{kind} of shape {tuple(returned.shape)}"
    if isinstance(values, (list, Mapping, Set)):
        return f"{kind} of {len(values)}"
    return repr(returned)[:200]


def _checked_number(name: str, value: Any, row: dict[str, Any], text: str) -> float:
    """Returns a reward as a float, NaN for None (no verdict). Raises: UserError, for any other value."""
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    # The comparison is negated, so that NaN fails it.
    if not abs(number) <= MAX_REWARD:
        raise UserError(
            f"reward function {name} returned {value!r:.200} for {_describe_completion(row, text)}; it must "
            "return a finite number of at most 1e15, or None to abstain"
        )
    return number


def _arguments(name: str, function: Reward, batch: FlatBatch, log_metric: Callable[..., None]) -> dict[str, Any]:
    """Returns the arguments that a reward function names, or all arguments if it takes **kwargs."""
    rows, texts, ids = batch
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    prompts, completions = zip(
        *(_as_trl(row["prompt"], text) for row, text in zip(rows, texts, strict=True)), strict=True
    )
    columns.pop("prompt")
    offered = columns | {"prompts": list(prompts), "completions": list(completions), "completion_ids": ids}
    offered |= {"log_metric": log_metric}
    if isinstance(function, partial):
        # The config sets these arguments, so columns of the same names do not.
        offered = {key: x for key, x in offered.items() if key not in function.keywords}
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        chosen = offered
    else:
        chosen = {key: offered[key] for key in parameters if key in offered}
    for key, parameter in parameters.items():
        variadic = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if not variadic and parameter.default is inspect.Parameter.empty and key not in chosen:
            present = ", ".join(sorted(offered.keys() - {"log_metric"}))
            raise UserError(
                f"reward function {name} needs a column {key!r}, which the data does not have; the columns are "
                f"{present}"
            )
    return chosen


def _as_trl(prompt: Any, text: str) -> tuple[Any, Any]:
    """Returns prompt and completion in TRL's form, in which the start of an answer belongs to the completion."""
    if isinstance(prompt, str):
        return prompt, text
    if prompt[-1]["role"] == "assistant":
        *prompt, prefill = prompt
        text = prefill["content"] + text
    return prompt, [{"role": "assistant", "content": text}]


def _find_failing_completion(name: str, function: Reward, batch: FlatBatch) -> int | None:
    """Returns the index of the first completion on which alone the function raises, None if not found in time."""
    end = time.monotonic() + SEARCH_SECONDS
    for i in range(len(batch.rows)):
        if time.monotonic() > end:
            return None
        try:
            completion = FlatBatch(batch.rows[i : i + 1], batch.texts[i : i + 1], batch.ids[i : i + 1])
            _as_list(function(**_arguments(name, function, completion, lambda *_: None)), 1)
        except Exception:
            return i
    return None


def _describe_completion(row: dict[str, Any], text: str) -> str:
    """Returns the data row and the completion as text that fits one line."""
    fields = {key: value for key, value in row.items() if key != "prompt"} or row["prompt"]
    return f"row {str(printable_value(fields))[:200]}, completion {text[:200]!r}"
