"""Batch compaction: plans, on the host, how the sampler's batch shrinks when completions have ended.

Every device has n entries of w slots. An entry has one prompt; a prompt may have several entries. The plan says which
living completion goes into which slot of a smaller batch. No completion moves to another device.
"""

from __future__ import annotations

import numpy as np


def smaller_shape(entries: int, width: int) -> tuple[int, int]:
    """The next smaller shape: half the slots an entry, or half the entries once each has one slot."""
    return (entries, -(-width // 2)) if width > 1 else (-(-entries // 2), 1)


def plan_compaction(alive: np.ndarray, prompt: np.ndarray, devices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the living completions [N, W] go, in the smallest shape that fits all devices.

    prompt [N] is each entry's prompt. Returns, for each device: the old entry [d, n'] whose prompt the new entry gets,
    the old slot n * W + w [d, n', w'] whose completion each new slot gets, and whether it is empty [d, n', w'].
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
    return entry, source, empty


def _needed(alive: np.ndarray, prompt: np.ndarray, width: int) -> int:
    """Entries of `width` slots for those alive [n, w]: ceil(alive / width) of each prompt."""
    each = np.bincount(prompt, weights=alive.sum(axis=1))
    return int(np.sum(np.ceil(each / width)))
