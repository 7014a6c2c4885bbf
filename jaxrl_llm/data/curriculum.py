"""A curriculum by measured difficulty: prompts that taught nothing at their last visit are drawn less often.

If all completions of a prompt earn the same (all solve it, or none does), their advantages are 0 and the group has no
gradient. Dynamic sampling (`rollout.samples`, arXiv 2503.14476) finds such groups after it has sampled them. This does
not sample them, as far as the last visit predicts the next one.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.data import order
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.data.settings import DataSettings
from jaxrl_llm.machine import distributed

if TYPE_CHECKING:  # it takes a second, which a check of a config need not wait for
    import grain


class Curriculum:
    """Decides which prompts are drawn. Its only state is one bit per row: whether its last visit had no signal."""

    def __init__(self, size: int, skip: float, seed: int):
        """size: number of rows; skip: probability of skipping a row whose last visit had no signal."""
        self._skip, self._seed = skip, seed
        self.no_signal = np.zeros(size, bool)  # [N] bits of the rows, as the next draw uses them
        self._skipped = 0

    def draws(self, turn: int, number: int) -> bool:
        """Returns whether row `number` is drawn. turn: count of the rows that its source has offered so far."""
        # Each offer has a generator of its own, so that no random state must be saved.
        chance = np.random.default_rng([self._seed, turn, number]).random() if self.no_signal[number] else 1.0
        self._skipped += chance < self._skip
        return chance >= self._skip

    def metrics(self) -> dict[str, float]:
        """Returns the number of prompts skipped since the last call, and the share of rows without a signal."""
        skipped, self._skipped = self._skipped, 0
        return {"curriculum/passed_over": float(skipped), "curriculum/no_signal": float(self.no_signal.mean())}

    def visited(
        self, previous: np.ndarray, numbers: np.ndarray, no_signal: np.ndarray, replaced: Sequence[int]
    ) -> np.ndarray:
        """Returns the bits [N] after the visits of a step, of all processes.

        previous: [N] bits before the step; numbers: [B] rows of this process's prompts; no_signal: [B] whether each of
        these prompts had no signal; replaced: rows of all processes without signal that other rows replaced.
        """
        # All processes need equal bits, because they would draw different rows otherwise.
        numbers, no_signal = distributed.gather(numbers), distributed.gather(no_signal)
        # The bits are copied, because batches that were drawn ahead keep the bits of their draw.
        updated = previous.copy()
        # Replaced rows come first, because such a row may be drawn again in the same step, and then that visit counts.
        updated[list(replaced)] = True
        updated[numbers] = True
        # A row may be drawn twice in a step; one visit with a signal is enough, so these rows come last.
        updated[numbers[~no_signal]] = False
        return updated


def drawn(
    dataset: Dataset, collate: order.Collate, settings: DataSettings, *, batch: int, seed: int
) -> tuple[Curriculum | None, grain.DatasetIterator]:
    """Returns the curriculum of a run, None if it skips no prompts, and the iterator over its batches of prompts.

    collate: makes a batch of row numbers; settings: section `data`; batch: prompts of a step.
    """
    size, skip = len(dataset.rows), settings.skip
    if not skip and not dataset.parts:
        return None, order.iterate(size, batch, seed, collate, values=dataset.order_values)
    curriculum = Curriculum(size, skip, seed) if skip else None
    parts = dataset.parts or {"all": range(size)}
    shares = {name: settings.mixture[name].weight if dataset.parts else 1.0 for name in parts}
    draws, values = curriculum.draws if curriculum else None, dataset.order_values
    return curriculum, order.mix(parts, shares, batch, seed, collate, draws=draws, values=values)


def to_text(bits: np.ndarray) -> str:
    """Returns bits [N] as text for a checkpoint, at most N / 6 characters."""
    return base64.b85encode(zlib.compress(np.packbits(bits).tobytes())).decode()


def from_text(text: str, size: int) -> np.ndarray:
    """Returns the bits of `to_text`."""
    return np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8), count=size).astype(bool)
