"""A curriculum by measured difficulty: prompts that taught nothing at their last visit are drawn less often.

If all completions of a prompt earn the same (all solve it, or none does), their advantages are 0 and the group has no
gradient. Dynamic sampling (`rollout.samples`, arXiv 2503.14476) finds such groups after it has sampled them. This does
not sample them, as far as the last visit predicts the next one.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

import grain
import numpy as np

from jaxrl_llm.data import order
from jaxrl_llm.data.prompts import Dataset
from jaxrl_llm.data.settings import DataSettings
from jaxrl_llm.machine import distributed


class Curriculum:
    """Decides which prompts are drawn. Its only state is a bit for each row: whether its last visit had no signal."""

    def __init__(self, size: int, skip: float, seed: int):
        """size: rows of the data set; skip: probability of passing over a row whose last visit had no signal."""
        self._skip, self._seed = skip, seed
        self.no_signal = np.zeros(size, bool)  # [N], what a draw knows
        self._passed = 0

    def draws(self, turn: int, number: int) -> bool:
        """Returns whether row `number` is drawn, which its source offers as its row `turn`."""
        # A generator for each offer, and not one for all: no state to save.
        chance = np.random.default_rng([self._seed, turn, number]).random() if self.no_signal[number] else 1.0
        self._passed += chance < self._skip
        return chance >= self._skip

    def metrics(self) -> dict[str, float]:
        """Returns how many prompts were passed over since the last call, and the share of rows without a signal."""
        passed, self._passed = self._passed, 0
        return {"curriculum/passed_over": float(passed), "curriculum/no_signal": float(self.no_signal.mean())}

    def visited(
        self, known: np.ndarray, numbers: np.ndarray, no_signal: np.ndarray, replaced: Sequence[int]
    ) -> np.ndarray:
        """Returns the bits [N] after the visits of a step, of all processes.

        numbers, no_signal: [B] of this process's prompts, rows of the data set and whether they taught nothing;
        replaced: rows of all processes that had no signal, and whose place others took.
        """
        # Every process needs the same bits, or the processes would draw different rows.
        numbers, no_signal = distributed.gather(numbers), distributed.gather(no_signal)
        # A copy: batches already drawn ahead keep the bits that they were drawn with.
        updated = known.copy()
        # First: a row that was replaced may be drawn again in the same step, and then that visit counts.
        updated[list(replaced)] = True
        updated[numbers] = True
        # Last: a row may be drawn twice in a step.
        updated[numbers[~no_signal]] = False
        return updated


def drawn(
    dataset: Dataset, collate: order.Collate, settings: DataSettings, *, batch: int, seed: int
) -> tuple[Curriculum | None, grain.DatasetIterator]:
    """Returns the curriculum of a run, if it passes over prompts, and the iterator over its batches of prompts."""
    size, skip = len(dataset.rows), settings.skip
    if not skip and not dataset.parts:
        return None, order.iterate(size, batch, seed, collate, values=dataset.order_values)
    curriculum = Curriculum(size, skip, seed) if skip else None
    parts = dataset.parts or {"all": range(size)}
    shares = {name: settings.mixture[name].weight if dataset.parts else 1.0 for name in parts}
    draws, values = curriculum.draws if curriculum else None, dataset.order_values
    return curriculum, order.mix(parts, shares, batch, seed, collate, draws, values=values)


def to_text(bits: np.ndarray) -> str:
    """Returns bits [N] as text for a checkpoint, at most N / 6 characters."""
    return base64.b85encode(zlib.compress(np.packbits(bits).tobytes())).decode()


def from_text(text: str, size: int) -> np.ndarray:
    """Returns the bits of `to_text`."""
    return np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8), count=size).astype(bool)
