"""What the server does for a request, without HTTP: prompt to token ids, sequences to the engine, calls to traces."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import anyio
from anyio.to_thread import run_sync

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import encoding
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.jax.open_stream import MAX_NUMBER, NewTokens, OpenSequence, StreamSession
from jaxrl_llm.rollout.serving.bodies import ChatBody, Drawing
from jaxrl_llm.rollout.serving.choices import ServedChoice
from jaxrl_llm.rollout.serving.engine_thread import FAILED, EngineThread, QueueFull
from jaxrl_llm.rollout.traces import Trace, TraceCall

LOWEST_TEMPERATURE = 1e-4  # lower temperatures above 0 overflow
MAX_TRACE_TOKENS = 2**22  # most prompt and completion tokens of a session


class RequestError(Exception):
    """A request that is answered with this status and reason."""

    def __init__(self, status: int, reason: str, field_name: str | None = None):
        self.status, self.reason, self.field_name = status, reason, field_name


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model, and the bounds of its requests."""

    name: str
    tokenizer: Any
    stop_ids: frozenset[int]
    vocab_size: int
    max_prompt_tokens: int
    max_completion_tokens: int
    sampling: Sampling  # top_k and top_p of all requests
    max_sessions: int = 1024


class RequestPlan(NamedTuple):
    """How the completions of a request are sampled."""

    numbers: Sequence[int]  # number of each completion, which seeds its random numbers
    max_tokens: Sequence[int]  # most tokens of the completions of each prompt
    temperature: float


@dataclass(eq=False, kw_only=True)
class OpenSession(StreamSession):
    """The trace of one episode, and its running requests."""

    trace: Trace = field(default_factory=Trace)
    running: int = 0


class Service:
    """Answers requests with the engine of one thread."""

    def __init__(self, model: ServedModel, engine: EngineThread):
        self.model, self.engine = model, engine
        self.sessions: dict[str, OpenSession] = {}
        self.counts: Counter[str] = Counter()  # totals for /metrics
        # Number of the next completion whose request has no seed. The numbers go down from MAX_NUMBER, because a seed
        # is the number of its first completion, and users choose small seeds.
        self._next_number = MAX_NUMBER
        self._render_limiter = anyio.CapacityLimiter(1)  # a tokenizer works for one thread at a time

    def check_model(self, name: str) -> None:
        """Raises: RequestError, for the name of another model."""
        if name != self.model.name:
            raise RequestError(404, f"model = {name!r}: this server has {self.model.name!r} only", "model")

    async def chat_tokens(self, body: ChatBody) -> list[int]:
        """Returns the prompt's token ids, as the model's chat template writes the messages."""
        args = dict(body.chat_template_kwargs or {})
        if body.tools:
            args["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
        return await self._encode([message.rendered() for message in body.messages], args)

    async def text_tokens(self, text: str) -> list[int]:
        """Returns the token ids of a text, after the token with which the tokenizer begins texts."""
        return encoding.beginning(self.model.tokenizer) + await self._encode(text, {})

    async def _encode(self, prompt: str | encoding.Chat, args: dict[str, Any]) -> list[int]:
        def encode() -> list[int]:
            return encoding.encode([prompt], self.model.tokenizer, "request", template_args=args)[0].tolist()

        try:
            return await run_sync(encode, limiter=self._render_limiter)
        except UserError as error:
            raise RequestError(400, str(error).removeprefix("request row 1: ")) from None

    def sequences(
        self,
        prompts: Sequence[list[int]],
        drawing: Drawing,
        limit: int | None,
        events: asyncio.Queue,
        session: OpenSession | None,
    ) -> list[OpenSequence]:
        """Returns the sequences of a request, prompt by prompt. `events` gets pairs of an index and new tokens.

        limit: most tokens of a completion, None = as many as the server allows. session: None outside of a session.
        Raises: RequestError.
        """
        plan = self.plan(prompts, drawing, limit, session)
        loop, count = asyncio.get_running_loop(), len(prompts) * (drawing.n or 1)

        def report(index: int, new: NewTokens) -> None:
            loop.call_soon_threadsafe(events.put_nowait, (index, new))

        stop_ids = frozenset(drawing.stop_token_ids or ()) | (
            frozenset() if drawing.ignore_eos else self.model.stop_ids
        )
        return [
            OpenSequence(
                prompt=prompts[i // (drawing.n or 1)],
                number=plan.numbers[i],
                max_tokens=plan.max_tokens[i // (drawing.n or 1)],
                report=partial(report, i),
                temperature=plan.temperature,
                stop_ids=stop_ids,
                session=session,
            )
            for i in range(count)
        ]

    def plan(
        self, prompts: Sequence[list[int]], drawing: Drawing, limit: int | None, session: OpenSession | None
    ) -> RequestPlan:
        """Returns how the completions of a request are sampled: with the seed of the request, or with fresh numbers.

        limit: most tokens of a completion, None = as many as the server allows. session: None outside of a session.
        Raises: RequestError.
        """
        self._check(prompts, drawing, limit)
        count = len(prompts) * (drawing.n or 1)
        unused_number = self._next_number - count + 1
        first_number = unused_number if drawing.seed is None else drawing.seed
        if first_number < 0 or first_number + count - 1 > MAX_NUMBER:
            raise RequestError(400, f"seed = {drawing.seed}: seed + completions must be at most {MAX_NUMBER}", "seed")
        if drawing.seed is None:
            self._next_number -= count
        return RequestPlan(
            numbers=range(first_number, first_number + count),
            max_tokens=[limit or self.model.max_completion_tokens] * len(prompts),
            temperature=1.0 if drawing.temperature is None else drawing.temperature,
        )

    def check_ids(self, prompt: list[int]) -> None:
        """Raises: RequestError, for a token id that the model does not have."""
        if max(prompt) >= self.model.vocab_size:
            raise RequestError(400, f"token id {max(prompt)} must be below {self.model.vocab_size}")

    def _check(self, prompts: Sequence[list[int]], drawing: Drawing, limit: int | None) -> None:
        """Raises: RequestError, for a prompt or a setting that this server cannot honour."""
        model, (lowest, highest) = self.model, (LOWEST_TEMPERATURE, 100)
        for prompt in prompts:
            if not 0 < len(prompt) <= model.max_prompt_tokens:
                raise RequestError(
                    400,
                    f"the prompt has {len(prompt)} tokens, but must have 1 to {model.max_prompt_tokens} "
                    "(--max-prompt-tokens)",
                )
            self.check_ids(prompt)
        if limit and limit > model.max_completion_tokens:
            raise RequestError(
                400,
                f"max_tokens = {limit}: must be at most {model.max_completion_tokens} (--max-completion-tokens)",
                "max_tokens",
            )
        if drawing.temperature is not None and 0 < drawing.temperature < lowest:
            raise RequestError(
                400, f"temperature = {drawing.temperature}: must be 0, or from {lowest} to {highest}", "temperature"
            )
        for name, off in (("top_p", (1,)), ("top_k", (0, -1))):
            value, served = getattr(drawing, name), getattr(model.sampling, name)
            if value is not None and value != served and not (value in off and served in off):
                flag = name.replace("_", "-")
                raise RequestError(
                    400,
                    f"{name} = {value}: this server has {name} = {served} for all requests: leave it out, or "
                    f"start the server with --{flag} {value}",
                    name,
                )

    @asynccontextmanager
    async def session(self, name: str | None) -> AsyncIterator[OpenSession | None]:
        """Yields the session to which a request adds its calls, None outside of one. A new name starts a session."""
        if name is None:
            yield None
            return
        if name not in self.sessions and len(self.sessions) >= self.model.max_sessions:
            raise RequestError(429, f"the server has {len(self.sessions)} sessions: end one with DELETE /sessions/ID")
        session = self.sessions.setdefault(name, OpenSession())
        if session.trace.tokens > MAX_TRACE_TOKENS:
            raise RequestError(413, f"session {name} has more than {MAX_TRACE_TOKENS} tokens: end it with DELETE")
        session.running += 1
        try:
            yield session
        finally:
            session.running -= 1

    async def sample(
        self,
        sequences: list[OpenSequence],
        choices: list[ServedChoice],
        events: asyncio.Queue,
        session: OpenSession | None,
    ) -> AsyncGenerator[ServedChoice]:
        """Samples the sequences into `choices`. Yields a choice whenever it has new tokens, until all have ended.

        events: the queue of `sequences`; None in it says that the client has gone. session: gets the finished
        calls.
        Raises: RequestError. Sequences that have not ended are cancelled, also if the caller leaves.
        """
        try:
            self.engine.submit(sequences)
        except QueueFull:
            raise RequestError(429, f"{self.engine.waiting} sequences wait already: try again later") from None
        except RuntimeError as error:
            raise RequestError(503, str(error)) from None
        try:
            open_choices = len(choices)
            while open_choices:
                event = await events.get()
                if event is None:
                    raise RequestError(499, "the client has gone")
                index, new = event
                choice = choices[index]
                if choice.end:
                    continue  # the engine sampled these tokens before it learned of the stop string
                if new.end == FAILED or not all(map(math.isfinite, new.logprobs)):
                    raise RequestError(500, "the engine has failed, or its log-probabilities are not finite")
                choice.add(new)
                if choice.end:
                    open_choices -= 1
                    self.engine.cancel([sequences[index]])
                    self.record(sequences[index], choice, session)
                yield choice
        finally:
            cancelled = [sequence for sequence, choice in zip(sequences, choices, strict=True) if not choice.end]
            self.counts["cancelled"] += len(cancelled)
            self.engine.cancel(cancelled)

    def record(self, sequence: OpenSequence, choice: ServedChoice, session: OpenSession | None) -> None:
        """Counts a finished completion, and adds it to the trace of its session."""
        self.counts["completions"] += 1
        self.counts["prompt_tokens"] += len(sequence.prompt)
        self.counts["sampled_tokens"] += len(choice.tokens)
        if session is not None:
            ids = tuple(sequence.prompt), tuple(choice.tokens)
            self.counts["restarts"] += session.trace.add(
                TraceCall(*ids, tuple(choice.logprobs), tuple(choice.versions))
            )
