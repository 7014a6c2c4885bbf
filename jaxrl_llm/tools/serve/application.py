"""The routes of `jaxrl serve`: OpenAI's chat and text completions, token ids in and out, sessions and metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import groupby
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl_llm import __version__
from jaxrl_llm.tools.serve.bodies import REASONS, ChatBody, CompletionBody, GenerateBody, TextDrawing
from jaxrl_llm.tools.serve.choices import ServedChoice
from jaxrl_llm.tools.serve.service import RequestError, Service

MAX_BODY_BYTES = 2**23
BODY_SECONDS = 10.0  # seconds in which a body must arrive
STATUSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in (
        (400, "a field is wrong, or cannot be honoured"),
        (401, "the key is missing or wrong"),
        (404, "another model"),
        (408, "the body came too slowly"),
        (413, "the body or the session is too large"),
        (429, "the queue is full"),
        (503, "the engine has failed"),
    )
}


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


class TextAnswer:
    """The answers to one request, whole or in pieces, in OpenAI's form."""

    def __init__(self, service: Service, body: TextDrawing, prompts: list[list[int]]):
        self.service, self.body, self.prompts = service, body, prompts
        self.is_chat = isinstance(body, ChatBody)
        # A request for texts says 0, which equals False.
        self.wants_logprobs = not any(getattr(body, "logprobs", None) is x for x in (None, False))
        self.wants_ids = bool(body.return_token_ids)
        kind = "chat.completion" if self.is_chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if self.is_chat and body.stream else ""),
            "created": int(time.time()),
            "model": service.model.name,
        }
        parses_calls = isinstance(body, ChatBody) and bool(body.tools) and body.tool_choice != "none"
        self.choices = [
            ServedChoice(i, service.model.tokenizer, body.stops, parses_calls)
            for i in range(len(prompts) * (body.n or 1))
        ]
        self._told = [0] * len(self.choices)  # tokens of each choice that chunks have told

    def whole(self) -> dict[str, Any]:
        """Returns the answer to a request without `stream`."""
        choices = [self._choice(choice, 0) | self._content(choice) for choice in self.choices]
        ids = {"prompt_token_ids": self.prompts[0]} if self.is_chat and self.wants_ids else {}
        return self.head | ids | {"choices": choices, "usage": self.usage()}

    def _content(self, choice: ServedChoice) -> dict[str, Any]:
        if not self.is_chat:
            return {"text": choice.text}
        content = choice.text or (None if choice.calls else "")
        calls = {"tool_calls": choice.calls} if choice.calls else {}
        return {"message": {"role": "assistant", "content": content} | calls}

    def usage(self) -> dict[str, int]:
        prompt, sampled = sum(map(len, self.prompts)), sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks before the first token."""
        if not self.is_chat:
            return []
        role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunks = [self.head | {"choices": [{"index": choice.index} | role]} for choice in self.choices]
        if self.wants_ids:
            chunks[0]["prompt_token_ids"] = self.prompts[0]
        return chunks

    def chunk(self, choice: ServedChoice) -> dict[str, Any] | None:
        """Returns the chunk with what is new in a choice; None if nothing is."""
        piece, start = choice.next_piece(), self._told[choice.index]
        if not (piece or choice.end or self.wants_logprobs or self.wants_ids):
            return None
        part = self._choice(choice, start)
        self._told[choice.index] = len(choice.tokens)
        if self.is_chat:
            calls = [{"index": i} | call for i, call in enumerate(choice.calls)] if choice.end else []
            part["delta"] = ({"content": piece} if piece else {}) | ({"tool_calls": calls} if calls else {})
        else:
            part["text"] = piece
        return self.head | {"choices": [part]}

    def _choice(self, choice: ServedChoice, start: int) -> dict[str, Any]:
        """Returns the fields of a choice that chat and text share. start: first token to tell."""
        part: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
        if self.wants_logprobs:
            part["logprobs"] = self._logprobs(choice, start)
        if self.wants_ids:
            part["token_ids"] = choice.tokens[start:]
            if not self.is_chat and start == 0:
                part["prompt_token_ids"] = self.prompts[choice.index // (self.body.n or 1)]
        return part

    def _logprobs(self, choice: ServedChoice, start: int) -> dict[str, Any]:
        texts = [choice.tokenizer.decode([token]) for token in choice.tokens[start:]]
        logprobs = choice.logprobs[start:]
        if not self.is_chat:
            return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


async def respond(request: Request, service: Service, body: ChatBody | CompletionBody) -> Any:
    """Answers a request for text."""
    service.check_model(body.model)
    limit = body.max_tokens
    if isinstance(body, ChatBody):
        prompts = [await service.chat_tokens(body)]
        limit = body.max_completion_tokens or limit
    else:
        prompts = [x if isinstance(x, list) else await service.text_tokens(x) for x in body.prompts]
    if body.stream_options and not body.stream:
        raise RequestError(400, "stream_options has no effect without stream: remove it", "stream_options")
    answer, session_name = TextAnswer(service, body, prompts), request.path_params.get("session_id")

    async def sampled() -> AsyncGenerator[ServedChoice]:
        """Yields the choices with new tokens."""
        async with watched(request) as events, service.session(session_name) as trace:
            sequences = service.sequences(prompts, body, limit, events)
            async with aclosing(service.sample(sequences, answer.choices, events, trace)) as updates:
                async for choice in updates:
                    yield choice

    updates = sampled()
    if not body.stream:
        async for _ in updates:
            pass
        return JSONResponse(answer.whole())
    # The first token is awaited before the status is sent, so that a refusal has a status of its own.
    first = await anext(updates)
    return StreamingResponse(_stream(answer, first, updates), media_type="text/event-stream")


async def _stream(answer: TextAnswer, first: ServedChoice, updates: AsyncGenerator[ServedChoice]) -> AsyncIterator[str]:
    """Yields the server-sent events of a request. first: choice that `updates` has yielded already."""

    def event(data: Any) -> str:
        return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

    options = answer.body.stream_options
    usage = {"usage": None} if options and options.include_usage else {}
    try:
        for chunk in [*answer.first_chunks(), answer.chunk(first)]:
            if chunk:
                yield event(chunk | usage)
        async for choice in updates:
            if chunk := answer.chunk(choice):
                yield event(chunk | usage)
        if usage:
            yield event(answer.head | {"choices": [], "usage": answer.usage()})
    except RequestError as error:
        yield event(json.loads(bytes(error_response(error.status, error.reason).body)))
    finally:
        await updates.aclose()
    yield "data: [DONE]\n\n"


async def generate(request: Request, service: Service, body: GenerateBody) -> Any:
    """Answers a request with token ids by token ids."""
    if body.model is not None:
        service.check_model(body.model)
    drawing, prompts = body.sampling_params, [body.token_ids]
    choices = [ServedChoice(i, service.model.tokenizer) for i in range(drawing.n or 1)]
    async with watched(request) as events, service.session(request.path_params.get("session_id")) as trace:
        sequences = service.sequences(prompts, drawing, drawing.max_tokens, events)
        async for _ in service.sample(sequences, choices, events, trace):
            pass
    return {
        "request_id": body.request_id or uuid.uuid4().hex,
        "choices": [
            {
                "index": choice.index,
                "token_ids": choice.tokens,
                "finish_reason": choice.end,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob}
                        for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
                    ]
                },
                "weight_versions": _spans(choice.versions),
            }
            for choice in choices
        ],
    }


def _spans(versions: list[int]) -> list[dict[str, int]]:
    """Returns the pieces of a completion that were sampled with one version of the weights."""
    spans, start = list[dict[str, int]](), 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


SessionId = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


async def check_session_id(session_id: SessionId) -> None:
    """Adds the parameter `session_id`, with its pattern, to each route that depends on this function."""


def application(service: Service, *, key: str = "", max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """Returns the ASGI application. key: key that each request needs, "" = none."""
    app = FastAPI(title="jaxrl serve", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, key=key, max_body_bytes=max_body_bytes)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    for router, prefix in ((_sampling_routes(service), ""), (_session_routes(service), "/sessions/{session_id}")):
        app.include_router(router, prefix=prefix)

    @app.get("/health")
    async def health() -> JSONResponse:
        if service.engine.error:
            return error_response(503, "the engine has failed")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        engine, lines = service.engine, list[str]()
        gauges = {"running": engine.running, "waiting": engine.waiting, "sessions": len(service.sessions)}
        names = ("completions", "cancelled", "prompt_tokens", "sampled_tokens", "restarts")
        for kind, values in (("gauge", gauges), ("counter", {f"{name}_total": service.counts[name] for name in names})):
            for name, value in values.items():
                lines += [f"# TYPE jaxrl_{name} {kind}", f"jaxrl_{name} {value}"]
        return PlainTextResponse("\n".join([*lines, ""]))

    return app


def _sampling_routes(service: Service) -> APIRouter:
    """Returns the routes that sample, and the list of models."""
    router = APIRouter(responses=STATUSES)

    @router.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Any:
        return await respond(request, service, body)

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Any:
        return await respond(request, service, body)

    @router.post("/inference/v1/generate")
    async def generated(request: Request, body: GenerateBody) -> Any:
        return await generate(request, service, body)

    @router.get("/v1/models")
    async def models() -> Any:
        length = service.model.max_prompt_tokens + service.model.max_completion_tokens
        model = {"id": service.model.name, "object": "model", "created": 0, "owned_by": "jaxrl_llm"}
        return {"object": "list", "data": [model | {"max_model_len": length}]}

    return router


def _session_routes(service: Service) -> APIRouter:
    """Returns the routes of a session: those that sample, its trace, and its end."""
    router = APIRouter(responses=STATUSES, dependencies=[Depends(check_session_id)])
    router.include_router(_sampling_routes(service))

    def trace_of(session_id: str) -> dict[str, Any]:
        if not (session := service.sessions.get(session_id)):
            raise RequestError(404, f"session {session_id} does not exist")
        trace = session.trace
        nodes = [
            {"parent": parent, "token_ids": node.tokens}
            | ({"logprobs": node.logprobs, "weight_versions": node.versions} if node.is_sampled else {})
            for parent, node in trace.nodes()
        ]
        counts = {"calls": len(trace.calls), "branches": len(trace.branches()), "restarts": trace.restarts}
        return {"id": session_id, "running": session.running} | counts | {"nodes": nodes}

    @router.get("")
    async def trace(session_id: str) -> Any:
        return trace_of(session_id)

    @router.delete("")
    async def end(session_id: str) -> Any:
        final = trace_of(session_id)
        if final["running"]:
            raise RequestError(409, f"session {session_id} has {final['running']} running requests: wait for them")
        del service.sessions[session_id]
        return final

    return router


async def _invalid(request: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    name = ".".join(str(x) for x in first["loc"][1:])
    if first["type"] == "json_invalid":
        return error_response(400, f"the body must be JSON: {first['ctx']['error']}")
    problem = "this server does not know the field" if first["type"] == "extra_forbidden" else first["msg"]
    reason = REASONS.get(str(first["loc"][-1]) if len(first["loc"]) > 1 else "")
    because = f", because {reason}" if reason and first["type"] != "extra_forbidden" else ""
    return error_response(400, f"{name or 'body'}: {problem}{because}", name or None)


async def _refused(request: Request, error: Any) -> JSONResponse:
    return error_response(error.status, error.reason, error.field_name)


async def _http_error(request: Request, error: Any) -> JSONResponse:
    return error_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
