"""Lays out sequences as the arrays of a program: their tokens, and the pages and prompts that they read.

Arrays have two leading axes: the device, and the row of the sequence or prompt on this device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.rollout.jax.cache_attention import CacheIndices
from jaxrl_llm.rollout.jax.programs import NewPrompts, ObservationChunks, RoundRows
from jaxrl_llm.rollout.jax.scheduler import Member, PromptGroup
from jaxrl_llm.rollout.jax.sizes import CHUNK_TOKENS, MAX_SMALL_CHUNKS, ROUND_TOKENS, Slots, StreamSizes
from jaxrl_llm.structs import Images, Prompts


class Draws(NamedTuple):
    """How the tokens of this process's completions are drawn."""

    numbers: np.ndarray  # [N] number of each completion in all processes, which seeds its random numbers
    temperatures: np.ndarray | None = None  # [N] temperature of each completion; None = the one of the programs
    starts: np.ndarray | None = None  # [N] length at which the random numbers of each completion begin; None = 0

    def temperature(self, completions: np.ndarray) -> np.ndarray | None:
        """Returns the temperature of each completion, None for the temperature of the programs.

        completions: indices of the completions in this process.
        """
        return None if self.temperatures is None else self.temperatures[completions]

    def start(self, completions: np.ndarray) -> np.ndarray | None:
        """Returns the length at which the random numbers of each completion begin, None for 0.

        completions: indices of the completions in this process.
        """
        return None if self.starts is None else self.starts[completions]


class Chunk(NamedTuple):
    """Part of an observation that one program call writes into pages: tokens start .. end - 1 of a completion."""

    member: Member
    start: int
    end: int


def new_prompts(
    new_groups: list[list[PromptGroup]],
    first: int,
    size: int,
    *,
    sizes: StreamSizes,
    prompts: Prompts,
    draws: Draws,
    pad: int,
) -> NewPrompts:
    """Returns the arrays of `size` new groups on each device, from group `first` of each device on.

    new_groups: new groups of each device. pad: padding token.
    """
    axes = len(new_groups), size
    tokens, mask = np.full((*axes, sizes.prompt_width), pad, np.int32), np.zeros((*axes, sizes.prompt_width), bool)
    no_place = sizes.prompts  # marks an empty row, because the places of the cache are 0 .. sizes.prompts - 1
    cache_place, first_member = np.full(axes, no_place, np.int32), np.zeros(axes, np.int32)
    for device, row, group in enumerate_items(new_groups, first, size):
        tokens[device, row], mask[device, row] = prompts.tokens[group.number], prompts.mask[group.number]
        cache_place[device, row] = group.cache_place
        first_member[device, row] = group.number * sizes.group_size
    # An empty row gets one token, because attention over no token is undefined.
    mask[cache_place == no_place, -1] = True
    images = _images_of(new_groups, first, size, sizes, prompts)
    return NewPrompts(
        tokens=tokens,
        mask=mask,
        cache_place=cache_place,
        completion_number=draws.numbers[first_member],
        images=images,
        temperature=draws.temperature(first_member),
    )


def _images_of(
    new_groups: list[list[PromptGroup]], first: int, size: int, sizes: StreamSizes, prompts: Prompts
) -> Images | None:
    """Returns the images [device, row] of new groups, None if prompts have no images.

    new_groups: new groups of each device. first: index of the first group of each device. size: rows of a device.
    """
    if prompts.images is None or sizes.images is None:
        return None
    images = Images.padding((len(new_groups), size), sizes.prompt_width, sizes.images)
    for device, row, group in enumerate_items(new_groups, first, size):
        for array, values in zip(jax.tree.leaves(images), jax.tree.leaves(prompts.images), strict=True):
            array[device, row] = values[group.number]
    return images


def split_observations(observations: list[list[tuple[Member, int]]]) -> dict[tuple[int, int], list[list[Chunk]]]:
    """Splits observations, whose keys and values are not cached yet, into chunks of one program call each.

    observations: for each device, pairs of a sequence and the number of its tokens up to the end of the observation.
    Returns {(index of the chunks in their observations, width): chunks of each device}. Chunks of a lower index are
    written first, because a chunk attends to the earlier chunks of its sequence.
    """
    small, large = CHUNK_TOKENS
    chunks_by_index: dict[tuple[int, int], list[list[Chunk]]] = {}
    for device, pairs in enumerate(observations):
        for member, observation_end in pairs:
            start, index = member.cached, 0
            while start < observation_end:
                width = small if observation_end - start <= MAX_SMALL_CHUNKS * small else large
                chunks = chunks_by_index.setdefault((index, width), [[] for _ in observations])
                chunks[device].append(Chunk(member, start, min(start + width, observation_end)))
                start, index = start + width, index + 1
    return chunks_by_index


def observation_chunks(
    chunks: list[list[Chunk]], rows: int, width: int, *, sizes: StreamSizes, prompts: Prompts, episodes: Episodes
) -> ObservationChunks:
    """Returns the arrays with which one program call writes chunks of observations into the cache.

    chunks: chunks of each device, at most `rows`. width: most tokens of a chunk.
    """
    axes = len(chunks), rows
    start, count, prompt_place = np.zeros((3, *axes), np.int32)
    tokens, mask = np.zeros((*axes, width), np.int32), np.zeros((*axes, sizes.prompt_width), bool)
    for device, row, chunk in enumerate_items(chunks, 0, rows):
        group, length = chunk.member.group, chunk.end - chunk.start
        start[device, row], count[device, row] = chunk.start, length
        prompt_place[device, row], mask[device, row] = group.cache_place, prompts.mask[group.number]
        tokens[device, row, :length] = episodes.tokens[chunk.member.number, chunk.start : chunk.end]
    members = [[chunk.member for chunk in device_chunks] for device_chunks in chunks]
    indices = cache_indices(members, rows, sizes, prompts)
    # The program reads one prompt per sequence, because few members of a group have a chunk at the same time.
    row_numbers = np.tile(np.arange(rows, dtype=np.int32), (len(chunks), 1))
    indices = indices._replace(prompt_mask=mask, prompt_members=row_numbers[..., None], member_index=row_numbers)
    if prompts.images is not None:
        prompt_end = np.zeros(axes, np.int32)
        for device, row, chunk in enumerate_items(chunks, 0, rows):
            prompt_end[device, row] = prompts.images.end[chunk.member.group.number]
        indices = indices._replace(prompt_end=prompt_end)
    return ObservationChunks(tokens=tokens, start=start, count=count, prompt_place=prompt_place, indices=indices)


def round_rows(
    rows: list[list[Member]],
    slots: Slots,
    *,
    sizes: StreamSizes,
    prompts: Prompts,
    episodes: Episodes,
    limits: np.ndarray,
    draws: Draws,
) -> RoundRows:
    """Returns the arrays of a decode round.

    rows: decoding sequences of each device. slots: size of the decode program. limits [N]: number of tokens at which
    the turn of each completion ends at the latest.
    """

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros((len(rows), slots.count, *shape), np.int32)

    last_token, length, limit, completion = (zeros() for _ in range(4))
    known_tokens = zeros(ROUND_TOKENS) - 1
    for device, members in enumerate(rows):
        pairs = [(member.number, member.cached) for member in members]
        numbers, cached = np.array(pairs, np.int32).reshape(-1, 2).T  # two arrays, also without members
        count = len(members)
        last_token[device, :count], length[device, :count] = episodes.tokens[numbers, cached], cached + 1
        limit[device, :count], completion[device, :count] = limits[numbers], numbers
        for row in np.flatnonzero(cached + 1 < episodes.lengths[numbers]).tolist():
            # The sequence was preempted after this call of the engine had sampled these tokens. The round computes
            # their keys and values again, up to the next token that was not sampled: the start of an observation.
            number, first_known = members[row].number, members[row].cached + 1
            is_sampled = episodes.sampled_by_this_call(number, first_known)
            row_limit = limits[number] if is_sampled.all() else first_known + int(np.argmin(is_sampled))
            limit[device, row] = row_limit
            repeat_end = min(episodes.lengths[number], row_limit, first_known + ROUND_TOKENS)
            repeated = episodes.tokens[number, first_known:repeat_end]
            known_tokens[device, row, : len(repeated)] = repeated
    places = np.zeros((len(rows), slots.prompts), np.int32)
    for device, members in enumerate(rows):
        for group, prompt_index in prompt_places(members, sizes, slots).items():
            places[device, prompt_index] = group.cache_place
    return RoundRows(
        last_token=last_token,
        length=length,
        limit=limit,
        completion_number=draws.numbers[completion],
        known_tokens=known_tokens,
        indices=cache_indices(rows, slots.count, sizes, prompts, slots),
        prompt_places=places,
        temperature=draws.temperature(completion),
        start=draws.start(completion),
    )


def cache_indices(
    rows: list[list[Member]], count: int, sizes: StreamSizes, prompts: Prompts, slots: Slots | None = None
) -> CacheIndices:
    """Returns where the sequences of each device read and write in the cache, for a program of `count` sequences.

    rows: sequences of each device. slots: size of the decode program; None for a program that writes observations.
    """
    slots = slots or Slots(count, sizes.prompts)
    devices = len(rows)
    page_table = np.full((devices, count, sizes.max_sequence_pages), sizes.pages, np.int32)
    prompt_members = np.zeros((devices, slots.prompts, sizes.group_size), np.int32)
    member_index, prompt_end = np.zeros((devices, count), np.int32), np.zeros((devices, slots.prompts), np.int32)
    prompt_mask = np.zeros((devices, slots.prompts, sizes.prompt_width), bool)
    for device, members in enumerate(rows):
        row_numbers, page_counts = np.arange(len(members)), [len(member.pages) for member in members]
        # Three arrays with an entry for each page: its number, the row that owns it, and its index in that row.
        pages = np.array([page for member in members for page in member.pages], np.int32)
        owner = np.repeat(row_numbers, page_counts)
        index_in_row = np.concatenate([np.zeros(0, np.int32), *map(np.arange, page_counts)])
        page_table[device, owner, index_in_row] = pages
        places = prompt_places(members, sizes, slots)
        place = np.array([places[member.group] for member in members], np.int32)
        index_in_group = np.array([member.number % sizes.group_size for member in members], np.int32)
        prompt_members[device, place, index_in_group] = row_numbers
        member_index[device, : len(members)] = place * sizes.group_size + index_in_group
        for group, prompt_index in places.items():
            prompt_mask[device, prompt_index] = prompts.mask[group.number]
            if prompts.images is not None:
                prompt_end[device, prompt_index] = prompts.images.end[group.number]
    return CacheIndices(
        page_table=page_table,
        prompt_mask=prompt_mask,
        prompt_members=prompt_members,
        member_index=member_index,
        prompt_end=None if prompts.images is None else prompt_end,
    )


def prompt_places(members: list[Member], sizes: StreamSizes, slots: Slots) -> dict[PromptGroup, int]:
    """Returns {group: index of its prompt among the prompts that a decode program reads}."""
    groups = list(dict.fromkeys(member.group for member in members))
    if slots.prompts == sizes.prompts:
        return {group: group.cache_place for group in groups}
    return {group: index for index, group in enumerate(groups)}


def enumerate_items(device_items: list[list[Any]], first: int, limit: int) -> Iterator[tuple[int, int, Any]]:
    """Yields (device, row, item) for `limit` items of each device, from item `first` on. Rows count from 0."""
    for device, items in enumerate(device_items):
        for row, item in enumerate(items[first : first + limit]):
            yield device, row, item
