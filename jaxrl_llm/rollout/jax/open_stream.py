"""A stream without an end: sequences arrive at any time, between two decode rounds, and each has a sampling of its own.

It has a fixed number of rows. The row of a sequence is used again after the sequence has ended. The time of arrival
never changes a token, because a sequence's numbers depend on weights, key, completion number and token index alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_llm.rollout.episodes import ENDED
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
class OpenSequence:
    """A completion that somebody outside of the trainer asks for."""

    prompt: list[int]
    number: int  # completion number for its random numbers, up to MAX_NUMBER
    max_tokens: int
    report: Callable[[NewTokens], None]  # gets the new tokens in the stream's thread; must return at once
    temperature: float = 1.0  # 0 = greedy
    stop_ids: frozenset[int] = field(default_factory=frozenset)  # tokens that end it
    cancelled: bool = False  # set by any thread; the stream frees the sequence's slot before its next round


class Arrivals(Protocol):
    """Where an open stream gets its sequences from."""

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
        assert self.sizes.is_open and self.sizes.group_size == 1 and self.draws.temperatures is not None
        self.episodes.states[:] = ENDED
        self.running: dict[int, OpenSequence] = {}  # row of each sequence that has not ended
        self._free_rows = list(range(rows))
        self._reported = [0] * rows  # number of a row's tokens that its sequence has been told
        self._pending: deque[PromptGroup] = deque()  # sequences with a row that wait for a place in the cache

    def run(self) -> None:
        """Samples until `arrivals` ends the stream."""
        with jax.default_device(self.device):
            self._run()

    def _run(self) -> None:
        cache = self.programs.empty_cache()
        while True:
            arrived = self.arrivals.take(len(self._free_rows), wait=not self.running)
            if arrived is None:
                return
            self._pending.extend(self._open(sequence) for sequence in arrived if not sequence.cancelled)
            self._end_cancelled()
            cache = self._prefill(cache, self._admit(self._pending))
            rows = [[m for m in s.holders if self._is_decoding(m)] for s in self.schedulers]
            if count := max(map(len, rows)):
                cache = self._decode(cache, rows, count, some_wait=self.arrivals.some_wait)
            self._retire_ended()
            self._free_ended_rows()

    def _open(self, sequence: OpenSequence) -> PromptGroup:
        """Gives a free row to a sequence."""
        row, count = self._free_rows.pop(), len(sequence.prompt)
        self.running[row] = sequence
        self.prompts.tokens[row], self.prompts.mask[row] = self.pad_id, False
        self.prompts.tokens[row, -count:], self.prompts.mask[row, -count:] = sequence.prompt, True
        self.episodes.restart(row, sequence.max_tokens)
        self._reported[row] = 0
        numbers, temperatures = self.draws
        assert temperatures is not None
        numbers[row], temperatures[row] = sequence.number, sequence.temperature
        return PromptGroup.with_members(row, 1)

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
        """Makes the rows of ended sequences free for others."""
        for row in [row for row in self.running if self.episodes.states[row] == ENDED]:
            del self.running[row]
            self._free_rows.append(row)

    def _end_turns(self, completions: np.ndarray) -> None:
        """Ends sequences at a stop token or their limit, and reports new tokens. completions: rows with new tokens."""
        episodes = self.episodes
        for row in completions.tolist():
            sequence, start = self.running[row], self._reported[row]
            tokens = episodes.tokens[row, start : episodes.lengths[row]].tolist()
            stop = next((i for i, token in enumerate(tokens) if token in sequence.stop_ids), None)
            if stop is not None:
                # Only the model's own stop tokens end the round of a sequence. After others it samples on in vain.
                episodes.drop_tokens(row, start + stop + 1)
                del tokens[stop + 1 :]
            end = "stop" if stop is not None else "length" if episodes.lengths[row] >= sequence.max_tokens else ""
            if end:
                episodes.states[row] = ENDED
            logprobs = episodes.logprobs[row, start : start + len(tokens)].tolist()
            self._reported[row] += len(tokens)
            sequence.report(NewTokens(tokens, logprobs, self.version, end))
