"""The order in which a run draws its prompts: Grain iterators that checkpoints can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.machine import distributed

if TYPE_CHECKING:  # it takes a second, which a check of a config need not wait for
    import grain

Collate = Callable[[Sequence[int]], Any]  # row numbers -> batch
MAX_ROWS = 2**53  # rows of an endless order; a float represents all whole numbers up to this one
SHARES = 100  # parts into which Grain divides the smallest weight of a mixture


def iterate(
    size: int, batch: int, seed: int, collate: Collate, *, values: np.ndarray | None = None
) -> grain.DatasetIterator:
    """Returns an endless iterator of batches over `size` rows, shuffled again in each epoch, or sorted by `values` [N].

    A batch is `collate(numbers)` of this process's part of the row numbers. `get_state()` of the iterator is a small
    dict, and `set_state` moves another iterator to the same position.
    """
    import grain

    # The order is finite, because Grain computes length / batch as floats, which overflows for an endless order and
    # batch = 1.
    numbers = _epoch(range(size), seed, values).repeat(MAX_ROWS // size)
    # Processes need not communicate, because all draw the same numbers, and each collates its part.
    dataset = numbers.batch(batch, batch_fn=lambda rows: collate(rows[distributed.part(batch)]))
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def _epoch(rows: range, seed: int, values: np.ndarray | None) -> grain.MapDataset:
    """Returns the numbers of rows in the order of an epoch, sorted by `values` [N] of all rows; None = shuffled."""
    import grain

    if values is None:
        # Grain shuffles a repeated order anew in each epoch, so that each epoch draws every row once.
        return grain.MapDataset.range(rows.start, rows.stop).seed(seed).shuffle()
    # Rows are shuffled before they are sorted, because rows with equal values are often grouped in their file.
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

    parts: row numbers of each source; values: [N] numbers of all rows, by which each source is sorted, None = each
    source is shuffled; draws(turn, number): whether a row is drawn, where `turn` counts the rows that its source has
    offered. Sources take turns in a fixed order. If a row is not drawn, the next row of the same source replaces it, so
    that the proportions stay.
    """
    import grain

    # Grain divides by the smallest weight and rounds down, so shares are whole numbers of which the smallest is SHARES.
    smallest = min(weights.values())
    shares = [round(SHARES * weights[name] / smallest) for name in parts]
    sources = []
    for i, rows in enumerate(parts.values()):
        # Each source has its own seed, because one seed would shuffle sources of equal size alike. Grain needs 32 bits.
        numbers = _epoch(rows, (seed + i) % 2**32, values).repeat()
        offered = numbers.map_with_index(lambda turn, number: (turn, int(number)))
        source = offered.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        # The filter comes after the prefetching, because it depends on what the run has seen when it draws.
        sources.append(source.filter(lambda offer: draws(*offer)) if draws else source)
    mixed = grain.IterDataset.mix(sources, shares).map(lambda offer: offer[1])
    dataset = mixed.batch(batch, batch_fn=lambda rows: collate(rows[distributed.part(batch)]))
    # Grain warns if a filter drops most rows, which `draws` may do.
    quiet = grain.experimental.DatasetOptions(filter_warn_threshold_ratio=None)
    return iter(grain.experimental.WithOptionsIterDataset(dataset, quiet))
