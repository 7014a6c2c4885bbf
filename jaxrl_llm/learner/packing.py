"""Builds batches. Packs several completions of a group into one row, to compute little on padding."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.structs import Array, Batch, Config


def to_batch(samples: Samples) -> Batch:
    """Converts samples to a batch, packed into rows, on the host."""
    prompts, rollouts = samples.prompts, samples.rollouts
    packed_index = pack(rollouts.completion_mask.sum(axis=-1), rollouts.completions.shape[-1])
    return Batch(
        prompts.tokens,
        prompts.mask,
        rollouts.completions,
        rollouts.completion_mask,
        rollouts.loss_mask,
        sampler_logprobs=rollouts.logprobs,
        packed_index=packed_index,
    )


def minibatches(config: Config, step: int) -> Iterator[Array]:
    """Yields the rows of each update of a step: first epoch in order, later ones shuffled by (seed, step, epoch)."""
    for epoch in range(config.epochs):
        rows = np.arange(config.prompts_per_step)
        if epoch:  # the seed depends on no earlier step, so a resumed run gets the same rows
            np.random.default_rng((config.seed, step, epoch)).shuffle(rows)
        yield from jnp.asarray(rows.reshape(-1, config.prompts_per_update))


def pack(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Assigns each token to a place in the rows of its group. lengths [B, G] are at most `limit` = C tokens.

    Returns packed_index [B, N, T] int32: the index g * C + t of a token in its group, or -1 for padding. A row has
    only whole completions. T is C, halved as often as the longest completion allows. N is one of 1, 2, 3, 4, 6, 8,
    12 ... So a run compiles few shapes.
    """
    width = limit
    while width % 2 == 0 and width // 2 >= lengths.max():
        width //= 2
    rows = [_fill(row, width) for row in lengths]
    count = _round_up(max(len(row) for row in rows))
    packed_index = np.full((len(lengths), count, width), -1, np.int32)
    for b, row in enumerate(rows):
        for n, completions in enumerate(row):
            taken = np.concatenate([g * limit + np.arange(lengths[b, g]) for g in completions])
            packed_index[b, n, : len(taken)] = taken
    return packed_index


def _fill(lengths: np.ndarray, width: int) -> list[list[int]]:
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


def _round_up(count: int) -> int:
    """Rounds up to one of 1, 2, 3, 4, 6, 8, 12, 16 ..."""
    power = 1 << (count - 1).bit_length()
    return 3 * power // 4 if power >= 4 and count <= 3 * power // 4 else power
