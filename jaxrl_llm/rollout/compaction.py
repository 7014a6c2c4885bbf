"""Batch compaction: which living completions go into which slots of a smaller batch.

A batch has B prompts with G completions each. A smaller batch has, on each device, n entries of w slots. An entry has
one prompt, and a slot one of its completions; a prompt may have several entries. No completion moves to another device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.machine.shapes import Cost, Ladder
from jaxrl_llm.machine.sharding import prompt_shards
from jaxrl_llm.structs import AnyArray, Sizes

BLOCK = 64  # tokens; no KV cache is smaller


class Slots(NamedTuple):
    """The shape of a batch in decoding: on each device, n entries of w slots, with a KV cache of `capacity` tokens."""

    entries: int
    width: int
    capacity: int

    @property
    def count(self) -> int:
        return self.entries * self.width

    def fits(self, alive: np.ndarray) -> np.ndarray:
        """Whether the living completions fit. alive [..., d, p]: their number for each of a device's prompts."""
        return np.all(np.sum(-(-alive // self.width), axis=-1) <= self.entries, axis=-1)


def prompts_at_once(prompts: int, group: int, devices: int, max_sequences: int) -> int:
    """Returns how many of a batch's prompts have a KV cache at once: with their groups at most `max_sequences`; 0: all.

    It divides their number, and every device has equally many.
    """
    fitting = [
        n
        for n in range(devices, prompts + 1, devices)
        if prompts % n == 0 and n * group <= (max_sequences or n * group)
    ]
    return max(fitting, default=devices)


def decode_shapes(sizes: Sizes, mesh: Mesh, max_sequences: int) -> list[Slots]:
    """Returns the shapes in which a run may decode, the largest first. max_sequences: see `prompts_at_once`."""
    devices = prompt_shards(mesh)
    prompts = prompts_at_once(sizes.prompts_per_step, sizes.group_size, devices, max_sequences)
    return slot_shapes(prompts // devices, sizes.group_size, sizes.max_completion_tokens)


def slot_shapes(prompts: int, group: int, length: int) -> list[Slots]:
    """Lists the shapes of a batch of `prompts` per device and `group` completions each, the largest first.

    Every shape has half of the slots of another, or half of the capacity. A run uses few of them: those that pay.
    """
    counts = [(prompts, group)]
    while counts[-1] != (1, 1):
        entries, width = counts[-1]
        counts.append((entries, -(-width // 2)) if width > 1 else (-(-entries // 2), 1))
    capacities = [length]
    while capacities[-1] >= 2 * BLOCK:
        capacities.append(-(-capacities[-1] // (2 * BLOCK)) * BLOCK)
    return [Slots(*count, capacity) for count in counts for capacity in capacities]


class CompactionPlan(NamedTuple):
    """The completions in the slots of a batch, for each of d devices."""

    prompt: AnyArray  # [d, n] the prompt of each entry, among those of its device
    completion: AnyArray  # [d, n, w] the completion p * G + g in each slot, among those of its device; or NONE
    below: AnyArray  # [2] entries and width of a smaller batch: the loop ends when the living fit into it


# Out of range: JAX drops what is written there.
NONE = np.iinfo(np.int32).max


def plan_compaction(alive: np.ndarray, slots: Slots, below: tuple[int, int], devices: int) -> CompactionPlan:
    """Plans the slots of the living completions [B, G]. They must fit. The largest shape keeps all in their places."""
    group = alive.shape[1]
    # Nothing moves: the loop then works on the donated state itself.
    if (slots.entries * devices, slots.width) == alive.shape:
        prompt, completion = np.arange(slots.entries), np.arange(slots.count).reshape(slots[:2])
        prompt, completion = (np.stack([x] * devices).astype(np.int32) for x in (prompt, completion))
        return CompactionPlan(prompt, completion, np.asarray(below, np.int32))
    prompt = np.zeros((devices, slots.entries), np.int32)
    completion = np.full((devices, slots.entries, slots.width), NONE, np.int32)
    for d, device_alive in enumerate(alive.reshape(devices, -1, group)):
        entry = 0
        for p, members in enumerate(device_alive):
            living = p * group + np.flatnonzero(members)
            for first in range(0, len(living), slots.width):
                part = living[first : first + slots.width]
                prompt[d, entry], completion[d, entry, : len(part)] = p, part
                entry += 1
    return CompactionPlan(prompt, completion, np.asarray(below, np.int32))


class DecodeShapes:
    """The shapes in use of one kind of batch, and what a token costs in each."""

    def __init__(
        self,
        shapes: list[Slots],
        seconds: Callable[[Slots], float],
        *,
        devices: int,
        price: float,
        ladder: Ladder | None,
    ):
        """seconds(shape): of one token. price: seconds to compile. Without a ladder, the first few shapes stay."""
        self._shapes, self._seconds, self._devices, self._price = shapes, seconds, devices, price
        self.ladder = ladder

    @property
    def possible(self) -> list[Slots]:
        """Returns the shapes that any call may use, the largest first."""
        return self._shapes if self.ladder else self.in_use()

    def in_use(self) -> list[Slots]:
        """Returns the shapes that this call may use."""
        return [Slots(*shape) for shape in self.ladder.in_use()] if self.ladder else self.first()

    def first(self) -> list[Slots]:
        """Returns the shapes in use before any length is known, the largest first."""
        largest = self._shapes[0]
        short = [s for s in self._shapes if s.count == largest.count and 4 * s.capacity <= largest.capacity][:1]
        long = [s for s in self._shapes if s.capacity == largest.capacity]
        fewer = [s for n in (2, 8) for s in [s for s in long if n * s.count <= largest.count][:1]]
        # One call of long completions should save more time than the program takes to compile.
        tokens = [(s, s.capacity) for s in short] + [(s, largest.capacity // 2) for s in fewer]
        pays = [s for s, n in tokens if n * (self._seconds(largest) - self._seconds(s)) >= self._price]
        return [largest, *pays]

    def choose(self, alive: np.ndarray, t: int) -> tuple[Slots, tuple[int, int]]:
        """Returns the cheapest shape for token t of the living completions [B, G], and the next smaller batch.

        The loop ends when the living fit into that batch, entries and width of a device; (-1, 1): none is smaller.
        """
        living = self._count(alive)
        large_enough = [shape for shape in self.in_use() if shape.capacity >= t]
        best = min((shape for shape in large_enough if shape.fits(living)), key=self._seconds)
        smaller = [
            shape for shape in large_enough if shape.count < best.count and self._seconds(shape) < self._seconds(best)
        ]
        below = max(smaller, key=lambda shape: shape.count, default=Slots(-1, 1, 0))
        return best, (below.entries, below.width)

    def cost(self, lengths: np.ndarray) -> Cost:
        """Returns `cost(shapes)`: the seconds to decode completions of these lengths [B, G]."""
        # At most 256 places: the cost of all shapes is computed after each batch.
        ends = np.unique(np.linspace(1, lengths.max(), 256).astype(int))
        t, tokens = ends[:-1], np.diff(ends)
        living = np.moveaxis(self._count(lengths[..., None] > t), -1, 0)
        each = {s: np.where(s.fits(living) & (s.capacity >= t), self._seconds(s), np.inf) for s in self._shapes}
        return lambda shapes: float(np.sum(np.min([each[Slots(*s)] for s in shapes], axis=0) * tokens))

    def _count(self, alive: np.ndarray) -> np.ndarray:
        """Counts the living of each prompt: [B, G, ...] -> [d, p, ...]."""
        each = alive.sum(axis=1)
        return each.reshape(self._devices, len(each) // self._devices, *each.shape[1:])
