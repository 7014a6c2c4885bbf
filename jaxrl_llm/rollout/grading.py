"""Calls a config's reward functions in separate processes with a time limit, and checks what they return."""

from __future__ import annotations

import asyncio
import inspect
import io
import marshal
import math
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import islice
from types import CodeType, MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

import cloudpickle
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.config.names import USER_FUNCTIONS, resolve, split_call
from jaxrl_llm.data.image_columns import printable_value
from jaxrl_llm.errors import UserError, briefly, describe
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.process import Process
from jaxrl_llm.structs import Rewards
from jaxrl_llm.tasks.signatures import bound

__all__: tuple[str, ...] = ()  # no function here is a reward that a config may name

Reward: TypeAlias = Callable[..., Any]
COPIED = cloudpickle.Pickler.dispatch_table
# Seconds: a function that fails within this time is called again for single completions, for this long.
SEARCH = 1.0
TIMEOUT = "config.reward.timeout"
# Advantages take squares of rewards in float32, whose largest number is 3e38: a square of 1e20 would make them all 0.
LARGEST = 1e15


class Completions(NamedTuple):
    """What reward functions judge: B data rows, and B x G completions of their prompts."""

    rows: list[dict[str, Any]]
    texts: list[list[str]]
    ids: list[list[list[int]]]
    columns: Mapping[str, list[list[Any]]] = MappingProxyType({})  # more of them, B x G each, such as `turns`


class Graded(NamedTuple):
    """Completions as text, and what they earn."""

    texts: list[list[str]]  # B x G
    rewards: Rewards
    turns: list[list[list[dict[str, str]]]]  # B x G, of episodes of several turns; []: these are none
    metrics: dict[str, float]  # what functions measured with `log_metric`: "function/name"


class RewardFn:
    """`reward_fn(rows, texts, ids)` -> what the completions earn.

    rows: B data rows; texts and ids: B x G completions. functions: their names, with arguments where they have some.
    Where a function returns None, its channel is NaN and adds 0 to the total. If no function with a weight returns a
    number, the total is NaN too.
    Raises: UserError, naming the function, and the row and completion if one of them causes the error.

    With a time limit, each function has its own process (see `Process`). So the limit holds whatever the function
    does, and all functions run at the same time. After an error, the RewardFn is closed.
    """

    def __init__(self, functions: Sequence[str], weights: Sequence[float], timeout: float, field: str = TIMEOUT):
        """timeout: seconds for one batch of one function, which `field` sets; 0: no limit and no process."""
        self._functions = {split_call(text)[0]: text for text in functions}
        self._weights, self._timeout, self._field = weights, timeout, field
        sent = {name: _code(name) for name in self._functions if timeout}
        self._processes = {name: Process(_prepare, self._functions[name], code) for name, code in sent.items()}
        self._starting = set(self._processes)
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __call__(
        self,
        rows: list[dict[str, Any]],
        texts: list[list[str]],
        ids: list[list[list[int]]],
        columns: Mapping[str, list[list[Any]]] = MappingProxyType({}),
    ) -> Graded:
        """columns: more columns for the functions, with B x G values, as `turns`."""
        shape = (len(rows), len(texts[0]))
        flat_rows = [
            row | {name: values[b][g] for name, values in columns.items()}
            for b, row in enumerate(rows)
            for g in range(shape[1])
        ]
        flat_texts = [text for group in texts for text in group]
        flat_ids = [tokens for group in ids for tokens in group]
        ask = self._ask_processes if self._timeout else self._ask_here
        answers = ask(flat_rows, flat_texts, flat_ids)
        channels = {name: np.asarray(answers[name].values, np.float32).reshape(shape) for name in self._functions}
        metrics = {f"{name}/{key}": x for name, answer in answers.items() for key, x in answer.metrics.items()}
        total = weighted_sum(list(channels.values()), self._weights, shape)
        return Graded(texts, Rewards(total, channels), columns.get("turns", []), metrics)

    def start(self, completions: Callable[[], Completions]) -> Callable[[], Graded]:
        """Judges completions() in a thread. Returns a function that waits for the result, and may be called repeatedly.

        Without a time limit, its first call judges in the caller's thread: a reward function may set an alarm, and
        Python allows alarms only in the main thread.
        """

        def judge() -> Graded:
            return self(*completions())

        return self._thread.submit(judge).result if self._timeout else cache(judge)

    def close(self) -> None:
        """Ends the processes, also while they judge a batch."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for process in self._processes.values():
            process.close()

    def _ask_here(self, *batch: Any) -> dict[str, FunctionRewards]:
        answers = {}
        for name, text in self._functions.items():
            try:
                answers[name] = call(name, bound(text), *batch)
            except SystemExit as error:
                # It would end the trainer without a word.
                raise UserError(
                    f"reward {name} ended the program ({describe(error)}): make it return or raise"
                ) from error
        return answers

    def _ask_processes(self, rows: list[dict[str, Any]], *completions: Any) -> dict[str, FunctionRewards]:
        try:
            while self._starting:
                # No limit: this process has run the same imports before.
                self._answer(self._starting.pop(), math.inf, len(rows))
            # One end for all functions: they run at the same time, so the batch takes no longer than the limit.
            end = time.monotonic() + self._timeout
            for name, process in self._processes.items():
                try:
                    process.ask(_call_in_time, self._timeout, name, self._functions[name], rows, *completions)
                except (TypeError, AttributeError, pickle.PicklingError) as error:
                    raise self._cannot_be_sent(name, rows, error) from error
            return {name: self._answer(name, end, len(rows)) for name in self._processes}
        except BaseException:
            # A process that still works would return this batch's numbers for the next one.
            self.close()
            raise

    def _answer(self, name: str, end: float, count: int) -> Any:
        try:
            answer = self._processes[name].answer(end - time.monotonic())
            WATCHDOG.moved()
            return answer
        except ChildProcessError as error:
            raise UserError(
                f"reward {name} ended its process ({error}): make it return or raise; {self._field} = 0 runs it in the "
                "trainer's own process, where a debugger can follow it"
            ) from None
        except TimeoutError:
            raise UserError(
                f"reward {name} took longer than {self._field} = {self._timeout:g} seconds for a batch of {count} "
                f"completions: make it faster, or raise {self._field} (0: no limit)"
            ) from None

    def _cannot_be_sent(self, name: str, rows: list[dict[str, Any]], error: Exception) -> UserError:
        columns = [key for row in rows for key, value in row.items() if not _can_be_sent(value)]
        return UserError(
            f"column {columns[0]!r} cannot be sent to the process of reward {name} ({type(error).__name__}: {error}): "
            f"make it text, numbers, lists or dicts, or set {self._field} = 0"
        )


def weighted_sum(channels: Sequence[np.ndarray], weights: Sequence[float], shape: tuple[int, int]) -> np.ndarray:
    """Returns the weighted sum [B, G] of the channels. NaN adds 0; the sum is NaN if all channels with a weight are."""
    # NaN is an abstention, and would make the whole sum NaN.
    weighted = [w * np.nan_to_num(c) for w, c in zip(weights, channels, strict=True)]
    total = np.asarray(np.sum([np.zeros(shape, np.float32), *weighted], axis=0), np.float32)
    silent = [np.isnan(c) for w, c in zip(weights, channels, strict=True) if w]
    return np.where(np.all(silent, axis=0), np.float32(np.nan), total) if silent else total


def _call_in_time(seconds: float, name: str, text: str, *batch: Any) -> FunctionRewards:
    tasks.set_deadline(seconds)
    return call(name, bound(text), *batch)


def _prepare(text: str, code: bytes) -> None:
    """Does the imports of a function. code: the function itself, if no module of another process can have it."""
    if code:
        USER_FUNCTIONS[split_call(text)[0]] = pickle.loads(code)
    bound(text)


def _code(name: str) -> bytes:
    """Returns a pickled function of a notebook, a script or a config file. b"": it is imported by its name."""
    if name not in USER_FUNCTIONS and not name.startswith("__main__."):
        return b""
    pickled = io.BytesIO()
    try:
        _Pickler(pickled).dump(resolve(name, tasks.REWARDS, "reward"))
        return pickled.getvalue()
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise UserError(
            f"reward {name} cannot be sent to its process ({briefly(error)}): put it into a file and name it 'file.f', "
            "or set config.reward.timeout = 0"
        ) from error


class _Pickler(cloudpickle.Pickler):
    """Sends code with the name of its file, which cloudpickle drops: errors name it with the line."""

    dispatch_table: ClassVar[Any] = {**COPIED, CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))}


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (TypeError, AttributeError, pickle.PicklingError):
        return False
    return True


class FlatBatch(NamedTuple):
    """Completions in one list, each with its data row."""

    rows: list[dict[str, Any]]
    texts: list[str]
    ids: list[list[int]]


class FunctionRewards(NamedTuple):
    """What a function returned for a flat list of completions."""

    values: list[float]  # NaN where it returned None
    metrics: dict[str, float]  # that it gave to `log_metric`


def call(
    name: str, function: Reward, rows: list[dict[str, Any]], texts: list[str], ids: list[list[int]]
) -> FunctionRewards:
    """Calls one reward function on a flat list of completions and checks the result."""
    metrics, batch = dict[str, float](), FlatBatch(rows, texts, ids)
    arguments = _arguments(name, function, batch, metrics.__setitem__)
    began, slow = time.monotonic(), False
    try:
        returned = function(**arguments)
        if slow := inspect.isawaitable(returned):
            returned = _loop().run(_awaited(returned))
        values = _listed(returned, len(texts))
    except UserError:
        raise
    except Exception as error:
        # A slow function is not called again: the search for the culprit could take hours.
        slow = slow or time.monotonic() - began > SEARCH
        i = None if slow else _culprit(name, function, batch)
        where = _show(rows[i or 0], texts[i or 0])
        if i is None:
            where = f"a batch of {len(texts)} completions, the first of them for {where}"
        raise UserError(f"reward {name} raised {describe(error)} on {where}") from error
    if not isinstance(values, list) or len(values) != len(texts):
        raise UserError(
            f"reward {name} returned {_kind(returned, values)} for {len(texts)} completions: return a list with one "
            f"number each, the first of them for {_show(rows[0], texts[0])}"
        )
    numbers = [_number(name, value, row, text) for value, row, text in zip(values, rows, texts, strict=True)]
    return FunctionRewards(numbers, {str(key): float(value) for key, value in metrics.items()})


@cache
def _loop() -> asyncio.Runner:
    """Returns one event loop for all batches, because a client that a module keeps is tied to its first loop."""
    return asyncio.Runner()


async def _awaited(values: Any) -> Any:
    return await values


def _listed(values: Any, count: int) -> Any:
    """Converts a sequence, an array [N] or an iterator to a list; returns anything else as it is."""
    if hasattr(values, "tolist"):
        # NumPy, jax, torch, pandas.
        return values.tolist()
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set)):
        # An iterator may be endless; one value more than `count` is enough to see that it is too long.
        return list(values if isinstance(values, Sequence) else islice(values, count + 1))
    return values


def _kind(returned: Any, values: Any) -> str:
    """Describes what a function returned, in a few words."""
    kind = type(returned).__name__
    if len(getattr(returned, "shape", ())) > 1:
        return f"{kind} of shape {tuple(returned.shape)}"
    if isinstance(values, (list, Mapping, Set)):
        return f"{kind} of {len(values)}"
    return repr(returned)[:200]


def _number(name: str, value: Any, row: dict[str, Any], text: str) -> float:
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    # True for NaN too.
    if not abs(number) <= LARGEST:
        raise UserError(
            f"reward {name} returned {value!r:.200} for {_show(row, text)}: return a finite number of at most 1e15, or "
            "None to abstain"
        )
    return number


def _arguments(name: str, function: Reward, batch: FlatBatch, log_metric: Callable[..., None]) -> dict[str, Any]:
    """Returns the arguments that the function names, or all of them if it takes **kwargs."""
    rows, texts, ids = batch
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    prompts, completions = zip(
        *(_as_trl(row["prompt"], text) for row, text in zip(rows, texts, strict=True)), strict=True
    )
    columns.pop("prompt")
    offered = columns | {"prompts": list(prompts), "completions": list(completions), "completion_ids": ids}
    offered |= {"log_metric": log_metric}
    for key in function.keywords if isinstance(function, partial) else ():
        # The config gives it, not the data.
        offered.pop(key, None)
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        chosen = offered
    else:
        chosen = {key: offered[key] for key in parameters if key in offered}
    for key, parameter in parameters.items():
        variadic = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if not variadic and parameter.default is inspect.Parameter.empty and key not in chosen:
            present = ", ".join(sorted(offered.keys() - {"log_metric"}))
            raise UserError(f"reward {name} asks for column {key!r}, which the data does not have; there is {present}")
    return chosen


def _as_trl(prompt: Any, text: str) -> tuple[Any, Any]:
    """Returns prompt and completion as TRL does: an answer that the prompt starts is part of the completion."""
    if isinstance(prompt, str):
        return prompt, text
    if prompt[-1]["role"] == "assistant":
        *prompt, begun = prompt
        text = begun["content"] + text
    return prompt, [{"role": "assistant", "content": text}]


def _culprit(name: str, function: Reward, batch: FlatBatch) -> int | None:
    """Returns the index of the first completion that alone makes the function raise; None if not found in time."""
    end = time.monotonic() + SEARCH
    for i in range(len(batch.rows)):
        if time.monotonic() > end:
            return None
        try:
            completion = FlatBatch(batch.rows[i : i + 1], batch.texts[i : i + 1], batch.ids[i : i + 1])
            _listed(function(**_arguments(name, function, completion, lambda *_: None)), 1)
        except Exception:
            return i
    return None


def _show(row: dict[str, Any], text: str) -> str:
    """Formats the row and the completion, short enough for one line."""
    shown = {key: value for key, value in row.items() if key != "prompt"} or row["prompt"]
    return f"row {str(printable_value(shown))[:200]}, completion {text[:200]!r}"
