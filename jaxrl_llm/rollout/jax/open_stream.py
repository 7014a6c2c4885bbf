"""A stream without an end: sequences arrive at any time, between two decode rounds, and each has a sampling of its own.

It has a fixed number of rows. The row of a sequence is used again after the sequence has ended. The time of arrival
never changes a token, because a sequence's numbers depend on weights, key, completion number and token index alone.

A session is a conversation of several sequences. If the prompt of a sequence begins with all tokens of the session's
last sequence, it continues in the row of that one, and only the tokens behind them are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_llm.rollout.episodes import AWAITS_ANSWER, ENDED, IN_TURN
from jaxrl_llm.rollout.jax.compiled import CallPrograms
from jaxrl_llm.rollout.jax.scheduler import PromptGroup
from jaxrl_llm.rollout.jax.stream import Stream

MAX_NUMBER = 2**31 - 1  # largest number of a completion


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one sequence that a round has sampled."""

    tokens: list[int]
    logprobs: list[float]
    version: int  # version of the weights
    end: str = ""  # "stop" after a stop token, "length" at the limit, "" if the sequence continues


@dataclass(eq=False, kw_only=True)
class StreamSession:
    """A conversation of several sequences."""

    has_ended: bool = False  # set by any thread; the stream frees the session's row before its next round


@dataclass(eq=False, kw_only=True)
class OpenSequence:
    """A completion that a client outside of the trainer, such as an agent, requests."""

    prompt: list[int]
    number: int  # completion number for its random numbers, up to MAX_NUMBER
    max_tokens: int
    report: Callable[[NewTokens], None]  # gets the new tokens in the stream's thread; must return at once
    temperature: float = 1.0  # 0 = greedy
    stop_ids: frozenset[int] = field(default_factory=frozenset)  # tokens that end it
    session: StreamSession | None = None  # None = no later sequence continues it
    cancelled: bool = False  # set by any thread; the stream frees the sequence's slot before its next round


class Arrivals(Protocol):
    """Queue from which an open stream takes the requested sequences."""

    def take(self, most: int, *, wait: bool) -> list[OpenSequence] | None:
        """Returns up to `most` sequences, the oldest first. wait: whether to wait for at least one.

        Returns None if the stream must end.
        """
        ...

    @property
    def some_wait(self) -> bool:
        """Whether sequences wait to be taken."""
        ...


@dataclass(kw_only=True)
class OpenStream(Stream):
    """Samples the sequences of `arrivals`. The rows of `prompts` and `episodes` belong to the running sequences."""

    programs: CallPrograms  # pyright: ignore[reportIncompatibleVariableOverride]
    arrivals: Arrivals
    version: int  # version of the weights
    device: Any = None  # device for arrays outside of the mesh; None = JAX's default device

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = len(self.prompts.tokens)
        assert self.sizes.is_open and self.sizes.group_size == 1
        self.episodes.states[:] = ENDED
        self.running: dict[int, OpenSequence] = {}  # row of each sequence that has not ended
        self.idle: dict[StreamSession, int] = {}  # row with the last sequence of each session, the oldest first
        self.continued = 0  # number of sequences that continued in the row of an earlier one
        self._free_rows = list(range(rows))
        self._reported = [0] * rows  # number of a row's tokens that its sequence has been told
        self._pending: deque[PromptGroup] = deque()  # sequences with a row that wait for a place in the cache

    def run(self) -> None:
        """Samples until `arrivals` ends the stream."""
        with jax.default_device(self.device):
            self._run()

    def _run(self) -> None:
        """Takes arrived sequences, prefills their prompts and decodes one round, until `arrivals` ends the stream."""
        cache = self.programs.empty_cache()
        while True:
            arrived = self.arrivals.take(len(self._free_rows) + len(self.idle), wait=not self.running)
            if arrived is None:
                return
            self._free_ended_sessions()
            for sequence in arrived:
                if not sequence.cancelled and not self._continue(sequence):
                    self._pending.append(self._open(sequence))
            self._end_cancelled()
            self._free_idle_pages()
            cache = self._prefill(cache, self._admit(self._pending))
            cache = self._feed(cache)
            rows = self._decoding_members()
            if count := max(map(len, rows)):
                cache = self._decode(cache, rows, count, some_wait=self.arrivals.some_wait)
            self._retire_ended()
            self._free_ended_rows()

    @property
    def _has_observations(self) -> bool:
        return True  # what the next prompt of a session adds to its tokens

    def _open(self, sequence: OpenSequence) -> PromptGroup:
        """Gives a free row to a sequence, or the row of the session that has been idle longest."""
        if not self._free_rows:
            self._free_idle(next(iter(self.idle)))
        row, count = self._free_rows.pop(), len(sequence.prompt)
        self.prompts.tokens[row], self.prompts.mask[row] = self.pad_id, False
        self.prompts.tokens[row, -count:], self.prompts.mask[row, -count:] = sequence.prompt, True
        self.episodes.restart(row, sequence.max_tokens)
        self._start(row, sequence)
        return PromptGroup.with_members(row, 1)

    def _continue(self, sequence: OpenSequence) -> bool:
        """Continues the session of a sequence in its row. Returns whether the row has its beginning, and has room.

        Its tokens are the same either way, because its random numbers begin with the first token after its prompt.
        """
        session = sequence.session
        if session is None or (row := self.idle.get(session)) is None:
            return False
        episodes, start = self.episodes, int(self.episodes.lengths[row])
        text = [*self.prompts.tokens[row, self.prompts.mask[row]].tolist(), *episodes.tokens[row, :start].tolist()]
        added = sequence.prompt[len(text) :]
        end = start + len(added)
        if not added or sequence.prompt[: len(text)] != text or end + sequence.max_tokens > episodes.tokens.shape[1]:
            return False
        del self.idle[session]
        episodes.tokens[row, start:end], episodes.states[row] = added, IN_TURN
        episodes.lengths[row] = episodes.turn_start[row] = end
        episodes.max_tokens[row] = end + sequence.max_tokens
        self._start(row, sequence)
        self.continued += 1
        return True

    def _start(self, row: int, sequence: OpenSequence) -> None:
        """Lets a sequence begin at the end of a row's tokens."""
        self.running[row] = sequence
        length = self._reported[row] = int(self.episodes.lengths[row])
        numbers, temperatures, starts = self.draws
        assert temperatures is not None and starts is not None
        numbers[row], temperatures[row], starts[row] = sequence.number, sequence.temperature, length

    def _end_cancelled(self) -> None:
        """Ends the sequences that nobody waits for."""
        for row, sequence in self.running.items():
            if sequence.cancelled:
                self.episodes.states[row] = ENDED
        for group in [group for group in self._pending if self.episodes.states[group.number] == ENDED]:
            self._pending.remove(group)
        self._retire_ended()
        self._free_ended_rows()

    def _free_ended_rows(self) -> None:
        """Makes the rows of ended sequences free for later sequences."""
        for row in [row for row in self.running if self.episodes.states[row] == ENDED]:
            del self.running[row]
            self._free_rows.append(row)

    def _free_idle(self, session: StreamSession) -> None:
        """Makes the row of an idle session free for later sequences."""
        row = self.idle.pop(session)
        self.episodes.states[row] = ENDED
        self._retire_ended()
        self._free_rows.append(row)

    def _free_ended_sessions(self) -> None:
        for session in [session for session in self.idle if session.has_ended]:
            self._free_idle(session)

    def _free_idle_pages(self) -> None:
        """Frees idle sessions, the oldest first, while the cache may have too few pages for the next round.

        Otherwise the scheduler would take the pages of a running sequence.
        """
        if self.sizes.pages >= self.sizes.sequences * self.sizes.max_sequence_pages:
            return

        def may_lack_pages() -> bool:
            # Decoding takes at most one further page for each sequence in a round.
            pending = len(self._pending)
            return any(s.free_pages < len(s.page_holders) + pending for s in self.schedulers)

        while self.idle and may_lack_pages():
            self._free_idle(next(iter(self.idle)))

    def _end_turns(self, completions: np.ndarray) -> None:
        """Ends sequences at a stop token or their limit, and reports new tokens. completions: rows with new tokens."""
        episodes = self.episodes
        for row in completions.tolist():
            sequence, start = self.running[row], self._reported[row]
            tokens = episodes.tokens[row, start : episodes.lengths[row]].tolist()
            stop_index = next((index for index, token in enumerate(tokens) if token in sequence.stop_ids), None)
            if stop_index is not None:
                # Only the model's own stop tokens end a sequence within a round. After a stop token of the request, the
                # round has sampled further tokens, which are dropped.
                episodes.drop_tokens(row, start + stop_index + 1)
                del tokens[stop_index + 1 :]
            is_full = episodes.lengths[row] >= episodes.max_tokens[row]
            end = "stop" if stop_index is not None else "length" if is_full else ""
            if end:
                self._end(row, sequence.session)
            logprobs = episodes.logprobs[row, start : start + len(tokens)].tolist()
            self._reported[row] += len(tokens)
            sequence.report(NewTokens(tokens, logprobs, self.version, end))

    def _end(self, row: int, session: StreamSession | None) -> None:
        """Ends the sequence of a row. A session keeps the row for its next sequence."""
        if session is None:
            self.episodes.states[row] = ENDED
            return
        if session in self.idle:  # another branch of the session
            self._free_idle(session)
        self.episodes.states[row] = AWAITS_ANSWER
        self.idle[session] = row
        del self.running[row]
