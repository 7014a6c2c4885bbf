"""Environments on OpenEnv servers, over WebSocket: MCP environments, and environments with actions of their own."""

from __future__ import annotations

import json
import math
import time
import warnings
from contextlib import suppress
from functools import cache, partial
from typing import Any

import httpx

from jaxrl_llm.config.schema import Positive
from jaxrl_llm.errors import UserError, printable, summarize_error
from jaxrl_llm.tasks.protocol import OwnError, Reply
from jaxrl_llm.tasks.tools import answer_calls
from jaxrl_llm.tasks.trl import TEXT_COLUMN, append_text

STEP = "step"  # tool of an environment with actions of its own; MCP tools may not have this name
CAPACITY_WAIT = 2.0  # seconds to wait for sessions that have ended, but which the server has not closed yet


class ServerError(Exception):
    """Failure of a server. `metric` is the name under which it is counted."""

    def __init__(self, metric: str, reason: str):
        super().__init__(printable(reason[:300]))
        self.metric = metric


class OpenEnv:
    """Environment of an episode on an OpenEnv server. A failure of the server costs the episode, never the run."""

    stops = ()

    def __init__(self, *, url: str, timeout: Positive = 30.0, reset_columns: tuple[str, ...] = ("seed",)):
        """url: address of the server; timeout: seconds to wait for an answer of the server.

        reset_columns: columns of a row that are sent with `reset`, if the row has them. Raises: UserError, if a package
        is missing, or if the server does not answer or offers no tools and no actions.
        """
        self._url, self._timeout, self._reset_columns = url, timeout, reset_columns
        self.schemas, self._has_mcp = _offer(url, timeout)
        self._functions = {name: partial(self._call, name) for name in (s["function"]["name"] for s in self.schemas)}
        self._session: Session | None = None
        self._failure, self._is_done, self._rewards, self._turn_reward = "", False, 0, 0.0

    def prepare_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns a row whose last message ends with the first observation, if the server sends one."""
        try:
            text = self._start(row)
        except ServerError as error:
            raise _refusal(self._url, error) from error
        finally:
            self._close()
        return append_text(row, text)

    def reset(self, row: dict[str, Any]) -> None:
        """Starts the episode of a prepared row on the server."""
        try:
            # The prompt describes another state of the environment if `reset` depends on more than the row.
            self._failure = "" if self._start(row) == row[TEXT_COLUMN] else "reset_differs"
        except ServerError as error:
            self._fail(error)

    def step(self, text: str) -> Reply:
        """Sends all calls of the turn, in order. A turn without a call ends the episode, as does the server."""
        if self._failure:
            return Reply(done=True, metrics={"errors": 1.0, self._failure: 1.0})
        self._turn_reward = 0.0
        reply = answer_calls(text, self._functions)
        metrics = reply.metrics | {"reward": self._turn_reward} | ({self._failure: 1.0} if self._failure else {})
        return Reply(reply.observation, done=reply.done or self._is_done or bool(self._failure), metrics=metrics)

    def finish(self) -> dict[str, float]:
        """Ends the session. An episode without a reward of the server, or with a failure, is unscored."""
        self._close()
        return {"unscored": float(bool(self._failure) or not self._rewards)}

    def _start(self, row: dict[str, Any]) -> str | None:
        """Starts an episode. Returns the first observation as text, None if it is empty."""
        data = {name: row[name] for name in self._reset_columns if row.get(name) is not None}
        give_up = time.monotonic() + CAPACITY_WAIT
        while True:
            try:
                self._session = Session(self._url, self._timeout)
                observation = _observation(self._session.ask("reset", data))["observation"]
                break
            except ServerError as error:
                self._close()
                if error.metric != "server_full" or time.monotonic() > give_up:
                    raise
                time.sleep(0.1)
        shown = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
        return f"\n\n{json.dumps(shown, ensure_ascii=False)}" if shown else None

    def _call(self, name: str, **arguments: Any) -> Any:
        """Returns the result of a tool. Raises: OwnError, for a wrong call; ServerError, if the server fails."""
        if self._failure or self._is_done or not self._session:
            raise OwnError("the episode is over")
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments} if self._has_mcp else arguments
        try:
            answer = _observation(self._session.ask("step", action))
        except ServerError as error:
            self._fail(error)
            raise
        self._is_done = answer["done"]
        if answer["reward"] is not None:
            self._rewards, self._turn_reward = self._rewards + 1, self._turn_reward + float(answer["reward"])
        observation = answer["observation"]
        if not self._has_mcp:
            return observation
        if error := observation.get("error"):
            error = error if isinstance(error, dict) else {"message": error}
            is_own = error.get("error_type") in ("invalid_args", "tool_not_found")
            raise (OwnError if is_own else RuntimeError)(str(error.get("message")))
        return _tool_result(observation.get("result"))

    def _fail(self, error: ServerError) -> None:
        self._failure = error.metric
        warnings.warn(f"an OpenEnv server failed: {error}; episode/{error.metric} counts it", stacklevel=2)

    def _close(self) -> None:
        session, self._session = self._session, None
        if session:
            session.close()


class Session:
    """A WebSocket connection to a server, which keeps one environment for it."""

    def __init__(self, url: str, timeout: float):
        """Connects. Raises: ServerError."""
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self._errors, self._timeout = (OSError, WebSocketException), timeout
        address = f"ws{url.rstrip('/').removeprefix('http').removeprefix('ws')}/ws"
        try:
            # Pings would take a thread for each session, and `timeout` finds a dead server too.
            self._socket = connect(
                address, open_timeout=timeout, close_timeout=1, ping_interval=None, max_size=2**24, compression=None
            )
        except (*self._errors, ValueError) as error:
            raise ServerError("server_unreachable", summarize_error(error)) from error

    def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Returns the data of the answer to a message. Raises: ServerError; OwnError, for an action that is refused."""
        # A server that refuses a session says why, and closes the connection, maybe before this message.
        with suppress(*self._errors):
            self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            answer = json.loads(self._socket.recv(timeout=self._timeout))
        except TimeoutError as error:
            raise ServerError("server_stalled", f"no answer in {self._timeout:g} seconds") from error
        except self._errors as error:
            raise ServerError("server_closed", summarize_error(error)) from error
        except (ValueError, RecursionError) as error:
            raise ServerError("server_nonsense", summarize_error(error)) from error
        if not isinstance(answer, dict) or not isinstance(content := answer.get("data"), dict):
            raise ServerError("server_nonsense", f"an answer without data: {answer!r}")
        if answer.get("type") != "error":
            return content
        code, reason = content.get("code"), f"{content.get('code')}: {content.get('message')}"
        if kind == "step" and code in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
            raise (OwnError if code == "VALIDATION_ERROR" else RuntimeError)(reason)
        raise ServerError("server_full" if code == "CAPACITY_REACHED" else "server_refused", reason)

    def close(self) -> None:
        """Ends the session. The server closes the connection once it has freed the environment."""
        with suppress(*self._errors):
            self._socket.send('{"type": "close"}')
            self._socket.recv(timeout=1)
        self._socket.close()


def _observation(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the observation, reward and end of an answer. Raises: ServerError."""
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    is_number = reward is None or (isinstance(reward, (int, float)) and math.isfinite(reward))
    if not (isinstance(observation, dict) and is_number and isinstance(done, bool)):
        raise ServerError("server_nonsense", f"no observation: {data!r}")
    return {"observation": observation, "reward": reward, "done": done}


def _tool_result(result: Any) -> Any:
    """Returns what a tool returned: MCP wraps it into `data`, or into texts."""
    if isinstance(result, dict) and result.get("data") is not None:
        return result["data"]
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(parts, list) and all(isinstance(part, dict) and "text" in part for part in parts):
        return "\n".join(str(part["text"]) for part in parts)
    return result


@cache
def _offer(url: str, timeout: float) -> tuple[list[dict[str, Any]], bool]:
    """Returns the schemas of a server's tools, and whether they are MCP tools. Raises: UserError."""
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise UserError(f"config.env.url = {url!r} must be an address such as http://localhost:8000")
    try:
        session = Session(url, timeout)
    except ImportError as error:
        raise UserError(
            "config.env.name = openenv.OpenEnv needs websockets: pip install 'jaxrl_llm[openenv]'"
        ) from error
    except ServerError as error:
        raise _refusal(url, error) from error
    try:
        offer = session.ask("step", {"type": "list_tools"}).get("observation") or {}
        tools = [(t["name"], t.get("description", ""), t["input_schema"]) for t in offer.get("tools", [])]
    except (OwnError, RuntimeError):
        tools = []  # the environment has no MCP tools
    except (ServerError, KeyError, TypeError, AttributeError) as error:
        raise _refusal(url, error) from error
    finally:
        session.close()
    has_mcp = bool(tools)
    if not has_mcp:
        tools = [(STEP, "Takes an action in the environment.", _action_schema(url, timeout))]
    functions = [{"name": name, "description": text, "parameters": schema} for name, text, schema in tools]
    return [{"type": "function", "function": function} for function in functions], has_mcp


def _action_schema(url: str, timeout: float) -> dict[str, Any]:
    """Returns the JSON schema of a server's actions. Raises: UserError."""
    try:
        address = f"http{url.rstrip('/').removeprefix('http').removeprefix('ws')}/schema"
        schema = httpx.get(address, timeout=timeout).raise_for_status().json()["action"]
        properties = {name: value for name, value in schema["properties"].items() if name != "metadata"}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refusal(url, error) from error
    if not properties:
        raise UserError(f"config.env.url = {url!r}: the server offers neither MCP tools nor an action with fields")
    return schema | {"properties": properties}


def _refusal(url: str, error: Exception) -> UserError:
    return UserError(
        f"config.env.url = {url!r}: {error if isinstance(error, ServerError) else summarize_error(error)}; start an "
        "OpenEnv server with room for all episodes of a step (max_concurrent_envs), or correct the address"
    )
