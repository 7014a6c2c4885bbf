"""Tools of MCP servers, which are programs that speak over standard input and output, or have an address."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from threading import Thread
from typing import Any

from jaxrl_llm.config.schema import Positive
from jaxrl_llm.errors import UserError, summarize_error
from jaxrl_llm.machine import extras
from jaxrl_llm.tasks.protocol import OwnError, Reply, ServerError
from jaxrl_llm.tasks.tools import answer_calls

WRONG_CALLS = (-32601, -32602)  # codes of JSON-RPC for a tool that does not exist, and for wrong arguments
CLOSED = -32000  # code of MCP for a connection that has ended
STALLED = (-32001, 408)  # codes of MCP for a request without an answer in time


class MCPTools:
    """Environment whose tools are those of an MCP server. A turn without a call ends the episode.

    All episodes of a process share one connection, so the server must keep no state of an episode. A failure of the
    server is an error of the call, and the next call connects again.
    """

    stops = ()

    def __init__(self, *, server: str, timeout: Positive = 30.0):
        """server: address, such as http://127.0.0.1:8000/mcp, or command, such as "python my_server.py".

        timeout: seconds to wait for an answer of the server. Raises: UserError, if the package mcp is missing, or if
        the server does not answer or has no tools.
        """
        connection = _connection(server, timeout)
        self.schemas, self._failures = connection.schemas, Counter[str]()
        names = [schema["function"]["name"] for schema in self.schemas]
        self._functions = {name: partial(self._call, connection, name) for name in names}

    def reset(self, row: dict[str, Any]) -> None:
        """Ignores the row."""

    def step(self, text: str) -> Reply:
        """Makes all calls of the turn, in order. Counts a failure of the server under its name."""
        self._failures.clear()
        reply = answer_calls(text, self._functions)
        return replace(reply, metrics=reply.metrics | {name: float(count) for name, count in self._failures.items()})

    def _call(self, connection: Connection, tool: str, /, **arguments: Any) -> str:
        try:
            return connection.call(tool, arguments)
        except ServerError as error:
            self._failures[error.metric] += 1
            raise


class Connection:
    """A connection to a server, which any number of threads may use."""

    def __init__(self, server: str, timeout: float):
        """Connects. Raises: ServerError."""
        self._server, self._timeout = server, timeout
        self._loop, self._client = asyncio.new_event_loop(), None
        Thread(target=self._loop.run_forever, name="MCP", daemon=True).start()
        try:
            self.schemas = self._wait(self._list_tools())
        except Exception:
            self._loop.call_soon_threadsafe(self._loop.stop)  # which ends the thread
            raise

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Returns the result of a tool as text. Raises: OwnError, for a call that the tool refuses; ServerError."""
        result = self._wait(self._ask("call_tool", tool, arguments))
        # Parts that are no text, such as images, are named, because the policy cannot read them.
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise OwnError(text)
        return text

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _list_tools(self) -> list[dict[str, Any]]:
        """Returns the JSON schemas of the server's tools, for the chat template."""
        tools, page = [], None
        while page is None or page.next_cursor:
            page = await self._ask("list_tools", cursor=page and page.next_cursor)
            tools += page.tools
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name, "description": tool.description or "", "parameters": tool.input_schema,
                },
            }
            for tool in tools
        ]  # fmt: skip

    async def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Returns the answer to a request. Raises: OwnError, for a wrong call; ServerError."""
        from mcp import MCPError

        client = await self._connected()
        used = self._client
        try:
            return await asyncio.wait_for(getattr(client, method)(*arguments, **options), self._timeout + 1)
        except Exception as error:
            code = error.code if isinstance(error, MCPError) else CLOSED
            if code in WRONG_CALLS:
                raise OwnError(summarize_error(error)) from error
            if code in STALLED or isinstance(error, TimeoutError):
                raise ServerError("server_stalled", f"no answer in {self._timeout:g} seconds") from error
            if isinstance(error, ValueError):  # the result has not the form of MCP, but the connection works
                raise ServerError("server_nonsense", summarize_error(error)) from error
            if code != CLOSED:  # an answer, after which the connection works for the other episodes
                raise ServerError("server_errors", summarize_error(error)) from error
            if self._client is used:  # otherwise another episode has connected again already
                self._client = None
                self._dropped.set()
            raise ServerError("server_closed", summarize_error(error)) from error

    async def _connected(self) -> Any:
        """Returns a client that is connected. Raises: ServerError."""
        if self._client is None:
            self._client, self._dropped = self._loop.create_future(), asyncio.Event()
            self._task = self._loop.create_task(self._hold_open(self._client, self._dropped))
        return await asyncio.shield(self._client)

    async def _hold_open(self, connected: asyncio.Future[Any], dropped: asyncio.Event) -> None:
        """Opens a client, and closes it when it is dropped, because the task that opened a client must close it."""
        from mcp import Client, StdioServerParameters

        server: Any = self._server
        try:
            if not server.startswith(("http://", "https://")):
                command, *arguments = shlex.split(server)
                server = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
            async with Client(server, read_timeout_seconds=self._timeout) as client:
                connected.set_result(client)
                await dropped.wait()
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):  # the client's tasks fail as a group
                error = error.exceptions[0]
            if not connected.done():
                self._client = None
                connected.set_exception(ServerError("server_unreachable", summarize_error(error)))


def _without_traceback(record: logging.LogRecord) -> bool:
    """Removes the traceback from a log record of the client, and keeps the record."""
    record.exc_info = record.exc_text = None
    return True


@cache
def _connection(server: str, timeout: float) -> Connection:
    """Returns the connection of this process to a server. Raises: UserError, if it offers no tools."""
    extras.require("mcp", "mcp", "config.env.name = 'mcp.MCPTools'")
    # The client logs each line of the server that is no JSON. The call that it should answer counts as stalled.
    logging.getLogger("mcp.client.stdio").addFilter(_without_traceback)
    field = f"config.env.server = {server!r}"
    try:
        connection = Connection(server, timeout)
    except (ServerError, OwnError) as error:
        raise UserError(f"{field}: {error}: start the server, or correct the address or the command") from error
    if not connection.schemas:
        raise UserError(f"{field}: this server offers no tools: use another server")
    return connection
