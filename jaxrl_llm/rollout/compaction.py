"""Who sits where in the sampler's batch: those who have not ended move together, on the host.

Every device has n entries of w seats. An entry serves one prompt; a prompt may have several.
"""

from __future__ import annotations

import numpy as np


def half(entries: int, width: int) -> tuple[int, int]:
    """The next smaller shape: half as wide, or half as many entries once they are one seat wide."""
    return (entries, -(-width // 2)) if width > 1 else (-(-entries // 2), 1)


def move(alive: np.ndarray, prompt: np.ndarray, devices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """New seats for those alive [N, W], in the smallest shape that all devices can use.

    prompt [N] is each entry's prompt. Returns, by device: the entry [d, n'] whose prompt serves the new
    entry, the old seat n * W + w [d, n', w'] of who sits there now, and whether nobody does [d, n', w'].
    """
    width = alive.shape[1]
    alive, prompt = alive.reshape(devices, -1, width), prompt.reshape(devices, -1)
    shape = alive.shape[1:]
    while (smaller := half(*shape)) != shape and all(
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
            seats = (at[:, None] * width + np.arange(width))[alive[d, at]]
            for first in range(0, len(seats), shape[1]):
                group = seats[first : first + shape[1]]
                entry[d, new], source[d, new, : len(group)], empty[d, new, : len(group)] = at[0], group, False
                new += 1
    return entry, source, empty


def _needed(alive: np.ndarray, prompt: np.ndarray, width: int) -> int:
    """Entries of `width` seats for those alive [n, w]: ceil(alive / width) of each prompt."""
    each = np.bincount(prompt, weights=alive.sum(axis=1))
    return int(np.sum(np.ceil(each / width)))
