"""The routes of `jaxrl serve`: OpenAI's chat and text completions, token ids in and out, sessions and metrics."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from jaxrl_llm import __version__
from jaxrl_llm.rollout.serving.answers import TextAnswer
from jaxrl_llm.rollout.serving.bodies import REASONS, ChatBody, CompletionBody, GenerateBody
from jaxrl_llm.rollout.serving.choices import ServedChoice
from jaxrl_llm.rollout.serving.gate import MAX_BODY_BYTES, Gate, error_response, watched
from jaxrl_llm.rollout.serving.schemas import (
    ERRORS,
    ChatAnswer,
    CompletionAnswer,
    GenerateAnswer,
    HealthAnswer,
    ModelList,
    TraceAnswer,
    success,
)
from jaxrl_llm.rollout.serving.service import RequestError, Service


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
        async with watched(request) as events, service.session(session_name) as session:
            sequences = service.sequences(prompts, body, limit, events, session)
            async with aclosing(service.sample(sequences, answer.choices, events, session)) as updates:
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
    async with watched(request) as events, service.session(request.path_params.get("session_id")) as session:
        sequences = service.sequences(prompts, drawing, drawing.max_tokens, events, session)
        async for _ in service.sample(sequences, choices, events, session):
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
    app = FastAPI(title="jaxrl serve", version=__version__, docs_url=None, redoc_url=None, responses=ERRORS)
    app.add_middleware(Gate, key=key, max_body_bytes=max_body_bytes)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    for router, prefix in ((_sampling_routes(service), ""), (_session_routes(service), "/sessions/{session_id}")):
        app.include_router(router, prefix=prefix)

    @app.get("/health", responses=success(HealthAnswer))
    async def health() -> JSONResponse:
        if service.engine.error:
            return error_response(503, "the engine has failed")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        engine, lines = service.engine, list[str]()
        gauges = {"running": engine.running, "waiting": engine.waiting, "sessions": len(service.sessions)}
        names = ("completions", "cancelled", "prompt_tokens", "sampled_tokens", "restarts")
        for kind, values in (("gauge", gauges), ("counter", {f"{name}_total": service.counts[name] for name in names})):
            for name, value in values.items():
                lines += [f"# TYPE jaxrl_{name} {kind}", f"jaxrl_{name} {value}"]
        return PlainTextResponse("\n".join([*lines, ""]))

    # FastAPI describes a status 422 for each body, but `_invalid` answers with 400.
    for operations in app.openapi()["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return app


def _sampling_routes(service: Service) -> APIRouter:
    """Returns the routes that sample, and the list of models."""
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=success(ChatAnswer, streams=True))
    async def chat(request: Request, body: ChatBody) -> Any:
        return await respond(request, service, body)

    @router.post("/v1/completions", responses=success(CompletionAnswer, streams=True))
    async def completions(request: Request, body: CompletionBody) -> Any:
        return await respond(request, service, body)

    @router.post("/inference/v1/generate", responses=success(GenerateAnswer))
    async def generated(request: Request, body: GenerateBody) -> Any:
        return await generate(request, service, body)

    @router.get("/v1/models", responses=success(ModelList))
    async def models() -> Any:
        length = service.model.max_prompt_tokens + service.model.max_completion_tokens
        model = {"id": service.model.name, "object": "model", "created": 0, "owned_by": "jaxrl_llm"}
        return {"object": "list", "data": [model | {"max_model_len": length}]}

    return router


def _session_routes(service: Service) -> APIRouter:
    """Returns the routes of a session, which sample, return its trace, and end it."""
    router = APIRouter(dependencies=[Depends(check_session_id)])
    router.include_router(_sampling_routes(service))

    def trace_of(session_id: str) -> dict[str, Any]:
        """Returns the calls of a session as a tree of token ids."""
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

    @router.get("", responses=success(TraceAnswer))
    async def trace(session_id: str) -> Any:
        return trace_of(session_id)

    @router.delete("", responses=success(TraceAnswer))
    async def end(session_id: str) -> Any:
        final = trace_of(session_id)
        if final["running"]:
            raise RequestError(409, f"session {session_id} has {final['running']} running requests: wait for them")
        service.sessions.pop(session_id).has_ended = True
        return final

    return router


async def _invalid(request: Request, error: Any) -> JSONResponse:
    """Returns the answer to a request whose body has a wrong or unknown field."""
    first = error.errors()[0]
    name = ".".join(str(x) for x in first["loc"][1:])
    if not request.headers.get("content-type", "").startswith("application/json"):
        return error_response(400, "the body must be JSON: send it with the header content-type: application/json")
    if first["type"] == "json_invalid":
        return error_response(400, f"the body must be JSON: {first['ctx']['error']}")
    problem = "this server does not know the field" if first["type"] == "extra_forbidden" else first["msg"]
    reason = REASONS.get(str(first["loc"][-1]) if len(first["loc"]) > 1 else "")
    because = f", because {reason}" if reason and first["type"] != "extra_forbidden" else ""
    return error_response(400, f"{name or 'body'}: {problem}{because}", name or None)


async def _refused(request: Request, error: Any) -> JSONResponse:
    return error_response(error.status, error.reason, error.field_name)


async def _http_error(request: Request, error: Any) -> JSONResponse:
    answer = error_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    answer.headers.update(error.headers or {})
    # Status 405 names the allowed methods. Starlette knows those of one route, but GET and DELETE of a session are two.
    path = re.sub("^/sessions/[^/]+", "/sessions/{session_id}", request.url.path)
    if "Allow" in answer.headers and (methods := request.app.openapi()["paths"].get(path)):
        answer.headers["Allow"] = ", ".join(map(str.upper, methods))
    return answer
