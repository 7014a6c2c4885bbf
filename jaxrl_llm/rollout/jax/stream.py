"""The stream of a call's sequences through the programs of the engine.

The host looks at the sequences after each round. It retires those that have ended, gives their places to others, puts
observations into the pages, and lets all that are in a turn go on. How long a tool takes changes which sequences
compute together, and so no number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.rollout.episodes import ENDED, TURN, Episodes
from jaxrl_llm.rollout.jax.layout import chunked, fed, new_prompts, numbered, round_rows
from jaxrl_llm.rollout.jax.programs import Cache, FedChunks, NewPrompts, RoundRows, Sampled
from jaxrl_llm.rollout.jax.scheduler import Member, PromptGroup, Scheduler, emptiest
from jaxrl_llm.rollout.jax.sizes import CHUNKS, ROUND, StreamSizes
from jaxrl_llm.rollout.protocol import Environments
from jaxrl_llm.structs import AnyArray, Prompts

# Seconds in which other answers may join the first: a round costs the same for one and for all.
GRACE = 0.01
REFILL = 8  # a round ends when one of so many sequences has ended and others wait


class Calls(Protocol):
    """The programs as a stream calls them (`compiled.CallPrograms`); a plan counts the calls instead."""

    sizes: StreamSizes

    @property
    def mesh(self) -> Mesh: ...

    def prefill(self, cache: Cache | None, prompts: NewPrompts) -> tuple[Cache, AnyArray, AnyArray]: ...

    def feed(self, cache: Cache, chunks: FedChunks) -> Cache: ...

    def decode(self, cache: Cache, rows: RoundRows, below: int) -> tuple[Cache, Sampled]: ...


@dataclass
class Stream:
    """The sequences of a call of this process."""

    calls: Calls
    schedulers: list[Scheduler]  # of the devices of this process
    prompts: Prompts
    texts: Episodes
    first: int  # number of the first completion of this process among those of all
    stop_ids: tuple[int, ...]
    pad_id: int
    environments: Environments | None = None
    enough: int = 0  # complete groups with which the call ends; 0: all, and no completion is one of an earlier call
    ended: Callable[[int], None] = lambda count: None  # gets how many more completions have ended

    def __post_init__(self) -> None:
        self.sizes, self.mesh = self.calls.sizes, self.calls.mesh
        self.complete: list[int] = []  # groups, in the order in which they became complete
        self._open = np.ones(len(self.prompts.tokens), bool)  # groups that are not in `complete`
        self._asked: set[Future[list[int] | None]] = set()  # answers that were under way before the last round
        self.computed = self.places = 0  # of the decode programs, over their steps

    def run(self) -> None:
        """Samples until enough groups are complete."""
        cache: Cache | None = None
        pending = self._pending()
        while True:
            self._take_answers()
            self._retire()
            self.ended(self.texts.newly_ended())
            limits = self._limits()
            goal = lambda member: self._goal(member, limits)  # noqa: E731, B023
            new = [scheduler.schedule(goal) for scheduler in self.schedulers]
            while pending and (scheduler := emptiest(self.schedulers)):
                scheduler.add(pending.popleft())
                new[self.schedulers.index(scheduler)] += scheduler.admit(goal)
            cache = self._prefill(cache, new)
            cache = self._feed(cache)
            rows = [[m for m in s.holders if self._goes_on(m)] for s in self.schedulers]
            pages = max(sum(len(m.pages) for m in members) for members in rows)
            waiting = bool(pending) or any(s.waiting for s in self.schedulers)
            goes_on = len(self._completed()) < (self.enough or len(self.prompts.tokens))
            state = [max(map(len, rows)), pages, waiting, goes_on]
            # All processes must call the same programs: the largest numbers say which.
            count, pages, waiting, goes_on = sharding.max_over_processes(np.array(state, np.int32), self.mesh).tolist()
            self._asked = set(self.texts.answers)
            if not goes_on:
                return self._take_answers()
            if count:
                cache = self._decode(cache, rows, count, pages, waiting=bool(waiting))
            elif self.texts.answers and not self.enough:
                wait(self.texts.answers, return_when=FIRST_COMPLETED)
                wait(self.texts.answers, timeout=GRACE)

    def _take_answers(self) -> None:
        """Appends the observations that are there. With `enough` it waits for those asked for before the last round."""
        if self.enough:
            # How far an episode comes must not depend on the time of tools: the next call goes on from there.
            wait(self._asked)
        self.texts.take_answers(self._asked if self.enough else None)

    def _pending(self) -> deque[PromptGroup]:
        """Returns the groups whose completions have not all ended, in their order."""
        groups = [PromptGroup.of(b, self.sizes.group) for b in range(len(self.prompts.tokens))]
        for group in groups:
            group.members = [member for member in group.members if self.texts.state[member.number] != ENDED]
        return deque(group for group in groups if group.members)

    def _completed(self) -> list[int]:
        """Returns `complete`, with the groups that have become complete since the last time."""
        ended = (self.texts.state == ENDED).reshape(-1, self.sizes.group).all(axis=1)
        self.complete += np.flatnonzero(ended & self._open).tolist()
        self._open &= ~ended
        return self.complete

    def _goes_on(self, member: Member) -> bool:
        return self.texts.state[member.number] == TURN and self.texts.length[member.number] > 0

    def _limits(self) -> np.ndarray:
        """Returns the length [N] at which the turn of each completion ends."""
        turn = self.environments.turn_tokens if self.environments else self.texts.tokens.shape[1]
        return self.texts.limits(turn)

    def _goal(self, member: Member, limits: np.ndarray) -> int:
        """Returns the tokens of a sequence that are in its pages after the next round, at most."""
        i = member.number
        if self.texts.state[i] != TURN:
            return member.cached
        observed = self._observation(member)
        return min(max(member.cached, observed - 1) + ROUND, max(int(limits[i]), 2) - 1)

    def _observation(self, member: Member) -> int:
        """Returns the place behind the observation that comes next in a sequence; 0: a token of the policy does."""
        place = member.cached + 1
        drawn = self.texts.drawn(member.number, place)
        if not len(drawn) or drawn[0]:
            return 0
        # What an earlier call has sampled, with other weights, is fed like an observation.
        return place + int(np.argmax(drawn) if drawn.any() else len(drawn))

    def _retire(self) -> None:
        """Takes sequences that have ended out of the schedulers."""
        for scheduler in self.schedulers:
            for member in [*scheduler.holders, *scheduler.waiting]:
                if self.texts.state[member.number] == ENDED:
                    scheduler.retire(member)

    def _end(self, turns: np.ndarray) -> None:
        """Looks at completions with new tokens."""
        if self.environments:
            self.texts.end_turns(turns, self.environments, self.stop_ids)
        else:
            self.texts.end(turns, self.stop_ids)

    def _prefill(self, cache: Cache | None, new: list[list[PromptGroup]]) -> Cache:
        """Runs the prompts of new groups, and appends the first tokens of their sequences."""
        if cache is not None and not self.sizes.refills:
            # All groups have begun: the processes have nothing to agree on.
            return cache
        count = sharding.max_over_processes(np.array([max(map(len, new))], np.int32), self.mesh)[0]
        first, turns = 0, list[int]()
        while cache is None or first < count:
            # One size serves all that begin later: rows of two sizes may differ in their last bits, and when a tool
            # answers decides how many groups begin at once.
            size = self.sizes.begins if cache is None else self.sizes.refill
            arrays = new_prompts(new, first, size, self.sizes, self.prompts, first_number=self.first, pad=self.pad_id)
            cache, *sampled = self.calls.prefill(cache, sharding.shard_batch(arrays, self.mesh))
            first_tokens, logprobs = sharding.to_host(tuple(sampled))
            WATCHDOG.report_progress()
            for d, n, begun in numbered(new, first, size):
                for i in self._without_tokens(begun):
                    g = i % self.sizes.group
                    self.texts.append(i, first_tokens[d, n, g : g + 1], logprobs[d, n, g : g + 1])
                    turns.append(i)
            first += size
        if turns:
            self._end(np.array(turns))
            self._retire()
        return cache

    def _without_tokens(self, group: PromptGroup) -> list[int]:
        return [member.number for member in group.members if not self.texts.length[member.number]]

    def _feed(self, cache: Cache) -> Cache:
        """Puts observations into the pages."""
        if not (self.environments or self.enough):
            return cache

        def ends(member: Member) -> int:
            return self._observation(member) - 1 if self._goes_on(member) else 0

        # The last token of an observation is for the decode program.
        rounds = chunked([[(member, ends(member)) for member in each.holders] for each in self.schedulers])
        # sizes[round, width] has the largest number of chunks of a device, because all processes must feed alike.
        sizes = np.zeros((self.sizes.length // max(CHUNKS) + 4, len(CHUNKS)), np.int32)
        for (number, width), chunks in rounds.items():
            sizes[number, CHUNKS.index(width)] = max(map(len, chunks))
        sizes = sharding.max_over_processes(sizes.ravel(), self.mesh).reshape(sizes.shape)
        rows = self.sizes.feeds
        for number, kind in np.argwhere(sizes).tolist():
            width = CHUNKS[kind]
            chunks = rounds.get((number, width), [[]] * len(self.schedulers))
            for first in range(0, int(sizes[number, kind]), rows):
                part = [each[first : first + rows] for each in chunks]
                arrays = fed(part, rows, width, self.sizes, self.prompts, self.texts)
                cache = self.calls.feed(cache, sharding.shard_batch(arrays, self.mesh))
                for chunk in (chunk for each in part for chunk in each):
                    chunk.member.cached = chunk.end
        return cache

    def _decode(self, cache: Cache, rows: list[list[Member]], count: int, pages: int, *, waiting: bool) -> Cache:
        """Lets sequences go on. count, pages: the largest numbers of sequences and of their pages on a device."""
        texts = self.texts
        slots = self.sizes.fitting(count, pages)
        arrays = round_rows(rows, slots, self.sizes, self.prompts, texts, self._limits(), first_number=self.first)
        below = self._below(count, pages, waiting=waiting)
        cache, sampled = self.calls.decode(cache, sharding.shard_batch(arrays, self.mesh), below)
        tokens, logprobs, counts = sharding.to_host(sampled)
        WATCHDOG.report_progress()
        self.computed, self.places = self.computed + int(counts.sum()), self.places + counts.size * int(counts.max())
        turns = []
        for d, n, member in numbered(rows, 0, slots.count):
            i, new = member.number, slice(int(texts.length[member.number]) - member.cached - 1, int(counts[d, n]))
            member.cached += new.stop
            if new.start < new.stop:
                texts.append(i, tokens[d, n, new], logprobs[d, n, new])
                turns.append(i)
        if turns:
            self._end(np.array(turns))
        for members in rows:
            for member in members:
                # A turn may have ended in the middle of what was sampled: what is behind is written over.
                member.cached = min(member.cached, int(texts.length[member.number]) - 1)
        return cache

    def _below(self, count: int, pages: int, *, waiting: bool) -> int:
        """Returns the number of sequences of a device with which a round ends, because the host has other work."""
        refill = count - max(count // REFILL, 1) if waiting else 0
        if self.environments:
            # A round ends when a third of its sequences wait for their environments, because a round with fewer wastes
            # much.
            return max(refill, count * 2 // 3)
        smaller = [s.count for s in self.sizes.slots if s.count < count and pages * s.count <= s.pages * count]
        return max(refill, *smaller, 0)
