"""A client of OpenEnv servers: messages of a session over WebSocket, and the tools that a server offers."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from functools import cache
from typing import Any

import httpx

from jaxrl_llm.errors import UserError, summarize_error
from jaxrl_llm.tasks.protocol import OwnError, ServerError

__all__: tuple[str, ...] = ()  # a config may name no function of this file
STEP = "step"  # tool of an environment with actions of its own; MCP tools may not have this name


class OpenEnvSession:
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


def read_observation(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the observation, reward and end of an answer. Raises: ServerError."""
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    is_number = reward is None or (isinstance(reward, (int, float)) and math.isfinite(reward))
    if not (isinstance(observation, dict) and is_number and isinstance(done, bool)):
        raise ServerError("server_nonsense", f"no observation: {data!r}")
    return {"observation": observation, "reward": reward, "done": done}


def unwrap_result(result: Any) -> Any:
    """Returns what a tool returned: MCP wraps it into `data`, or into texts."""
    if isinstance(result, dict) and result.get("data") is not None:
        return result["data"]
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(parts, list) and all(isinstance(part, dict) and "text" in part for part in parts):
        return "\n".join(str(part["text"]) for part in parts)
    return result


@cache
def offered_tools(url: str, timeout: float) -> tuple[list[dict[str, Any]], bool]:
    """Returns the schemas of a server's tools, and whether they are MCP tools. Raises: UserError."""
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise UserError(f"config.env.url = {url!r} must be an address such as http://localhost:8000")
    try:
        session = OpenEnvSession(url, timeout)
    except ImportError as error:
        raise UserError(
            "config.env.name = openenv.OpenEnv needs websockets: pip install 'jaxrl_llm[openenv]'"
        ) from error
    except ServerError as error:
        raise refusal(url, error) from error
    try:
        offer = session.ask("step", {"type": "list_tools"}).get("observation") or {}
        tools = [(t["name"], t.get("description", ""), t["input_schema"]) for t in offer.get("tools", [])]
    except (OwnError, RuntimeError):
        tools = []  # the environment has no MCP tools
    except (ServerError, KeyError, TypeError, AttributeError) as error:
        raise refusal(url, error) from error
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
        raise refusal(url, error) from error
    if not properties:
        raise UserError(f"config.env.url = {url!r}: the server offers neither MCP tools nor an action with fields")
    return schema | {"properties": properties}


def refusal(url: str, error: Exception) -> UserError:
    return UserError(
        f"config.env.url = {url!r}: {error if isinstance(error, ServerError) else summarize_error(error)}; start an "
        "OpenEnv server with room for all episodes of a step (max_concurrent_envs), or correct the address"
    )
