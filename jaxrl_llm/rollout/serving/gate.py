"""What stands between the network and the routes: the key, the size of bodies, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl_llm.rollout.serving.service import RequestError

MAX_BODY_BYTES = 2**23
BODY_SECONDS = 10.0  # seconds in which a body must arrive


def error_response(status: int, reason: str, field_name: str | None = None) -> JSONResponse:
    """Returns an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": reason, "type": kind, "param": field_name, "code": status}
    return JSONResponse({"error": error}, status)


class Gate:
    """Checks the key and the size of each request before the application reads it."""

    def __init__(self, app: ASGIApp, key: str, max_body_bytes: int):
        self._app, self._key, self._max_body_bytes = app, key, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope, receive)
        try:
            sent_key = request.headers.get("authorization", "").removeprefix("Bearer ")
            if (
                self._key
                and request.url.path != "/health"
                and not hmac.compare_digest(sent_key.encode(), self._key.encode())
            ):
                raise RequestError(401, "the key is missing or wrong: send the header Authorization: Bearer KEY")
            body = await self._read(request)
        except RequestError as error:
            return await error_response(error.status, error.reason)(scope, receive, send)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, request: Request) -> bytes:
        """Reads the body of a request. Raises: RequestError, if it is too large or too slow."""
        body = bytearray()
        try:
            with anyio.fail_after(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._max_body_bytes:
                        raise RequestError(413, f"a request may have at most {self._max_body_bytes} bytes")
        except TimeoutError:
            raise RequestError(408, f"a request must arrive within {BODY_SECONDS:g} seconds") from None
        except ClientDisconnect:
            raise RequestError(499, "the client has gone") from None
        return bytes(body)


@asynccontextmanager
async def watched(request: Request) -> AsyncIterator[asyncio.Queue]:
    """Yields a queue of events, which gets None when the client has gone."""
    events: asyncio.Queue = asyncio.Queue()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        events.put_nowait(None)

    task = asyncio.create_task(watch())
    try:
        yield events
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
