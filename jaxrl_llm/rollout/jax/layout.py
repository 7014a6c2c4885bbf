"""Where the sequences of a program are, as arrays: the pages and prompts that they read."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.rollout.jax.reading import Reading
from jaxrl_llm.rollout.jax.scheduler import Member, PromptGroup
from jaxrl_llm.rollout.jax.sizes import Slots, StreamSizes
from jaxrl_llm.structs import Prompts


def reading_of(
    rows: list[list[Member]], count: int, sizes: StreamSizes, prompts: Prompts, slots: Slots | None = None
) -> Reading:
    """Returns where the sequences of each device read and write, in a program of `count` sequences.

    slots: of a decode program; None: of a program for observations, whose table has pages of the cache.
    """
    slots = slots or Slots(count, sizes.pages, sizes.prompts)
    lead = len(rows)
    table = np.full((lead, count, sizes.longest), slots.pages, np.int32)
    owner, start = np.zeros((2, lead, slots.pages), np.int32)
    members = np.zeros((lead, slots.prompts, sizes.group), np.int32)
    rank, mask = np.zeros((lead, count), np.int32), np.zeros((lead, slots.prompts, sizes.width), bool)
    for d, sequences in enumerate(rows):
        places, first = prompt_places(sequences, sizes, slots), 0
        for n, member in enumerate(sequences):
            number = len(member.pages)
            # All pages are where they are, or the copies of some stand one after the other.
            pages = member.pages if slots.pages == sizes.pages else range(first, first + number)
            first += number
            table[d, n, :number] = pages
            owner[d, pages], start[d, pages] = n, np.arange(number) * sizes.page
            place, g = places[member.group], member.number % sizes.group
            members[d, place, g], rank[d, n] = n, place * sizes.group + g
            mask[d, place] = prompts.mask[member.group.number]
    return Reading(table, owner, start, mask, members, rank)


def all_pages(reading: Reading, page: int) -> Reading:
    """Returns the reading of a program that copies the pages of the whole table, one sequence after the other."""
    lead, count, longest = reading.table.shape
    order = np.arange(count * longest, dtype=np.int32)
    owner, start = order // longest, order % longest * page
    return reading._replace(owner=np.tile(owner, (lead, 1)), start=np.tile(start, (lead, 1)))


def places_of(rows: list[list[Member]], sizes: StreamSizes, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the prompts [d, e] and the pages [d, p] of a decode program are in the cache."""
    prompt = np.zeros((len(rows), slots.prompts), np.int32)
    page = np.full((len(rows), slots.pages), sizes.pages, np.int32)
    for d, sequences in enumerate(rows):
        for group, place in prompt_places(sequences, sizes, slots).items():
            prompt[d, place] = group.place
        pages = [number for member in sequences for number in member.pages]
        page[d, : len(pages)] = pages
    return prompt, page


def prompt_places(sequences: list[Member], sizes: StreamSizes, slots: Slots) -> dict[PromptGroup, int]:
    """Returns the place of each group's prompt among those that a program reads."""
    groups = list(dict.fromkeys(member.group for member in sequences))
    if slots.prompts == sizes.prompts:
        return {group: group.place for group in groups}
    return {group: place for place, group in enumerate(groups)}
