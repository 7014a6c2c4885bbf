"""Calls a config's reward functions in separate processes with a time limit, and joins their results."""

from __future__ import annotations

import io
import marshal
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import CodeType, MappingProxyType
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.config.names import USER_FUNCTIONS, resolve, split_call
from jaxrl_llm.errors import UserError, describe, summarize_error
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.process import Process
from jaxrl_llm.rollout.reward_calls import FunctionRewards, call_in_time, call_reward, load_function
from jaxrl_llm.structs import Rewards
from jaxrl_llm.tasks.signatures import bound

__all__: tuple[str, ...] = ()  # no function here is a reward that a config may name

PICKLE_DISPATCH = cloudpickle.Pickler.dispatch_table
TIMEOUT_FIELD = "config.reward.timeout"


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
        self._processes = {name: Process(load_function, self._functions[name], code) for name, code in pickled.items()}
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
        metrics = {
            f"{name}/{metric}": value for name, answer in answers.items() for metric, value in answer.metrics.items()
        }
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
        """Calls the reward functions in this process, one after the other. batch: rows, texts and token ids."""
        answers = {}
        for name, text in self._functions.items():
            try:
                answers[name] = call_reward(name, bound(text), *batch)
            except SystemExit as error:
                # This error replaces SystemExit, which would end the trainer silently.
                raise UserError(
                    f"reward function {name} has ended the program ({describe(error)}); it must return or raise"
                ) from error
        return answers

    def _call_in_children(self, rows: list[dict[str, Any]], *completions: Any) -> dict[str, FunctionRewards]:
        """Calls the reward functions at the same time, each in its own process, within the time limit."""
        try:
            while self._starting:
                # The imports have no time limit, because this process has run the same imports before.
                self._wait_for_answer(self._starting.pop(), math.inf, len(rows))
            # All functions share one deadline, because they run at the same time.
            end = time.monotonic() + self._timeout
            for name, process in self._processes.items():
                try:
                    process.send_call(call_in_time, self._timeout, name, self._functions[name], rows, *completions)
                except (TypeError, AttributeError, pickle.PicklingError) as error:
                    raise self._not_picklable(name, rows, error) from error
            return {name: self._wait_for_answer(name, end, len(rows)) for name in self._processes}
        except BaseException:
            # A busy process would answer the next batch with the numbers of this batch.
            self.close()
            raise

    def _wait_for_answer(self, name: str, end: float, count: int) -> Any:
        """Returns the rewards of a function. end: time at which the wait ends. count: number of completions."""
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
