"""Runs the sequences of one call through the engine's programs.

After each decode round the host checks the sequences. It retires ended sequences, admits others in their place, writes
observations into pages, and lets the remaining sequences decode. The time of a tool decides which sequences decode
together. This order never changes a sampled token, because a row's results do not depend on the other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.machine import transfers
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.rollout.episodes import ENDED, IN_TURN, Episodes
from jaxrl_llm.rollout.jax.drafts import DraftHistory
from jaxrl_llm.rollout.jax.layout import (
    Draws,
    enumerate_items,
    new_prompts,
    observation_chunks,
    round_rows,
    split_observations,
)
from jaxrl_llm.rollout.jax.programs import Cache, NewPrompts, ObservationChunks, RoundRows, Sampled
from jaxrl_llm.rollout.jax.scheduler import Member, PromptGroup, Scheduler, least_loaded
from jaxrl_llm.rollout.jax.sizes import CHUNK_TOKENS, MAX_SMALL_CHUNKS, ROUND_TOKENS, StreamSizes
from jaxrl_llm.rollout.protocol import EpisodeEnvironments
from jaxrl_llm.structs import AnyArray, Prompts

# Seconds to wait for further answers of tools after the first, because a round for one answer costs as much as for all.
ANSWER_GRACE_SECONDS = 0.01
# While other sequences wait for a slot, a decode round ends as soon as one in REFILL_SHARE sequences has ended.
REFILL_SHARE = 8


class StreamPrograms(Protocol):
    """The programs that a stream calls. `compiled.CallPrograms` runs them; `jaxrl plan` only counts the calls."""

    sizes: StreamSizes

    @property
    def mesh(self) -> Mesh: ...

    def prefill(self, cache: Cache | None, prompts: NewPrompts) -> tuple[Cache, AnyArray, AnyArray]: ...

    def grow(self, cache: Cache, pages: int) -> Cache: ...

    def feed(self, cache: Cache, chunks: ObservationChunks) -> Cache: ...

    def decode(self, cache: Cache, rows: RoundRows, running_threshold: int) -> tuple[Cache, Sampled]: ...


@dataclass
class Stream:
    """One call of the engine in this process: samples the completions of `prompts` into `episodes`."""

    programs: StreamPrograms
    schedulers: list[Scheduler]  # one for each device of this process
    prompts: Prompts
    episodes: Episodes
    draws: Draws
    stop_ids: tuple[int, ...]
    pad_id: int
    environments: EpisodeEnvironments | None = None  # None if completions have a single turn
    # Number of complete groups with which the call ends. 0 = all groups; then no group started in an earlier call.
    wanted_groups: int = 0
    required_groups: list[int] = field(default_factory=list)  # numbers of the groups that `wanted_groups` must include
    report_ended: Callable[[int], None] = lambda count: None  # gets the number of newly ended completions
    history: DraftHistory = field(default_factory=DraftHistory)  # texts that the programs with drafts use

    def __post_init__(self) -> None:
        self.sizes, self.mesh = self.programs.sizes, self.programs.mesh
        self.complete_groups: list[int] = []  # group numbers, in the order in which the groups became complete
        self._incomplete = np.ones(len(self.prompts.tokens), bool)  # True for groups outside `complete_groups`
        self._awaited_answers: set[Future[list[int] | None]] = set()  # answers that were pending before the last round
        # Tokens that the decode programs computed, and the tokens that their slots could have computed.
        self.computed_tokens = self.slot_steps = 0
        # Forward passes of all sequences in the decode programs; fewer than tokens if drafts were right.
        self.passes = 0

    def run(self) -> None:
        """Samples until the wanted groups are complete."""
        cache: Cache | None = None
        pending_groups = self._pending_groups()
        while True:
            self._append_answers()
            self._retire_ended()
            self.report_ended(self.episodes.count_newly_ended())
            new_groups = self._admit(pending_groups)
            cache = self._prefill(cache, new_groups)
            cache = self._feed(self._grow(cache))
            rows = self._decoding_members()
            some_wait = bool(pending_groups) or any(scheduler.waiting for scheduler in self.schedulers)
            complete_count = len(self._update_complete_groups())
            continues = complete_count < (self.wanted_groups or len(self.prompts.tokens))
            continues |= bool(self._incomplete[self.required_groups].any())
            state = [max(map(len, rows)), some_wait, continues]
            # All processes must call the same programs, so the largest numbers of all processes choose them.
            count, some_wait, continues = transfers.max_over_processes(np.array(state, np.int32), self.mesh).tolist()
            self._awaited_answers = set(self.episodes.pending_answers)
            if not continues:
                return self._append_answers()
            if count:
                cache = self._decode(cache, rows, count, some_wait=bool(some_wait))
            elif self.episodes.pending_answers and not self.wanted_groups:
                wait(self.episodes.pending_answers, return_when=FIRST_COMPLETED)
                wait(self.episodes.pending_answers, timeout=ANSWER_GRACE_SECONDS)

    def first_groups(self) -> list[int]:
        """Returns the numbers of `wanted_groups` groups: the required ones, and then those that were complete first."""
        return sorted(self.complete_groups, key=lambda group: group not in self.required_groups)[: self.wanted_groups]

    def _append_answers(self) -> None:
        """Appends the observations that have arrived.

        With `wanted_groups`, it waits for exactly the answers that were pending before the last round. The next call
        continues the episodes, so their progress must not depend on the time of tools.
        """
        if self.wanted_groups:
            wait(self._awaited_answers)
        self.episodes.append_answers(self._awaited_answers if self.wanted_groups else None)

    def _admit(self, pending_groups: deque[PromptGroup]) -> list[list[PromptGroup]]:
        """Admits sequences and moves groups from `pending_groups` to devices. Returns each device's new groups."""
        limits = self._turn_limits()

        def needed_tokens(member: Member) -> int:
            return self._tokens_after_round(member, limits)

        new_groups = [scheduler.schedule(needed_tokens) for scheduler in self.schedulers]
        while pending_groups and (scheduler := least_loaded(self.schedulers)):
            scheduler.add(pending_groups.popleft())
            new_groups[self.schedulers.index(scheduler)] += scheduler.admit(needed_tokens)
        return new_groups

    def _pending_groups(self) -> deque[PromptGroup]:
        """Returns the groups with completions that have not ended, in the order of their prompts."""
        prompt_count = len(self.prompts.tokens)
        groups = [PromptGroup.with_members(number, self.sizes.group_size) for number in range(prompt_count)]
        for group in groups:
            group.members = [member for member in group.members if self.episodes.states[member.number] != ENDED]
        return deque(group for group in groups if group.members)

    def _update_complete_groups(self) -> list[int]:
        """Adds the newly complete groups to `complete_groups`, and returns that list."""
        group_ended = (self.episodes.states == ENDED).reshape(-1, self.sizes.group_size).all(axis=1)
        self.complete_groups += np.flatnonzero(group_ended & self._incomplete).tolist()
        self._incomplete &= ~group_ended
        return self.complete_groups

    def _is_decoding(self, member: Member) -> bool:
        """Returns whether a sequence can decode: it is in a turn, and the prefill has sampled its first token."""
        return self.episodes.states[member.number] == IN_TURN and self.episodes.lengths[member.number] > 0

    def _decoding_members(self) -> list[list[Member]]:
        """Returns the sequences of each device that the next decode round can continue."""
        return [
            [member for member in scheduler.page_holders if self._is_decoding(member)] for scheduler in self.schedulers
        ]

    def _turn_limits(self) -> np.ndarray:
        """Returns the length at which the current turn of each completion ends, 0 outside of turns: [completions]."""
        turn_tokens = self.environments.turn_tokens if self.environments else self.episodes.tokens.shape[1]
        return self.episodes.turn_limits(turn_tokens)

    def _tokens_after_round(self, member: Member, limits: np.ndarray) -> int:
        """Returns the most tokens of a sequence that its pages hold after the next round.

        limits: length at which the turn of each completion ends, from `_turn_limits`.
        """
        if self.episodes.states[member.number] != IN_TURN:
            return member.cached
        cached_before_round = max(member.cached, self._observation_end(member) - 1)
        # The round does not compute keys and values of the last token of a turn.
        cached_at_limit = max(int(limits[member.number]), 2) - 1
        return min(cached_before_round + ROUND_TOKENS, cached_at_limit)

    def _observation_end(self, member: Member) -> int:
        """Returns the number of tokens up to the end of the observation that comes next in a sequence.

        Returns 0 if no observation comes next, because the policy samples the next token in this call. Tokens that an
        earlier call sampled count as an observation: the engine writes them into pages without sampling them again.
        """
        first_known = member.cached + 1
        # Nearly always the token after the cached ones is the last known token, and the policy samples the next one.
        if first_known == self.episodes.lengths[member.number]:
            return 0
        is_sampled = self.episodes.sampled_by_this_call(member.number, first_known)
        if not len(is_sampled) or is_sampled[0]:
            return 0
        return first_known + int(np.argmax(is_sampled) if is_sampled.any() else len(is_sampled))

    def _retire_ended(self) -> None:
        """Removes the ended sequences from the schedulers."""
        for scheduler in self.schedulers:
            for member in [*scheduler.page_holders, *scheduler.waiting]:
                if self.episodes.states[member.number] == ENDED:
                    scheduler.retire(member)

    def _end_turns(self, completions: np.ndarray) -> None:
        """Ends the turns that are over. completions: numbers of the completions that have new tokens."""
        if self.environments:
            self.episodes.end_turns(completions, self.environments, self.stop_ids)
        else:
            self.episodes.end_single_turns(completions, self.stop_ids)

    def _prefill(self, cache: Cache | None, new_groups: list[list[PromptGroup]]) -> Cache:
        """Runs the prompts of new groups, and appends the first tokens of their sequences."""
        if cache is not None and not self.sizes.refills:
            # Return early, because all groups have started and no process has a prompt to run.
            return cache
        count = transfers.max_over_processes(np.array([max(map(len, new_groups))], np.int32), self.mesh)[0]
        first, changed = 0, list[int]()
        while cache is None or first < count:
            # All later prompts run in programs of one size. Rows of two sizes may differ in their last bits, and the
            # time of tools decides how many groups start together.
            size = self.sizes.first_prefill_prompts if cache is None else self.sizes.later_prefill_prompts
            arrays = new_prompts(
                new_groups, first, size, sizes=self.sizes, prompts=self.prompts, draws=self.draws, pad=self.pad_id
            )
            cache, *sampled = self.programs.prefill(cache, transfers.shard_batch(arrays, self.mesh))
            first_tokens, logprobs = transfers.to_host(tuple(sampled))
            WATCHDOG.report_progress()
            for device, row, group in enumerate_items(new_groups, first, size):
                for number in self._without_tokens(group):
                    index_in_group = number % self.sizes.group_size
                    new = device, row, slice(index_in_group, index_in_group + 1)
                    self.episodes.append(number, first_tokens[new], logprobs[new])
                    changed.append(number)
            first += size
        if changed:
            self._end_turns(np.array(changed))
            self._retire_ended()
        return cache

    def _grow(self, cache: Cache) -> Cache:
        """Enlarges the cache if the schedulers have given pages that it does not have."""
        if self.sizes.allocated_pages == self.sizes.pages:
            return cache
        reach = np.array([max(scheduler.reach for scheduler in self.schedulers)], np.int32)
        grown = self.sizes.with_room_for(int(transfers.max_over_processes(reach, self.mesh)[0]))
        if grown == self.sizes:
            return cache
        self.sizes = grown
        return self.programs.grow(cache, grown.allocated_pages)

    @property
    def _has_observations(self) -> bool:
        """Whether sequences may hold tokens that this call has not sampled."""
        return bool(self.environments or self.wanted_groups)

    def _without_tokens(self, group: PromptGroup) -> list[int]:
        """Returns the numbers of a group's completions that have no token yet."""
        return [member.number for member in group.members if not self.episodes.lengths[member.number]]

    def _feed(self, cache: Cache) -> Cache:
        """Writes observations into pages, except for their last token, which the decode program takes."""
        if not self._has_observations:
            return cache

        def chunks_end(member: Member) -> int:
            """Returns how many tokens of a sequence are in pages after this call; at most 0 if it writes none."""
            return self._observation_end(member) - 1 if self._is_decoding(member) else 0

        chunks_by_index = split_observations(
            [[(member, chunks_end(member)) for member in scheduler.page_holders] for scheduler in self.schedulers]
        )
        # counts[index, width] is the number of chunks of the device with the most chunks. The processes exchange it,
        # because all of them must call the same programs. At most MAX_SMALL_CHUNKS small chunks end an observation.
        max_chunks = self.sizes.completion_length // max(CHUNK_TOKENS) + MAX_SMALL_CHUNKS + 1
        counts = np.zeros((max_chunks, len(CHUNK_TOKENS)), np.int32)
        for (index, width), chunks in chunks_by_index.items():
            counts[index, CHUNK_TOKENS.index(width)] = max(map(len, chunks))
        counts = transfers.max_over_processes(counts.ravel(), self.mesh).reshape(counts.shape)
        rows = self.sizes.fed_sequences
        for index, width_index in np.argwhere(counts).tolist():
            width = CHUNK_TOKENS[width_index]
            chunks = chunks_by_index.get((index, width), [[]] * len(self.schedulers))
            for first in range(0, int(counts[index, width_index]), rows):
                part = [device_chunks[first : first + rows] for device_chunks in chunks]
                arrays = observation_chunks(
                    part, rows, width, sizes=self.sizes, prompts=self.prompts, episodes=self.episodes
                )
                cache = self.programs.feed(cache, transfers.shard_batch(arrays, self.mesh))
                for chunk in (chunk for device_chunks in part for chunk in device_chunks):
                    chunk.member.cached = chunk.end
        return cache

    def _decode(self, cache: Cache, rows: list[list[Member]], count: int, *, some_wait: bool) -> Cache:
        """Runs one decode round, and appends its tokens to the episodes. Returns the new cache.

        rows: decoding sequences of each device of this process. count: most sequences on a device of any process.
        some_wait: whether sequences wait for admission in any process.
        """
        episodes = self.episodes
        slots = self.sizes.smallest_slots(count)
        limits = self._turn_limits()
        arrays = round_rows(
            rows, slots, sizes=self.sizes, prompts=self.prompts, episodes=episodes, limits=limits, draws=self.draws
        )
        if drafted := self.sizes.drafted(slots):
            drafts = self.history.drafts(rows, (slots.count, drafted), self.prompts, episodes)
            arrays = arrays._replace(drafts=drafts)
        min_running = self._running_threshold(count, some_wait=some_wait)
        cache, sampled = self.programs.decode(cache, transfers.shard_batch(arrays, self.mesh), min_running)
        tokens, logprobs, counts, passes = transfers.to_host(sampled)
        WATCHDOG.report_progress()
        self.computed_tokens += int(counts.sum())
        self.passes += int(passes.sum())
        self.slot_steps += counts.size * int(passes.max())
        changed = []
        for device, row, member in enumerate_items(rows, 0, slots.count):
            number = member.number
            # Pages hold all known tokens but the last, unless a preemption has freed pages. Then the round first
            # repeats known tokens, and only its later tokens are new.
            repeated_count = int(episodes.lengths[number]) - 1 - member.cached
            new = slice(repeated_count, int(counts[device, row]))
            member.cached += new.stop
            if new.start < new.stop:
                episodes.append(number, tokens[device, row, new], logprobs[device, row, new])
                changed.append(number)
        if changed:
            self._end_turns(np.array(changed))
        for members in rows:
            for member in members:
                # If a turn ended before the last sampled token, later tokens overwrite the cache behind its end.
                member.cached = min(member.cached, int(episodes.lengths[member.number]) - 1)
        return cache

    def _running_threshold(self, count: int, *, some_wait: bool) -> int:
        """Returns the number of running sequences of a device at which a round returns to the host.

        count, some_wait: arguments of `_decode`.
        """
        refill_threshold = count - max(count // REFILL_SHARE, 1) if some_wait else 0
        if self.environments:
            # Return when a third of the sequences wait for environments, because most slots would soon be idle.
            return max(refill_threshold, count * 2 // 3)
        # Return when the remaining sequences fit a smaller program, whose rounds are faster.
        smaller_programs = [slots.count for slots in self.sizes.slots if slots.count < count]
        return max(refill_threshold, *smaller_programs, 0)
