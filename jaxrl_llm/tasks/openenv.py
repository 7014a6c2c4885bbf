"""Environments on OpenEnv servers, over WebSocket: MCP environments, and environments with actions of their own."""

from __future__ import annotations

import json
import time
import warnings
from functools import partial
from typing import Any

from jaxrl_llm.config.schema import Positive
from jaxrl_llm.tasks.first_texts import TEXT_COLUMN, append_text
from jaxrl_llm.tasks.openenv_client import OpenEnvSession, offered_tools, read_observation, refusal, unwrap_result
from jaxrl_llm.tasks.protocol import OwnError, Reply, ServerError
from jaxrl_llm.tasks.tools import answer_calls

CAPACITY_WAIT = 2.0  # seconds to wait for sessions that have ended, but which the server has not closed yet


class OpenEnv:
    """Environment of an episode on an OpenEnv server. A failure of the server costs the episode, never the run."""

    stops = ()

    def __init__(self, *, url: str, timeout: Positive = 30.0, reset_columns: tuple[str, ...] = ("seed",)):
        """url: address of the server; timeout: seconds to wait for an answer of the server.

        reset_columns: columns of a row that are sent with `reset`, if the row has them. Raises: UserError, if a package
        is missing, or if the server does not answer or offers no tools and no actions.
        """
        self._url, self._timeout, self._reset_columns = url, timeout, reset_columns
        self.schemas, self._has_mcp = offered_tools(url, timeout)
        self._functions = {name: partial(self._call, name) for name in (s["function"]["name"] for s in self.schemas)}
        self._session: OpenEnvSession | None = None
        self._failure, self._is_done, self._rewards, self._turn_reward = "", False, 0, 0.0

    def prepare_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns a row whose last message ends with the first observation, if the server sends one."""
        try:
            text = self._start(row)
        except ServerError as error:
            raise refusal(self._url, error) from error
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
        metrics = reply.metrics | ({self._failure: 1.0} if self._failure else {})
        is_over = reply.done or self._is_done or bool(self._failure)
        return Reply(reply.observation, done=is_over, metrics=metrics, reward=self._turn_reward)

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
                self._session = OpenEnvSession(self._url, self._timeout)
                observation = read_observation(self._session.ask("reset", data))["observation"]
                break
            except ServerError as error:
                self._close()
                if error.metric != "server_full" or time.monotonic() > give_up:
                    raise
                time.sleep(0.1)
        shown = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
        return f"\n\n{json.dumps(shown, ensure_ascii=False)}" if shown else None

    def _call(self, name: str, /, **arguments: Any) -> Any:
        """Returns the result of a tool. Raises: OwnError, for a wrong call; ServerError, if the server fails."""
        if self._failure or self._is_done or not self._session:
            raise OwnError("the episode is over")
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments} if self._has_mcp else arguments
        try:
            answer = read_observation(self._session.ask("step", action))
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
        return unwrap_result(observation.get("result"))

    def _fail(self, error: ServerError) -> None:
        self._failure = error.metric
        warnings.warn(f"an OpenEnv server failed: {error}; episode/{error.metric} counts it", stacklevel=2)

    def _close(self) -> None:
        session, self._session = self._session, None
        if session:
            session.close()
