"""The server's side of an episode: its limits, the numbers of its completions, and its trace."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.rollout.jax.open_stream import OpenSequence
from jaxrl_llm.rollout.serving.bodies import Drawing
from jaxrl_llm.rollout.serving.choices import ServedChoice
from jaxrl_llm.rollout.serving.engine_thread import EngineThread
from jaxrl_llm.rollout.serving.service import OpenSession, RequestError, RequestPlan, ServedModel, Service

OFF_VALUES = ({1}, {0, -1})  # values with which a request switches top_p off, and those for top_k


@dataclass(eq=False, kw_only=True)
class AgentSession(OpenSession):
    """One episode of an agent."""

    first_number: int  # number of its first completion
    number_step: int  # difference between the numbers of one completion and the next
    prompt_tokens: int  # P
    completion_tokens: int  # C
    max_calls: int
    calls: int = 0  # completions that have begun
    reached_limit: bool = False  # whether a limit of tokens or calls ended it
    tree_tokens: int = 0  # tokens of the trace's tree
    common: np.ndarray | None = None  # beginning of all its prompts, at most P tokens
    texts: list[np.ndarray] = field(default_factory=list)  # tokens of each finished call
    cut_numbers: set[int] = field(default_factory=set)  # numbers of completions that the limit of the episode may cut
    requests: list[asyncio.Queue] = field(default_factory=list)  # events of its requests

    def tokens_left(self, prompt: np.ndarray) -> int:
        """Returns how many tokens a completion of this prompt may have."""
        common = prompt if self.common is None else self.common
        common_tokens = min(shared_tokens(common, prompt), self.prompt_tokens)
        return self.completion_tokens + common_tokens - self.tree_tokens - self._new_tokens(prompt)

    def begin(self, prompt: np.ndarray) -> None:
        """Notes a prompt whose completions are sampled now."""
        common = prompt if self.common is None else self.common
        self.common = prompt[: min(shared_tokens(common, prompt), self.prompt_tokens)]

    def finish(self, prompt: np.ndarray, completion: Sequence[int]) -> None:
        """Notes a finished call."""
        self.tree_tokens += self._new_tokens(prompt) + len(completion)
        self.texts.append(np.concatenate([prompt, np.asarray(completion, np.int32)]))

    def _new_tokens(self, prompt: np.ndarray) -> int:
        """Returns the number of a prompt's tokens that the tree does not have."""
        return len(prompt) - max((shared_tokens(text, prompt) for text in self.texts), default=0)


def shared_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of equal tokens at the beginning."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


class AgentService(Service):
    """Answers the requests of agents, each in the session of its episode, with the distribution of the run."""

    def __init__(self, model: ServedModel, sampling: Sampling):
        """sampling: distribution of the run's rollouts."""
        super().__init__(model, EngineThread(0))
        self._sampling, self._temperature = sampling, sampling.temperature
        self._loop: asyncio.AbstractEventLoop | None = None  # of the server, None before the first request

    def begin_batch(self, engine: EngineThread, temperature: float) -> None:
        """Answers with this engine from now on."""
        self.engine, self._temperature = engine, temperature

    def open_session(self, session: AgentSession) -> str:
        """Returns the name of a new session."""
        # The name is a secret, because it is the only key of the session.
        name = secrets.token_hex(16)
        self.sessions[name] = session
        return name

    def end_session(self, name: str, session: AgentSession) -> None:
        """Ends a session: its running requests fail, and its trace no longer changes."""

        async def end() -> None:
            session.has_ended = True
            self.sessions.pop(name, None)
            for events in session.requests:
                events.put_nowait(None)

        # The server's thread ends it, so that no request of the session is between two of its steps.
        if self._loop and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        else:
            asyncio.run(end())

    @asynccontextmanager
    async def session(self, name: str | None) -> AsyncIterator[OpenSession | None]:
        """Yields the session of an episode. Raises: RequestError, if the episode does not exist or has ended."""
        self._loop = asyncio.get_running_loop()
        if name is None:
            raise RequestError(404, "this server answers the agents of a run only: use the address of an episode")
        if not (session := self.sessions.get(name)):
            raise RequestError(404, "this episode has ended")
        session.running += 1
        try:
            yield session
        finally:
            session.running -= 1

    def sequences(
        self,
        prompts: Sequence[list[int]],
        drawing: Drawing,
        limit: int | None,
        events: asyncio.Queue,
        session: OpenSession | None,
    ) -> list[OpenSequence]:
        """Returns the sequences of a request, as `Service.sequences`. Raises: RequestError."""
        sequences = super().sequences(prompts, drawing, limit, events, session)
        assert isinstance(session, AgentSession)
        session.requests.append(events)
        return sequences

    def plan(
        self, prompts: Sequence[list[int]], drawing: Drawing, limit: int | None, session: OpenSession | None
    ) -> RequestPlan:
        """Returns how the completions of a request are sampled, within the limits of its episode.

        Raises: RequestError.
        """
        assert isinstance(session, AgentSession)
        if session.has_ended:
            raise RequestError(404, "this episode has ended")
        self._check_distribution(drawing)
        copies = drawing.n or 1
        count = len(prompts) * copies
        if session.calls + count > session.max_calls:
            session.reached_limit = True
            raise RequestError(400, f"the episode has had its {session.max_calls} completions (config.env.calls)")
        max_tokens = []
        for prompt in prompts:
            self.check_ids(prompt)
            room = session.tokens_left(np.asarray(prompt, np.int32))
            if room < 1:
                session.reached_limit = True
                raise RequestError(
                    400,
                    f"with this prompt of {len(prompt)} tokens the episode has no room for a completion: its limit is "
                    f"{session.completion_tokens} tokens (config.rollout.max_completion_tokens) after a prompt of at "
                    f"most {session.prompt_tokens} (config.data.max_prompt_tokens)",
                )
            max_tokens.append(min(limit or room, room))
        for prompt in prompts:
            session.begin(np.asarray(prompt, np.int32))
        numbers = [session.first_number + (session.calls + i) * session.number_step for i in range(count)]
        session.calls += count
        session.cut_numbers.update(x for i, x in enumerate(numbers) if max_tokens[i // copies] != limit)
        return RequestPlan(numbers=numbers, max_tokens=max_tokens, temperature=self._temperature)

    def record(self, sequence: OpenSequence, choice: ServedChoice, session: OpenSession | None) -> None:
        """Adds a finished completion to the trace of its episode."""
        assert isinstance(session, AgentSession)
        if session.has_ended:
            return
        super().record(sequence, choice, session)
        session.finish(np.asarray(sequence.prompt, np.int32), choice.tokens)
        session.reached_limit |= choice.end == "length" and sequence.number in session.cut_numbers

    def _check_distribution(self, drawing: Drawing) -> None:
        """Raises: RequestError, for a setting that would sample from another distribution than the run learns with."""
        if drawing.seed is not None:
            raise RequestError(400, f"seed = {drawing.seed}: the run numbers its completions: leave it out", "seed")
        for name in ("temperature", "top_p", "top_k"):
            value, run_value = getattr(drawing, name), getattr(self._sampling, name)
            if value is not None and value != run_value and not any({value, run_value} <= off for off in OFF_VALUES):
                raise RequestError(
                    400, f"{name} = {value}: the run samples with rollout.{name} = {run_value}: leave it out", name
                )
