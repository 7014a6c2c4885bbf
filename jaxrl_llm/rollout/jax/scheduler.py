"""Schedules the sequences of one device: which sequences decode, and which cache pages they hold. Needs no JAX.

A group is a prompt with its sequences. Its prompt stays in the cache from the group's first admission until its last
sequence has ended. An admitted sequence holds pages, and gets one more whenever it needs one. If no page is free, the
youngest sequence returns its pages and is computed again later. So the oldest sequence always continues, and every
sequence ends.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxrl_llm.rollout.jax.sizes import StreamSizes

# Per this many sequences with pages, admission leaves one page free, because these sequences will soon need pages.
HOLDERS_PER_FREE_PAGE = 4


@dataclass(eq=False)
class Member:
    """One completion of a group while the engine samples it."""

    number: int  # number of the completion in the call; lower numbers are admitted first
    group: PromptGroup
    cached: int = 0  # tokens whose keys and values are in the pages
    pages: list[int] = field(default_factory=list)  # page numbers in the order of the tokens


@dataclass(eq=False)
class PromptGroup:
    """A prompt and its sequences that have not ended."""

    number: int  # number of the prompt in the call
    members: list[Member] = field(default_factory=list)
    cache_place: int = -1  # place of the prompt in the device's cache; -1: the prompt is not in the cache

    @classmethod
    def with_members(cls, number: int, size: int) -> PromptGroup:
        """Returns the group of a prompt, with `size` new sequences."""
        group = cls(number)
        group.members = [Member(number * size + g, group) for g in range(size)]
        return group


class Scheduler:
    """Admits the sequences of one device, gives them pages, and preempts the youngest if pages run out."""

    def __init__(self, sizes: StreamSizes):
        self.sequences, self.page = sizes.sequences, sizes.page
        # Up to this many sequences can never exhaust the pages, so admission needs no free page in reserve.
        self._safe_sequences = sizes.pages // sizes.max_sequence_pages
        self.page_holders: dict[Member, None] = {}  # ordered set of the sequences with pages, the oldest first
        self.waiting: deque[Member] = deque()  # sequences that wait for admission, the oldest first
        self.reach = 0  # pages with the numbers 0 .. reach - 1 have been given to sequences
        self.preemptions = 0  # number of times that a sequence has returned its pages early
        self._free_places, self._free_pages = list(range(sizes.prompts)), list(range(sizes.pages))

    @property
    def can_admit_group(self) -> bool:
        """Whether the device has a place for a further group."""
        return not self.waiting and bool(self._free_places) and len(self.page_holders) < self.sequences

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def add(self, group: PromptGroup) -> None:
        """Adds a group, whose sequences wait for admission."""
        self.waiting.extend(group.members)

    def schedule(self, needed_tokens: Callable[[Member], int]) -> list[PromptGroup]:
        """Gives pages to the admitted sequences and admits waiting sequences. Returns the groups that are new.

        needed_tokens(sequence): most tokens of the sequence that are in its pages after the next program.
        """
        earlier_preemptions = self.preemptions
        # Iterate over a copy, because preemption removes members from `page_holders`.
        for member in list(self.page_holders):
            self._grow(member, needed_tokens(member))
        return self.admit(needed_tokens) if self.preemptions == earlier_preemptions else []

    def admit(self, needed_tokens: Callable[[Member], int]) -> list[PromptGroup]:
        """Admits waiting sequences, the oldest first, and returns the groups that are new.

        needed_tokens(sequence): most tokens of the sequence that are in its pages after the next program.
        """
        new_groups: list[PromptGroup] = []
        while self.waiting and self._fits(self.waiting[0], needed_tokens):
            member = self.waiting.popleft()
            if member.group.cache_place < 0:
                member.group.cache_place = heapq.heappop(self._free_places)
                new_groups.append(member.group)
            self.page_holders[member] = None
            self._grow(member, needed_tokens(member))
        return new_groups

    def retire(self, member: Member) -> None:
        """Removes an ended sequence and frees its pages. Frees the prompt's place after the group's last sequence."""
        self._free(member)
        if member in self.page_holders:
            del self.page_holders[member]
        else:
            # The sequence ended with its first token, before its admission.
            self.waiting.remove(member)
        group = member.group
        group.members.remove(member)
        if not group.members and group.cache_place >= 0:
            heapq.heappush(self._free_places, group.cache_place)
            group.cache_place = -1

    def _fits(self, member: Member, needed_tokens: Callable[[Member], int]) -> bool:
        """Returns whether the device has a slot, a place for the prompt, and enough free pages for a sequence."""
        count = len(self.page_holders)
        reserve = count // HOLDERS_PER_FREE_PAGE if count >= self._safe_sequences else 0
        return (
            count < self.sequences
            and (member.group.cache_place >= 0 or bool(self._free_places))
            and len(self._free_pages) >= self._pages_for(needed_tokens(member)) + reserve
        )

    def _pages_for(self, tokens: int) -> int:
        """Returns the number of pages that hold this many tokens."""
        return -(-tokens // self.page)

    def _grow(self, member: Member, tokens: int) -> None:
        """Gives an admitted sequence enough pages for `tokens` tokens. If none is free, preempts the youngest."""
        needed = self._pages_for(tokens)
        while len(member.pages) < needed and member in self.page_holders:
            if not self._free_pages:
                self._preempt(next(reversed(self.page_holders)))
            else:
                # The lowest free page, so that the pages in use stay together and the cache can be small.
                member.pages.append(heapq.heappop(self._free_pages))
                self.reach = max(self.reach, member.pages[-1] + 1)

    def _preempt(self, member: Member) -> None:
        """Takes the pages of an admitted sequence, which waits and is computed again later."""
        self._free(member)
        del self.page_holders[member]
        # The preempted sequence goes to the front, because it is older than every waiting sequence.
        self.waiting.appendleft(member)
        self.preemptions += 1

    def _free(self, member: Member) -> None:
        """Returns the pages of a sequence to the free pages."""
        for page in member.pages:
            heapq.heappush(self._free_pages, page)
        member.pages, member.cached = [], 0


def least_loaded(schedulers: Sequence[Scheduler]) -> Scheduler | None:
    """Returns the scheduler with the fewest admitted sequences that has a place for a group; None if all are full."""
    return min((s for s in schedulers if s.can_admit_group), key=lambda s: len(s.page_holders), default=None)
