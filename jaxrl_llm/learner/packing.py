"""Builds batches. Packs several completions of a group into one row, to compute little on padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.shapes import Ladder, Shape
from jaxrl_llm.structs import Array, Batch, Config

ROW = 32  # tokens; narrower rows are slower, so several short completions share one
NARROW = 128  # tokens; the least width for which narrower rows, with less attention, may pay
ROOM = 1.25  # a batch's tokens, over those of the first one
SHARES = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8, 1 / 16)  # of the tokens of the largest shape


def to_batch(samples: Samples, pack: Callable[[np.ndarray], np.ndarray] | None) -> Batch:
    """Converts samples to a batch on the host. pack: lengths [B, G] -> packed_index [B, N, T]; None: no packing."""
    prompts, rollouts = samples.prompts, samples.rollouts
    return Batch(
        prompts.tokens,
        prompts.mask,
        rollouts.completions,
        rollouts.completion_mask,
        rollouts.loss_mask,
        sampler_logprobs=rollouts.logprobs,
        packed_index=pack(rollouts.completion_mask.sum(axis=-1)) if pack else None,
    )


def minibatches(config: Config, step: int) -> Iterator[Array]:
    """Yields the rows of each update of a step: first epoch in order, later ones shuffled by (seed, step, epoch)."""
    for epoch in range(config.epochs):
        rows = np.arange(config.prompts_per_step)
        if epoch:  # the seed depends on no earlier step, so a resumed run gets the same rows
            np.random.default_rng((config.seed, step, epoch)).shuffle(rows)
        yield from map(jnp.asarray, rows.reshape(-1, config.prompts_per_update))


def packed_shapes(group: int, limit: int) -> list[Shape]:
    """Lists the shapes [N, T] of a group's packed rows, the largest first. limit: C, the most tokens of a completion.

    A row has C tokens, or some whole completions if these are short; where C is large there are rows of a quarter too.
    """
    joined = max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * limit <= ROW))
    shapes = set(_shares(group // joined, joined * limit))
    if limit >= 4 * NARROW:
        shapes |= set(_shares(4 * group, -(-limit // (4 * NARROW)) * NARROW)[1:])
    return sorted(shapes, key=lambda shape: (-shape[0] * shape[1], -shape[1]))


def _shares(rows: int, width: int) -> list[Shape]:
    """Lists [N, T] with the SHARES of rows, or of the width if there is one row."""
    if rows == 1:
        return list(dict.fromkeys((1, math.ceil(share * width)) for share in SHARES))
    return list(dict.fromkeys((math.ceil(share * rows), width) for share in SHARES))


class Packing:
    """Packs the completions of each step into rows, in one of few shapes."""

    def __init__(self, ladder: Ladder, seconds: Callable[[Shape], float], limit: int):
        """seconds(shape): of scoring and updates; limit: C."""
        self.ladder, self._seconds, self._limit = ladder, seconds, limit

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Packs completions of these lengths [B, G] -> packed_index [B, N, T]. Counts as a step of the run."""
        self.ladder.begin()
        # The first batch stands for those to come, some of which need more room.
        likely = lengths if self.ladder.calls > 1 else np.minimum(lengths * ROOM, self._limit).astype(int)
        holding = which_hold(likely, self.ladder.shapes)
        self.ladder.settle(lambda shapes: min(self._seconds(shape) for shape in shapes if shape in holding))
        holding = which_hold(lengths, self.ladder.in_use())
        return pack(lengths, self._limit, min(holding, key=self._seconds))


def which_hold(lengths: np.ndarray, shapes: Iterable[Shape]) -> list[Shape]:
    """Returns the shapes [N, T] whose rows hold the completions of every group; lengths [B, G]."""
    widths = {width for _, width in shapes if width >= lengths.max()}
    needed = {width: max(len(fill(of_group, width)) for of_group in lengths) for width in widths}
    return [shape for shape in shapes if needed.get(shape[1], math.inf) <= shape[0]]


def pack(lengths: np.ndarray, limit: int, shape: Shape) -> np.ndarray:
    """Assigns each token to a place in the rows of its group. lengths [B, G] are at most `limit` = C tokens.

    Returns packed_index [B, N, T] int32: the index g * C + t of a token in its group, or -1 for padding. A row has
    only whole completions.
    """
    packed_index = np.full((len(lengths), *shape), -1, np.int32)
    for b, of_group in enumerate(lengths):
        for n, completions in enumerate(fill(of_group, shape[1])):
            taken = np.concatenate([g * limit + np.arange(of_group[g]) for g in completions])
            packed_index[b, n, : len(taken)] = taken
    return packed_index


def fill(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Lists the completions of each row. Places the longest first, each in the first row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for g in np.argsort(-lengths, kind="stable"):
        row = next((n for n, left in enumerate(room) if left >= lengths[g]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(int(g))
        room[row] -= int(lengths[g])
    return rows
