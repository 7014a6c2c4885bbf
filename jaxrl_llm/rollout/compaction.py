"""Batch compaction: plans on the host how the sampler's batch shrinks when completions have ended.

Every device has n entries of w slots. An entry has one prompt; a prompt may have several entries. The plan says which
living completion goes into which slot of a smaller batch. No completion moves to another device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl_llm.structs import AnyArray


def smaller_shape(entries: int, width: int) -> tuple[int, int]:
    """Returns the next smaller shape: half the slots per entry, or half the entries if each has one slot."""
    return (entries, -(-width // 2)) if width > 1 else (-(-entries // 2), 1)


class Plan(NamedTuple):
    """Where each entry and slot of the smaller batch comes from, for each of d devices."""

    entry: np.ndarray  # [d, n'] the old entry whose prompt the new entry gets
    source: np.ndarray  # [d, n', w'] the old slot n * W + w whose completion the new slot gets
    empty: np.ndarray  # [d, n', w'] bool, the new slot gets none

    def of_entries(self, x: AnyArray) -> np.ndarray:
        """Moves an array [N, ...] of entries."""
        split = x.reshape(len(self.entry), -1, *x.shape[1:])
        return np.concatenate([part[at] for part, at in zip(split, self.entry, strict=True)])

    def of_slots(self, x: AnyArray) -> np.ndarray:
        """Moves an array [N, W, ...] of slots."""
        split = x.reshape(len(self.source), -1, *x.shape[2:])
        return np.concatenate([part[at] for part, at in zip(split, self.source, strict=True)])


def plan_compaction(alive: np.ndarray, prompt: np.ndarray, devices: int) -> Plan:
    """Plans the moves of the living completions [N, W] into the smallest shape that fits all devices.

    prompt [N] is the prompt of each entry.
    """
    width = alive.shape[1]
    alive, prompt = alive.reshape(devices, -1, width), prompt.reshape(devices, -1)
    shape = alive.shape[1:]
    while (smaller := smaller_shape(*shape)) != shape and all(
        _needed(a, p, smaller[1]) <= smaller[0] for a, p in zip(alive, prompt, strict=True)
    ):
        shape = smaller
    entry = np.zeros((devices, shape[0]), np.int32)
    source = np.zeros((devices, *shape), np.int32)
    empty = np.ones((devices, *shape), bool)
    for d in range(devices):
        new = 0
        for which in np.unique(prompt[d]):
            at = np.flatnonzero(prompt[d] == which)
            slots = (at[:, None] * width + np.arange(width))[alive[d, at]]
            for first in range(0, len(slots), shape[1]):
                group = slots[first : first + shape[1]]
                entry[d, new], source[d, new, : len(group)], empty[d, new, : len(group)] = at[0], group, False
                new += 1
    return Plan(entry, source, empty)


def _needed(alive: np.ndarray, prompt: np.ndarray, width: int) -> int:
    """Counts the entries of `width` slots for alive [n, w]: the sum over prompts of ceil(alive / width)."""
    each = np.bincount(prompt, weights=alive.sum(axis=1))
    return int(np.sum(np.ceil(each / width)))
