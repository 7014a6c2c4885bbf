"""The order in which a run draws its prompts: Grain iterators that checkpoints can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jaxrl_llm.machine import distributed

Collate = Callable[[Sequence[int]], Any]
ENDLESS = 2**53  # rows: the largest whole number of which a float also has all smaller ones
SHARES = 100  # parts into which Grain divides the smallest weight of a mixture


def iterate(
    size: int, batch: int, seed: int, collate: Collate, *, values: np.ndarray | None = None
) -> grain.DatasetIterator:
    """Returns an endless iterator of batches over `size` rows, shuffled again in each epoch, or sorted by `values`.

    A batch is `collate(numbers)` of this process's part of the numbers of its rows.
    Its `get_state()` is a small dict. `set_state` moves another iterator to the same position.
    """
    # The order has an end, because Grain divides its length by the size of a batch as floats, which overflows for 1.
    numbers = _epoch(range(size), seed, values).repeat(ENDLESS // size)
    # All processes draw the same numbers, and each collates its part: no message is needed.
    dataset = numbers.batch(batch, batch_fn=lambda rows: collate(rows[distributed.part(batch)]))
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def _epoch(rows: range, seed: int, values: np.ndarray | None) -> grain.MapDataset:
    """Returns the numbers of rows in the order of an epoch. values: [N] of the whole data set; None: shuffled."""
    if values is None:
        # Shuffled before it is repeated: each epoch draws every row once, in an order of its own.
        return grain.MapDataset.range(rows.start, rows.stop).seed(seed).shuffle()
    # Shuffled before it is sorted: rows of one value are often grouped in their file, by topic or by author.
    shuffled = rows.start + np.random.default_rng(seed).permutation(len(rows))
    return grain.MapDataset.source(shuffled[np.argsort(values[shuffled], kind="stable")].tolist())


def mix(
    parts: Mapping[str, range],
    weights: Mapping[str, float],
    batch: int,
    seed: int,
    collate: Collate,
    draws: Callable[[int, int], bool] | None = None,
    *,
    values: np.ndarray | None = None,
) -> grain.DatasetIterator:
    """Returns an endless iterator of batches that draws from several sources, in proportion to their weights.

    parts: the numbers of the rows of each source. Sources take turns in a fixed order, each in its own shuffled order,
    or sorted by `values` [N], which are those of all rows.
    draws(turn, number) -> whether the row is drawn, where `turn` counts the rows that its source has offered. The next
    row of the same source takes the place of a row that is not, so the proportions stay.
    """
    # Grain divides by the smallest weight and rounds down: whole numbers of which the smallest is SHARES stay.
    least = min(weights.values())
    shares = [round(SHARES * weights[name] / least) for name in parts]
    sources = []
    for i, rows in enumerate(parts.values()):
        # Each source has its own seed, because one seed would shuffle sources of equal size alike.
        # Grain takes seeds of 32 bits.
        numbers = _epoch(rows, (seed + i) % 2**32, values).repeat()
        offered = numbers.map_with_index(lambda turn, number: (turn, int(number)))
        source = offered.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        # The filter comes after the prefetching, because it depends on what the run has seen when it draws.
        sources.append(source.filter(lambda offer: draws(*offer)) if draws else source)
    mixed = grain.IterDataset.mix(sources, shares).map(lambda offer: offer[1])
    dataset = mixed.batch(batch, batch_fn=lambda rows: collate(rows[distributed.part(batch)]))
    # `draws` may refuse most rows.
    quiet = grain.experimental.DatasetOptions(filter_warn_threshold_ratio=None)
    return iter(grain.experimental.WithOptionsIterDataset(dataset, quiet))
