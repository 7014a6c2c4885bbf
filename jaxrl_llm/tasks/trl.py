"""Environment classes of TRL (GRPOTrainer's `environment_factory`), unchanged."""

from __future__ import annotations

import asyncio
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from threading import Thread
from typing import Any

from jaxrl_llm.config.names import Kind, resolve
from jaxrl_llm.errors import UserError, describe
from jaxrl_llm.tasks import HERE, PREFILL
from jaxrl_llm.tasks.first_texts import TEXT_COLUMN, append_text, prompt_without_text
from jaxrl_llm.tasks.protocol import COLUMN, Reply
from jaxrl_llm.tasks.tools import answer_calls, schemas_of

FACTORIES = Kind(HERE, lambda kind: False)  # this package has no class of TRL's form
# Objects that no episode uses. TRL makes an object once and resets it often, because it may hold a connection.
_idle: dict[Callable[[], Any], list[Any]] = defaultdict(list)


class Environments:
    """Environment of an episode that an object of a TRL class answers. Its public methods are the policy's tools."""

    stops = ()

    def __init__(self, *, factory: str | dict[str, str]):
        """factory: `my.module.Class`, or {value of the row's column `environment`: `my.module.Class`}.

        Raises: UserError, for a class that does not exist, cannot be made, or has no `reset` or no documented methods.
        """
        names = factory if isinstance(factory, dict) else {"": factory}
        if not names or not all(isinstance(name, str) and name for name in names.values()):
            raise UserError(
                f"config.env.factory = {factory!r} must be a class such as 'my.module.Class', or for rows with a "
                f"column {COLUMN!r} a dict with a class for each of its values: {{'VALUE': 'my.module.Class', ...}}"
            )
        self._has_one_class = not isinstance(factory, dict)
        self._kinds = {key: _kind(resolve(name, FACTORIES, "config.env.factory"), name) for key, name in names.items()}
        # The rows name the tools of several environments, because the prompt shows only the tools of its own.
        self.schemas = self._kinds[""][1] if self._has_one_class else []
        self._factory, self._object, self._failure = None, None, ""

    def prepare_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns a row whose last message ends with what `reset` returns, and whose tools are its environment's."""
        if not self._has_one_class and row.get("tools") is not None:
            raise UserError(
                "config.env.factory: rows have a column 'tools' with other functions, which the environment cannot "
                "call; remove this column"
            )
        factory, schemas = self._kind_of(row)
        environment = _take(factory)
        text = environment.reset(**self._columns(row))
        _idle[factory].append(environment)
        return append_text(row | ({} if self._has_one_class else {"tools": schemas}), text)

    def reset(self, row: dict[str, Any]) -> None:
        """Starts the episode of a prepared row. After an error, the first turn ends the episode."""
        self._factory, _ = self._kind_of(row)
        try:
            self._object = _take(self._factory)
            text = self._object.reset(**self._columns(row))
        except Exception as error:
            warnings.warn(
                f"reset of an environment failed: {describe(error)}; episode/reset_errors counts it", stacklevel=2
            )
            self._failure = "reset_errors"
            return
        # The prompt describes another state of the environment if `reset` depends on more than the row.
        self._failure = "" if text == row[TEXT_COLUMN] else "reset_differs"

    def step(self, text: str) -> Reply:
        """Calls all methods of the turn, in order. A turn without a call ends the episode."""
        if self._failure:
            return Reply(done=True, metrics={"errors": 1.0, self._failure: 1.0})
        methods = {name: partial(_wait_for, method) for name, method in _tools(self._object).items()}
        return answer_calls(text, methods)

    def finish(self) -> dict[str, float]:
        """Returns what `get_reward` returns as the metric `reward`; no method, None or NaN is `unscored`."""
        environment, self._object = self._object, None
        get_reward = None if self._failure else getattr(environment, "get_reward", None)
        reward = _wait_for(get_reward) if get_reward else None
        if environment is not None and self._factory and not self._failure:
            _idle[self._factory].append(environment)
        if reward is None or math.isnan(reward):
            return {"reward": 0.0, "unscored": 1.0}
        return {"reward": float(reward), "unscored": 0.0}

    def _kind_of(self, row: dict[str, Any]) -> tuple[Callable[[], Any], list[dict[str, Any]]]:
        value = "" if self._has_one_class else row.get(COLUMN)
        if value not in self._kinds:
            raise UserError(
                f"config.env.factory has environments for {', '.join(map(repr, self._kinds))}, but a row has "
                f"{value!r} in the column {COLUMN!r}: add this environment, or correct the row"
            )
        return self._kinds[value]

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the columns of a row as its source has them, but without `environment`, which TRL leaves out too."""
        added = {PREFILL, TEXT_COLUMN} | (set() if self._has_one_class else {COLUMN, "tools"})
        columns = {name: value for name, value in row.items() if name not in added}
        return columns | {"prompt": prompt_without_text(row)}


def _take(factory: Callable[[], Any]) -> Any:
    """Returns an object that no other episode uses."""
    try:
        return _idle[factory].pop()
    except IndexError:
        return factory()


def _tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """Returns the methods of an object that are tools: all public ones but `reset` and `get_reward`."""
    # The class is searched, because a search in the object would run its properties.
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return {
        name: getattr(environment, name) for name in names if name[0] != "_" and name not in ("reset", "get_reward")
    }


@cache
def _kind(factory: Callable[[], Any], name: str) -> tuple[Callable[[], Any], list[dict[str, Any]]]:
    """Returns a factory and the schemas of its tools. name: dotted name in the config. Raises: UserError."""
    field = f"config.env.factory = {name!r}"
    try:
        environment = factory()
    except Exception as error:
        raise UserError(
            f"{field}: its object cannot be made ({describe(error)}): fix its constructor, or install what it needs"
        ) from error
    if not inspect.isfunction(getattr(type(environment), "reset", None)):
        raise UserError(f"{field}: its class has no method reset, which starts an episode: add reset(self, **row)")
    if not (tools := _tools(environment)):
        raise UserError(
            f"{field}: its class has no public method beside reset and get_reward, so the policy could call nothing: "
            "add a method with typed arguments and a docstring"
        )
    schemas = schemas_of(tools.values(), field)
    _idle[factory].append(environment)
    return factory, schemas


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all async methods, because a connection of an object belongs to one loop."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _wait_for(method: Callable[..., Any], /, **arguments: Any) -> Any:
    """Returns the result of a method, which may be async."""
    result = method(**arguments)
    return asyncio.run_coroutine_threadsafe(result, _event_loop()).result() if inspect.iscoroutine(result) else result
