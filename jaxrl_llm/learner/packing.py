"""Completions of a prompt one after the other in rows, so that little is computed on padding."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout.samples import Samples
from jaxrl_llm.structs import Array, Batch, Config


def to_batch(samples: Samples) -> Batch:
    """What was sampled, packed into rows, on the host."""
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
    """Rows of each update of a step: the first epoch in order, later ones shuffled by (seed, step, epoch)."""
    for epoch in range(config.epochs):
        rows = np.arange(config.prompts_per_step)
        if epoch:
            np.random.default_rng((config.seed, step, epoch)).shuffle(rows)
        yield from jnp.asarray(rows.reshape(-1, config.prompts_per_update))


def pack(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Where each token of completions of lengths [B, G], each at most `limit` = C, is computed.

    Returns packed_index [B, N, T] int32: the token g * C + t of its group, or -1 for none. A row holds whole
    completions. T is C halved as often as the longest completion allows, and N is one of 1, 2, 3, 4, 6,
    8, 12 ...: few shapes are compiled in a run.
    """
    width = limit
    while width % 2 == 0 and width // 2 >= lengths.max():
        width //= 2
    rows = [_fill(row, width) for row in lengths]
    count = _round_up(max(len(row) for row in rows))
    packed_index = np.full((len(lengths), count, width), -1, np.int32)
    for b, row in enumerate(rows):
        for n, segment_ids in enumerate(row):
            taken = np.concatenate([g * limit + np.arange(lengths[b, g]) for g in segment_ids])
            packed_index[b, n, : len(taken)] = taken
    return packed_index


def _fill(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Members of each row: the longest first, each into the first row that has room."""
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
    """The next of 1, 2, 3, 4, 6, 8, 12, 16 ..."""
    power = 1 << (count - 1).bit_length()
    return 3 * power // 4 if power >= 4 and count <= 3 * power // 4 else power
