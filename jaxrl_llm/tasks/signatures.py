"""Reward functions of veRL and EasyR1 as they are: `compute_score(data_source, solution_str, ground_truth, ...)`.

| signature | called for | returns |
|---|---|---|
| `f(data_source, solution_str, ground_truth, extra_info)` | one completion | a number, or a dict with "score" |
| `f(data_sources, solution_strs, ground_truths, extra_infos)` | a batch | a list of them |
| `f(reward_input)`, a dict of response, response_length and ground_truth | one completion | a dict with "overall" |
| `f(reward_inputs)` | a batch | a list of them |
| `f(predict_str, ground_truth)`, `f(predicts, ground_truths)` | one completion, a batch | as the two above |

The ground truth is that of `verl.ground_truth`, or the column "answer". Other numbers of a dict are logged.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.config.names import bind, marked, parameters
from jaxrl_llm.tasks import REWARDS, text_of, verl

__all__: tuple[str, ...] = ()  # a config may name no function of this file

TEXTS = ("solution_str", "predict_str", "predict")  # arguments that hold the text of a completion
COLUMNS = ("data_source", "extra_info")  # arguments that are columns of the row
TRUTH = ("answer", "reward_model")  # columns of which one holds the ground truth
TOTALS = ("score", "overall")  # keys of the reward in a dict


def bound(text: str) -> Callable[..., Any]:
    """Returns the reward function of "name" or "name(argument=value)", with this package's signature.

    Raises: UserError, if the function does not exist.
    """
    return adapted(bind(text, REWARDS, "reward"))


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of veRL or EasyR1 with this package's signature, and any other function as it is."""
    known = parameters(function)
    for plural in ("", "s"):
        takes_texts = any(f"{name}{plural}" in known for name in TEXTS) and f"ground_truth{plural}" in known
        if takes_texts or f"reward_input{plural}" in known:
            return _adapter(function, known, plural)
    return function


def _adapter(function: Callable[..., Any], known: Mapping[str, inspect.Parameter], plural: str) -> Callable[..., Any]:
    """Returns a reward with this package's signature that calls a function of veRL or EasyR1.

    known: parameters of the function; plural: last letter of their names, "s" if the function judges a batch, "" if it
    judges one completion.
    """
    columns = {column: known[f"{column}{plural}"] for column in COLUMNS if f"{column}{plural}" in known}
    takes_inputs, truth = f"reward_input{plural}" in known, f"ground_truth{plural}"

    @functools.wraps(function)
    def reward(
        completions: list[Any],
        completion_ids: list[list[int]],
        log_metric: Any,
        answer: Sequence[Any] | None = None,
        reward_model: Sequence[Any] | None = None,
        **values: list[Any],
    ) -> Any:
        """Calls the user's function with the arguments that its signature asks for."""
        texts = [text_of(completion) for completion in completions]
        arguments: dict[str, Any] = {f"{column}{plural}": values[column] for column in columns if column in values}
        arguments |= {f"{name}{plural}": texts for name in TEXTS if f"{name}{plural}" in known}
        empty_column = [None] * len(texts)
        truths = list(map(verl.ground_truth, answer or empty_column, reward_model or empty_column))
        if truth in known and (answer or reward_model):
            arguments[truth] = truths
        if takes_inputs:
            facts = zip(texts, completion_ids, truths, strict=True)
            arguments[f"reward_input{plural}"] = [
                {"response": text, "response_length": len(ids), "ground_truth": value} for text, ids, value in facts
            ]
        if plural:
            returned = function(**arguments)
        else:
            rows = ({name: column[i] for name, column in arguments.items()} for i in range(len(texts)))
            returned = [function(**row) for row in rows]
        is_async = inspect.isawaitable(returned) or (not plural and any(map(inspect.isawaitable, returned)))
        return _awaited(returned, log_metric) if is_async else _totals(returned, log_metric)

    kind, required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    names = {name: required for name in ("completions", "completion_ids", "log_metric")} | dict.fromkeys(TRUTH)
    names |= {column: parameter.default for column, parameter in columns.items()}
    our_parameters = [inspect.Parameter(name, kind, default=default) for name, default in names.items()]
    # Parameters without a default come first, because Python requires this order.
    our_parameters.sort(key=lambda parameter: parameter.default is not parameter.empty)
    setattr(reward, "__signature__", inspect.Signature(our_parameters))  # noqa: B010 - pyright knows no such attribute
    # `data.columns` checks that each row has one of the columns in `any_of`.
    needs_truth = takes_inputs or (truth in known and known[truth].default is required)
    return marked(any_of=TRUTH)(reward) if needs_truth else reward


async def _awaited(returned: Any, log_metric: Any) -> Any:
    """Returns `_totals` of awaitable rewards."""
    # The rewards are gathered inside a coroutine, because they belong to the running loop.
    return _totals(await (asyncio.gather(*returned) if isinstance(returned, list) else returned), log_metric)


def _totals(returned: Any, log_metric: Callable[[str, float], None]) -> Any:
    """Returns the rewards in numbers or dicts, and logs the means of all other numbers in the dicts."""
    if not isinstance(returned, Sequence) or not any(isinstance(verdict, dict) for verdict in returned):
        return returned
    parts: dict[str, list[float]] = {}
    for verdict in returned:
        for name, value in verdict.items() if isinstance(verdict, dict) else ():
            if name not in TOTALS and isinstance(value, (int, float)):
                parts.setdefault(str(name), []).append(float(value))
    for name, values in parts.items():
        log_metric(name, sum(values) / len(values))
    named = {key for verdict in returned if isinstance(verdict, dict) for key in verdict}
    total = next((key for key in TOTALS if key in named), TOTALS[0])
    return [verdict.get(total, verdict) if isinstance(verdict, dict) else verdict for verdict in returned]
