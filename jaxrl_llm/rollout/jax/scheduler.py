"""Which sequences of a device compute, and which pages they have. Host code without JAX.

A group is a prompt with its sequences. It has a place for its prompt from its first admission until its last sequence
has ended. A sequence that is admitted holds pages, one more whenever it needs it. If no page is free, the youngest
sequence gives its pages back, and is computed again later: the oldest one always goes on, so all of them end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxrl_llm.rollout.jax.sizes import StreamSizes

RESERVE = 4  # a page stays free for so many sequences that hold some: they will need one more


@dataclass(eq=False)
class Member:
    """A sequence: a completion in flight."""

    number: int  # of the completion in the call; earlier ones are admitted earlier
    group: PromptGroup
    cached: int = 0  # tokens whose keys and values are in its pages
    pages: list[int] = field(default_factory=list)


@dataclass(eq=False)
class PromptGroup:
    """A prompt, and its sequences that have not ended."""

    number: int  # of the prompt in the call
    members: list[Member] = field(default_factory=list)
    place: int = -1  # of the prompt on its device; -1: it has none

    @classmethod
    def of(cls, number: int, size: int) -> PromptGroup:
        """Returns the group of a prompt, with `size` sequences."""
        group = cls(number)
        group.members = [Member(number * size + g, group) for g in range(size)]
        return group


class Scheduler:
    """The sequences of one device."""

    def __init__(self, sizes: StreamSizes):
        self.sequences, self.page = sizes.sequences, sizes.page
        # Up to this many sequences can never exhaust the pages, so no reserve is needed.
        self._safe = sizes.pages // sizes.longest
        self.holders: list[Member] = []  # the oldest first
        self.waiting: deque[Member] = deque()  # the oldest first
        self.preemptions = 0
        self._places, self._pages = list(range(sizes.prompts)), list(range(sizes.pages))

    @property
    def wants_group(self) -> bool:
        """Whether a further group could be admitted."""
        return not self.waiting and bool(self._places) and len(self.holders) < self.sequences

    @property
    def free_pages(self) -> int:
        return len(self._pages)

    def add(self, group: PromptGroup) -> None:
        """Adds a group, which waits to be admitted."""
        self.waiting.extend(group.members)

    def schedule(self, goal: Callable[[Member], int]) -> list[PromptGroup]:
        """Gives the holders the pages that they need, and admits sequences. Returns the groups that are new.

        goal(sequence): the number of its tokens that the next program may leave in its pages.
        """
        before = self.preemptions
        # A copy: who gives its pages back holds nothing any more.
        for member in list(self.holders):
            self._grow(member, goal(member))
        return self.admit(goal) if self.preemptions == before else []

    def admit(self, goal: Callable[[Member], int]) -> list[PromptGroup]:
        """Admits waiting sequences, the oldest first, and returns the new groups. goal: argument of `schedule`."""
        new: list[PromptGroup] = []
        while self.waiting and self._admits(self.waiting[0], goal):
            member = self.waiting.popleft()
            if member.group.place < 0:
                member.group.place = heapq.heappop(self._places)
                new.append(member.group)
            self.holders.append(member)
            self._grow(member, goal(member))
        return new

    def retire(self, member: Member) -> None:
        """Takes back what an ended sequence holds."""
        self._release(member)
        if member in self.holders:
            self.holders.remove(member)
        else:
            # It has ended with its first token, before it was admitted.
            self.waiting.remove(member)
        group = member.group
        group.members.remove(member)
        if not group.members and group.place >= 0:
            heapq.heappush(self._places, group.place)
            group.place = -1

    def _admits(self, member: Member, goal: Callable[[Member], int]) -> bool:
        reserve = len(self.holders) // RESERVE if len(self.holders) >= self._safe else 0
        return (
            len(self.holders) < self.sequences
            and (member.group.place >= 0 or bool(self._places))
            and len(self._pages) >= self._pages_for(goal(member)) + reserve
        )

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _grow(self, member: Member, tokens: int) -> None:
        """Gives a holder pages for so many tokens, if need be those of the youngest holder."""
        while member in self.holders and len(member.pages) < self._pages_for(tokens):
            if not self._pages:
                self._preempt(self.holders[-1])
            else:
                member.pages.append(heapq.heappop(self._pages))

    def _preempt(self, member: Member) -> None:
        self._release(member)
        self.holders.remove(member)
        # It is older than all that wait, which is the order of `waiting`.
        self.waiting.appendleft(member)
        self.preemptions += 1

    def _release(self, member: Member) -> None:
        for page in member.pages:
            heapq.heappush(self._pages, page)
        member.pages, member.cached = [], 0


def emptiest(schedulers: Sequence[Scheduler]) -> Scheduler | None:
    """Returns the scheduler with the fewest holders among those that want a group; None: none wants one."""
    return min((s for s in schedulers if s.wants_group), key=lambda s: len(s.holders), default=None)
