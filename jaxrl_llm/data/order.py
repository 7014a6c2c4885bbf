"""The order in which a run draws its prompts: Grain iterators that checkpoints can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain

from jaxrl_llm.machine import distributed

Collate = Callable[[Sequence[int]], Any]
ENDLESS = 2**53  # rows: the largest whole number of which a float also has all smaller ones
SHARES = 100  # parts into which Grain divides the smallest weight of a mixture


def iterate(size: int, batch: int, seed: int, collate: Collate) -> grain.DatasetIterator:
    """Returns an endless iterator of batches over `size` rows, shuffled again in each epoch.

    A batch is `collate(numbers)` of this process's part of the numbers of its rows.
    Its `get_state()` is a small dict. `set_state` moves another iterator to the same position.
    """
    # Shuffled before it is repeated: each epoch draws every row once, in an order of its own.
    # Not without an end: Grain divides the length by the size of a batch, as floats, which overflows for batches of 1.
    numbers = grain.MapDataset.range(size).seed(seed).shuffle().repeat(ENDLESS // size)
    # All processes draw the same numbers, and each collates its part: no message is needed.
    dataset = numbers.batch(batch, batch_fn=lambda rows: collate(rows[distributed.part(batch)]))
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def mix(
    parts: Mapping[str, range],
    weights: Mapping[str, float],
    batch: int,
    seed: int,
    collate: Collate,
    draws: Callable[[int, int], bool] | None = None,
) -> grain.DatasetIterator:
    """Returns an endless iterator of batches that draws from several sources, in proportion to their weights.

    parts: the numbers of the rows of each source. Sources take turns in a fixed order, each in its own shuffled order.
    draws(turn, number) -> whether the row is drawn, where `turn` counts the rows that its source has offered. The next
    row of the same source takes the place of a row that is not, so the proportions stay.
    """
    # Grain divides by the smallest weight and rounds down: whole numbers of which the smallest is SHARES stay.
    least = min(weights.values())
    shares = [round(SHARES * weights[name] / least) for name in parts]
    sources = []
    for i, rows in enumerate(parts.values()):
        # A seed for each source: with one for all, sources of equal size would be shuffled alike.
        # Grain takes seeds of 32 bits.
        numbers = grain.MapDataset.range(rows.start, rows.stop).seed((seed + i) % 2**32).shuffle().repeat()
        offered = numbers.map_with_index(lambda turn, number: (turn, int(number)))
        source = offered.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        # After the prefetching: what is drawn depends on what the run has seen by then.
        sources.append(source.filter(lambda offer: draws(*offer)) if draws else source)
    mixed = grain.IterDataset.mix(sources, shares).map(lambda offer: offer[1])
    dataset = mixed.batch(batch, batch_fn=lambda rows: collate(rows[distributed.part(batch)]))
    # `draws` may refuse most rows.
    quiet = grain.experimental.DatasetOptions(filter_warn_threshold_ratio=None)
    return iter(grain.experimental.WithOptionsIterDataset(dataset, quiet))
