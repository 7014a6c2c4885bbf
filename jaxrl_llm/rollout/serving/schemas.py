"""The bodies of the server's answers, for its OpenAPI schema at /openapi.json. No code builds answers with them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class AnswerModel(BaseModel):
    """A part of an answer. A field with a default may be absent."""

    model_config = ConfigDict(extra="forbid")


class Error(AnswerModel):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: int


class ErrorAnswer(AnswerModel):
    error: Error


class TokenUsage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CallFunction(AnswerModel):
    name: str
    arguments: str


class ToolCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: CallFunction


class AssistantMessage(AnswerModel):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatToken(AnswerModel):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any]


class ChatLogprobs(AnswerModel):
    content: list[ChatToken]
    refusal: None


class ChatChoice(AnswerModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None
    message: AssistantMessage
    token_ids: list[int] | None = None


class ChatAnswer(AnswerModel):
    """Answer of POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] | None = None


class TextLogprobs(AnswerModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: None


class TextChoice(AnswerModel):
    index: int
    finish_reason: Literal["stop", "length"]
    logprobs: TextLogprobs | None
    text: str
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(AnswerModel):
    """Answer of POST /v1/completions without `stream`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage


class IdToken(AnswerModel):
    token: str  # "token_id:" and the id
    logprob: float


class IdLogprobs(AnswerModel):
    content: list[IdToken]


class VersionSpan(AnswerModel):
    """Tokens `start` to `end` - 1 of a completion, which one version of the weights sampled."""

    version: int
    start: int
    end: int


class IdChoice(AnswerModel):
    index: int
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    logprobs: IdLogprobs
    weight_versions: list[VersionSpan]


class GenerateAnswer(AnswerModel):
    """Answer of POST /inference/v1/generate."""

    request_id: str
    choices: list[IdChoice]


class ModelCard(AnswerModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(AnswerModel):
    object: Literal["list"]
    data: list[ModelCard]


class AnsweredNode(AnswerModel):
    """Consecutive tokens of a trace. A node that the model sampled has log-probabilities and versions."""

    parent: int  # index of the node before it in `nodes`, -1 for a first node
    token_ids: list[int]
    logprobs: list[float] | None = None
    weight_versions: list[int] | None = None


class TraceAnswer(AnswerModel):
    """Answer of GET and DELETE /sessions/ID."""

    id: str
    running: int
    calls: int
    branches: int
    restarts: int
    nodes: list[AnsweredNode]


class HealthAnswer(AnswerModel):
    status: Literal["ok"]


# Statuses of errors of all routes.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": HTTPStatus(status).phrase}
    for status in (400, 401, 404, 408, 409, 413, 429, 500, 503)
}


def success(answer: type[AnswerModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Returns the description of status 200. streams: whether a request may ask for server-sent events instead."""
    content = {"content": {"text/event-stream": {}}} if streams else {}
    return {200: {"model": answer, "description": "OK"} | content}
