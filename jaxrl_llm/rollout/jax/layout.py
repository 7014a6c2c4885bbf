"""The sequences of a program as arrays: their tokens, and the pages and prompts that they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.rollout.jax.programs import FedChunks, NewPrompts, RoundRows
from jaxrl_llm.rollout.jax.reading import Reading
from jaxrl_llm.rollout.jax.scheduler import Member, PromptGroup
from jaxrl_llm.rollout.jax.sizes import CHUNKS, FULL, ROUND, Slots, StreamSizes
from jaxrl_llm.structs import Images, Prompts


class Chunk(NamedTuple):
    """Tokens of an observation that run at once: places start .. end - 1 of a sequence."""

    member: Member
    start: int
    end: int


def new_prompts(
    new: list[list[PromptGroup]],
    first: int,
    size: int,
    sizes: StreamSizes,
    prompts: Prompts,
    *,
    first_number: int,
    pad: int,
) -> NewPrompts:
    """Returns a part of the groups that begin on each device, from `first` on, for a program of `size` prompts.

    first_number: number of this process's first completion.
    """
    lead = len(new), size
    tokens, mask = np.full((*lead, sizes.width), pad, np.int32), np.zeros((*lead, sizes.width), bool)
    place, number = np.full(lead, sizes.prompts, np.int32), np.zeros(lead, np.int32)
    for d, n, group in numbered(new, first, size):
        tokens[d, n], mask[d, n] = prompts.tokens[group.number], prompts.mask[group.number]
        place[d, n], number[d, n] = group.place, first_number + group.number * sizes.group
    # A prompt without a token: attention needs one.
    mask[place == sizes.prompts, -1] = True
    return NewPrompts(tokens, mask, place, number, _images(new, first, size, sizes, prompts))


def _images(new: list[list[PromptGroup]], first: int, size: int, sizes: StreamSizes, prompts: Prompts) -> Images | None:
    """Returns the images of `new_prompts`."""
    if prompts.images is None or sizes.images is None:
        return None
    images = Images.padding((len(new), size), sizes.width, sizes.images)
    for d, n, group in numbered(new, first, size):
        for leaf, values in zip(jax.tree.leaves(images), jax.tree.leaves(prompts.images), strict=True):
            leaf[d, n] = values[group.number]
    return images


def chunked(lacking: list[list[tuple[Member, int]]]) -> dict[tuple[int, int], list[list[Chunk]]]:
    """Splits the tokens that pages lack: {(number, width): chunks of each device}.

    lacking: for each device, pairs of a sequence and the place at which its observation ends. A sequence's chunks
    have increasing numbers.
    """
    small, large = CHUNKS
    rounds: dict[tuple[int, int], list[list[Chunk]]] = {}
    for d, sequences in enumerate(lacking):
        for member, last in sequences:
            at, number = member.cached, 0
            while at < last:
                size = small if last - at <= FULL * small else large
                chunks = rounds.setdefault((number, size), [[] for _ in lacking])
                chunks[d].append(Chunk(member, at, min(at + size, last)))
                at, number = at + size, number + 1
    return rounds


def fed(
    chunks: list[list[Chunk]], rows: int, width: int, sizes: StreamSizes, prompts: Prompts, texts: Episodes
) -> FedChunks:
    """Returns chunks of each device, for a program of `rows` x `width` tokens."""
    lead = len(chunks), rows
    at, count, prompt = np.zeros((3, *lead), np.int32)
    tokens, mask = np.zeros((*lead, width), np.int32), np.zeros((*lead, sizes.width), bool)
    for d, n, chunk in numbered(chunks, 0, rows):
        group = chunk.member.group
        at[d, n], count[d, n] = chunk.start, chunk.end - chunk.start
        prompt[d, n], mask[d, n] = group.place, prompts.mask[group.number]
        tokens[d, n, : count[d, n]] = texts.tokens[chunk.member.number, chunk.start : chunk.end]
    members = [[chunk.member for chunk in each] for each in chunks]
    reading = all_pages(reading_of(members, rows, sizes, prompts), sizes.page)
    # Each sequence reads its prompt alone, because few members of a group have a chunk at once.
    each = np.tile(np.arange(rows, dtype=np.int32), (len(chunks), 1))
    reading = reading._replace(prompt_mask=mask, members=each[..., None], member=each)
    if prompts.images is not None:
        end = np.zeros(lead, np.int32)
        for d, n, chunk in numbered(chunks, 0, rows):
            end[d, n] = prompts.images.end[chunk.member.group.number]
        reading = reading._replace(end=end)
    return FedChunks(tokens, at, count, prompt, reading)


def round_rows(
    rows: list[list[Member]],
    slots: Slots,
    sizes: StreamSizes,
    prompts: Prompts,
    texts: Episodes,
    limits: np.ndarray,
    *,
    first_number: int,
) -> RoundRows:
    """Returns the sequences of each device for a round of decoding. limits [N]: lengths at which turns end."""

    def ints(*shape: int) -> np.ndarray:
        return np.zeros((len(rows), slots.count, *shape), np.int32)

    token, length, limit, number = (ints() for _ in range(4))
    known = ints(ROUND) - 1
    for d, members in enumerate(rows):
        at = np.array([(member.number, member.cached) for member in members], np.int32).reshape(-1, 2).T
        token[d, : len(members)], length[d, : len(members)] = texts.tokens[tuple(at)], at[1] + 1
        limit[d, : len(members)], number[d, : len(members)] = limits[at[0]], first_number + at[0]
        for n in np.flatnonzero(at[1] + 1 < texts.length[at[0]]).tolist():
            # Its pages were given away: it goes on with the tokens that it had, up to the next observation.
            i, place = members[n].number, members[n].cached + 1
            drawn = texts.drawn(i, place)
            limit[d, n] = limits[i] if drawn.all() else place + int(np.argmin(drawn))
            again = texts.tokens[i, place : min(texts.length[i], limit[d, n], place + ROUND)]
            known[d, n, : len(again)] = again
    reading = reading_of(rows, slots.count, sizes, prompts, slots)
    prompt, page = places_of(rows, sizes, slots)
    return RoundRows(
        token=token, length=length, limit=limit, number=number, known=known, reading=reading, prompt=prompt, page=page
    )


def reading_of(
    rows: list[list[Member]], count: int, sizes: StreamSizes, prompts: Prompts, slots: Slots | None = None
) -> Reading:
    """Returns where the sequences of each device read and write, in a program of `count` sequences.

    slots: sizes of a decode program, None for a program for observations, whose table has pages of the cache.
    """
    slots = slots or Slots(count, sizes.pages, sizes.prompts)
    lead = len(rows)
    table = np.full((lead, count, sizes.longest), slots.pages, np.int32)
    owner, start = np.zeros((2, lead, slots.pages), np.int32)
    members = np.zeros((lead, slots.prompts, sizes.group), np.int32)
    rank, end = np.zeros((lead, count), np.int32), np.zeros((lead, slots.prompts), np.int32)
    mask = np.zeros((lead, slots.prompts, sizes.width), bool)
    for d, sequences in enumerate(rows):
        order, counts = np.arange(len(sequences)), [len(member.pages) for member in sequences]
        pages = np.array([page for member in sequences for page in member.pages], np.int32)
        if slots.pages < sizes.pages:
            # The copies of some pages stand one after the other.
            pages = np.arange(len(pages), dtype=np.int32)
        of, nth = np.repeat(order, counts), np.concatenate([np.zeros(0, np.int32), *map(np.arange, counts)])
        table[d, of, nth], owner[d, pages], start[d, pages] = pages, of, nth * sizes.page
        places = prompt_places(sequences, sizes, slots)
        place = np.array([places[member.group] for member in sequences], np.int32)
        g = np.array([member.number % sizes.group for member in sequences], np.int32)
        members[d, place, g], rank[d, : len(sequences)] = order, place * sizes.group + g
        for group, at in places.items():
            mask[d, at] = prompts.mask[group.number]
            if prompts.images is not None:
                end[d, at] = prompts.images.end[group.number]
    return Reading(
        table=table,
        owner=owner,
        start=start,
        prompt_mask=mask,
        members=members,
        member=rank,
        end=None if prompts.images is None else end,
    )


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


def numbered(device_items: list[list[Any]], first: int, limit: int) -> Iterator[tuple[int, int, Any]]:
    """Yields (device, index, item) of a part of each device's items."""
    for d, items in enumerate(device_items):
        for n, item in enumerate(items[first : first + limit]):
            yield d, n, item
