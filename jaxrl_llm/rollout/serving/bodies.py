"""The requests that the server reads. A field is honoured, has no effect as its comment says, or is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jaxrl_llm.rollout.jax.open_stream import MAX_NUMBER

MAX_CHOICES = 128
MAX_STOPS = 16


def refuse_number(value: Any) -> Any:
    """Returns a value that is no number. Raises: ValueError, for 0 and 1, which equal the literals False and True."""
    if type(value) in (int, float):
        raise ValueError("Input should be a valid boolean")
    return value


Yes: TypeAlias = Annotated[Literal[True], BeforeValidator(refuse_number)] | None
No: TypeAlias = Annotated[Literal[False], BeforeValidator(refuse_number)] | None
Zero: TypeAlias = Annotated[float, Field(ge=0, le=0)] | None
One: TypeAlias = Annotated[float, Field(ge=1, le=1)] | None
Ids: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]

# Why a field has a single allowed value, for the answer to a request with another value.
REASONS = {
    "frequency_penalty": "the server samples from the model's own distribution",
    "presence_penalty": "the server samples from the model's own distribution",
    "repetition_penalty": "the server samples from the model's own distribution",
    "logit_bias": "the server samples from the model's own distribution",
    "min_p": "the engine has no min_p",
    "top_logprobs": "the engine returns the log-probability of the sampled token only",
    "logprobs": "the engine returns the log-probability of the sampled token only",
    "response_format": "the engine samples without a grammar",
    "tool_choice": "the engine samples without a grammar, so it cannot force a call",
    "parallel_tool_calls": "the engine samples without a grammar, so it cannot forbid a second call",
    "best_of": "n returns all completions",
    "echo": "the client has the prompt",
}


class StrictModel(BaseModel):
    """A part of a request, without fields that the server does not know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Drawing(StrictModel):
    """How completions are drawn, in each kind of request."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: float | None = None  # must be that of the server
    top_k: int | None = None  # must be that of the server
    min_p: Zero = None
    repetition_penalty: One = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None  # no effect: token ids have all tokens, and texts leave special ones out


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect: chunks are never padded


class TextDrawing(Drawing):
    """Fields of the two kinds of requests of OpenAI."""

    model: str
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    # The next fields have no effect, because they say who asks, or how a provider stores and bills.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class CalledFunction(StrictModel):
    name: str
    arguments: str | dict[str, Any]


class MessageToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # no effect: some clients keep it from a stream


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Clients send the null fields of an answer back.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    def rendered(self) -> dict[str, Any]:
        """Returns the message for a chat template, without absent fields."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        return {"content": ""} | message


class FunctionDescription(StrictModel):
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # no effect: the engine samples without a grammar, and clients check the arguments


class ToolDescription(StrictModel):
    type: Literal["function"]
    function: FunctionDescription


class ResponseFormat(StrictModel):
    type: Literal["text"]


class ChatBody(TextDrawing):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[ToolDescription], Field(min_length=1)] | None = None
    tool_choice: Literal["auto", "none"] | None = None  # "none" leaves calls in the text
    parallel_tool_calls: Yes = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(TextDrawing):
    """Body of POST /v1/completions."""

    prompt: Text | Annotated[list[Text], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    echo: No = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        is_list_of_prompts = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if is_list_of_prompts else [self.prompt]  # pyright: ignore[reportReturnType]


class TokenDrawing(Drawing):
    """`sampling_params` of POST /inference/v1/generate."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None  # without effect: each sampled token has one


class GenerateBody(StrictModel):
    """Body of POST /inference/v1/generate."""

    token_ids: Ids
    sampling_params: TokenDrawing = TokenDrawing()
    model: str | None = None
    stream: No = None
    # The next fields have no effect.
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
