"""Calls a config's reward functions in separate processes with a time limit, and checks their results."""

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
from jaxrl_llm.errors import UserError, describe, summarize_error
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.process import Process
from jaxrl_llm.structs import Rewards
from jaxrl_llm.tasks.signatures import bound

__all__: tuple[str, ...] = ()  # no function here is a reward that a config may name

Reward: TypeAlias = Callable[..., Any]
PICKLE_DISPATCH = cloudpickle.Pickler.dispatch_table
# If a function fails within this time, it is called again on single completions for at most this time.
SEARCH_SECONDS = 1.0
TIMEOUT_FIELD = "config.reward.timeout"
# Advantages square rewards in float32, whose largest number is 3e38. Larger rewards would overflow it.
MAX_REWARD = 1e15


class Completions(NamedTuple):
    """Arguments of reward functions: B data rows, and B x G completions of their prompts."""

    rows: list[dict[str, Any]]
    texts: list[list[str]]
    ids: list[list[list[int]]]
    columns: Mapping[str, list[list[Any]]] = MappingProxyType({})  # further columns, B x G values each, such as `turns`


class GradedCompletions(NamedTuple):
    """Texts of completions and their rewards."""

    texts: list[list[str]]  # B x G
    rewards: Rewards
    turns: list[list[list[dict[str, str]]]]  # B x G lists of messages of episodes; [] for completions of a single turn
    metrics: dict[str, float]  # "function/name" -> value that a reward function gave to `log_metric`


class RewardFn:
    """Calls the reward functions of a run on the completions of a batch: `reward_fn(rows, texts, ids)`.

    rows: B data rows. texts, ids: B x G completions. If a function returns None, its channel is NaN and adds 0 to the
    total. If no function with a weight returns a number, the total is NaN too.
    Raises: UserError, which names the function, and the row and completion if one of them causes the error.

    With a time limit, each function has a process of its own (`machine.process.Process`). So the limit holds whatever
    the function does, and all functions run at the same time. An error closes the RewardFn.
    """

    def __init__(self, functions: Sequence[str], weights: Sequence[float], timeout: float, field: str = TIMEOUT_FIELD):
        """functions: names, with arguments if they take any. weights: weight of each function in the total reward.

        timeout: seconds for one batch of one function, 0 = no limit and no process. field: name of the timeout's config
        field, for messages.
        """
        self._functions = {split_call(text)[0]: text for text in functions}
        self._weights, self._timeout, self._field = weights, timeout, field
        pickled = {name: _pickled_function(name) for name in self._functions if timeout}
        self._processes = {name: Process(_load_function, self._functions[name], code) for name, code in pickled.items()}
        self._starting = set(self._processes)
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __call__(
        self,
        rows: list[dict[str, Any]],
        texts: list[list[str]],
        ids: list[list[list[int]]],
        columns: Mapping[str, list[list[Any]]] = MappingProxyType({}),
    ) -> GradedCompletions:
        """columns: further columns for the functions, B x G values each, such as `turns`."""
        shape = (len(rows), len(texts[0]))
        flat_rows = [
            row | {name: values[b][g] for name, values in columns.items()}
            for b, row in enumerate(rows)
            for g in range(shape[1])
        ]
        flat_texts = [text for group in texts for text in group]
        flat_ids = [tokens for group in ids for tokens in group]
        ask = self._call_in_children if self._timeout else self._call_in_process
        answers = ask(flat_rows, flat_texts, flat_ids)
        channels = {name: np.asarray(answers[name].values, np.float32).reshape(shape) for name in self._functions}
        metrics = {f"{name}/{key}": x for name, answer in answers.items() for key, x in answer.metrics.items()}
        total = weighted_sum(list(channels.values()), self._weights, shape)
        return GradedCompletions(texts, Rewards(total, channels), columns.get("turns", []), metrics)

    def start(self, completions: Callable[[], Completions]) -> Callable[[], GradedCompletions]:
        """Starts to judge completions() in a thread. Returns a function that waits for the result.

        The returned function may be called repeatedly. Without a time limit, its first call judges in the caller's
        thread, because a reward function may set an alarm, which Python allows only in the main thread.
        """

        def judge() -> GradedCompletions:
            return self(*completions())

        return self._thread.submit(judge).result if self._timeout else cache(judge)

    def close(self) -> None:
        """Ends the processes, even while they judge a batch."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for process in self._processes.values():
            process.close()

    def _call_in_process(self, *batch: Any) -> dict[str, FunctionRewards]:
        answers = {}
        for name, text in self._functions.items():
            try:
                answers[name] = call_reward(name, bound(text), *batch)
            except SystemExit as error:
                # Without this error, SystemExit would end the trainer silently.
                raise UserError(
                    f"reward function {name} has ended the program ({describe(error)}); it must return or raise"
                ) from error
        return answers

    def _call_in_children(self, rows: list[dict[str, Any]], *completions: Any) -> dict[str, FunctionRewards]:
        try:
            while self._starting:
                # The imports have no time limit, because this process has run the same imports before.
                self._wait_for_answer(self._starting.pop(), math.inf, len(rows))
            # All functions share one deadline, because they run at the same time.
            end = time.monotonic() + self._timeout
            for name, process in self._processes.items():
                try:
                    process.send_call(_call_in_time, self._timeout, name, self._functions[name], rows, *completions)
                except (TypeError, AttributeError, pickle.PicklingError) as error:
                    raise self._not_picklable(name, rows, error) from error
            return {name: self._wait_for_answer(name, end, len(rows)) for name in self._processes}
        except BaseException:
            # A busy process would answer the next batch with the numbers of this batch.
            self.close()
            raise

    def _wait_for_answer(self, name: str, end: float, count: int) -> Any:
        try:
            answer = self._processes[name].receive_result(end - time.monotonic())
            WATCHDOG.report_progress()
            return answer
        except ChildProcessError as error:
            raise UserError(
                f"reward function {name} has ended its process ({error}); it must return or raise. To debug it, "
                f"set {self._field} = 0, which runs it in the trainer's process"
            ) from None
        except TimeoutError:
            raise UserError(
                f"{self._field} = {self._timeout:g} seconds: reward function {name} takes longer for a batch of "
                f"{count} completions; make it faster, or raise {self._field} (0 = no limit)"
            ) from None

    def _not_picklable(self, name: str, rows: list[dict[str, Any]], error: Exception) -> UserError:
        columns = [key for row in rows for key, value in row.items() if not _is_picklable(value)]
        return UserError(
            f"column {columns[0]!r} cannot be pickled for the process of reward function {name} "
            f"({type(error).__name__}: {error}); it must hold text, numbers, lists or dicts, or set {self._field} = 0"
        )


def weighted_sum(channels: Sequence[np.ndarray], weights: Sequence[float], shape: tuple[int, int]) -> np.ndarray:
    """Returns the weighted sum [B, G] of the channels [B, G]. NaN, which means abstention, adds 0.

    The sum is NaN for completions for which every channel with a weight is NaN.
    """
    weighted = [w * np.nan_to_num(c) for w, c in zip(weights, channels, strict=True)]
    total = np.asarray(np.sum([np.zeros(shape, np.float32), *weighted], axis=0), np.float32)
    abstained = [np.isnan(c) for w, c in zip(weights, channels, strict=True) if w]
    return np.where(np.all(abstained, axis=0), np.float32(np.nan), total) if abstained else total


def _call_in_time(seconds: float, name: str, text: str, *batch: Any) -> FunctionRewards:
    tasks.set_deadline(seconds)
    return call_reward(name, bound(text), *batch)


def _load_function(text: str, code: bytes) -> None:
    """Imports a reward function in its process. code: the pickled function, b"" if its name can be imported."""
    if code:
        USER_FUNCTIONS[split_call(text)[0]] = pickle.loads(code)
    bound(text)


def _pickled_function(name: str) -> bytes:
    """Returns the pickled function of a notebook, a script or a config file, b"" if its name can be imported."""
    if name not in USER_FUNCTIONS and not name.startswith("__main__."):
        return b""
    pickled = io.BytesIO()
    try:
        _Pickler(pickled).dump(resolve(name, tasks.REWARDS, "reward"))
        return pickled.getvalue()
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise UserError(
            f"reward function {name} cannot be pickled for its process ({summarize_error(error)}); move it into a file "
            "and name it 'file.f', or set reward.timeout = 0"
        ) from error


class _Pickler(cloudpickle.Pickler):
    """Pickles code with the name of its file, which cloudpickle drops, so that errors name file and line."""

    dispatch_table: ClassVar[Any] = {**PICKLE_DISPATCH, CodeType: lambda code: (marshal.loads, (marshal.dumps(code),))}


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (TypeError, AttributeError, pickle.PicklingError):
        return False
    return True


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
            "it must return a list with one number for each, and the first is "
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
    for key in function.keywords if isinstance(function, partial) else ():
        # The config sets this argument, so a column of the same name does not.
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
