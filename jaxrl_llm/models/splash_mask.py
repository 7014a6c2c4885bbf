"""The mask of packed rows for JAX's splash attention kernel on TPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash


@dataclass(frozen=True)
class RowMask(splash.Mask):
    """The mask of one row for splash attention: queries [T] of the row, keys [T + P] of the row and of its prompt.

    A query sees its completion up to itself, and the whole prompt. Segment ids cannot express this, because the kernel
    compares them for equality, and the prompt belongs to every completion. The kernel skips blocks that `__getitem__`
    leaves empty; `__getitem__` shows all keys that a query may see, wherever its completion starts. In the other blocks
    the kernel calls `mask_function` with the values of `q_sequence`, which at run time also hold the starts.
    """

    length: int  # T, padded to blocks
    prompt: int  # P, padded to blocks; with a window, a prompt's last token is at P - 1
    window: int  # number of tokens that a token sees; 0 = unlimited
    # Largest distance from a query to a later key that it sees. If it is above 0, the row has no prompt, and
    # `mask_function` gets the first and the last key that the query sees.
    max_lookahead: int
    # A query at run time is one int32: the low `index_bits` hold its index in the row, the bits above the start of its
    # completion.
    index_bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length + self.prompt

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.length, dtype=np.int32)

    def mask_function(self, query: Any, key: Any) -> Any:
        start, index = query >> self.index_bits, query & (2**self.index_bits - 1)
        if self.max_lookahead:
            return (start <= key) & (key <= index)
        return self._is_visible(start, index - start, index, key)

    def _is_visible(self, start: Any, position: Any, index: Any, key: Any) -> Any:
        """Returns whether a query sees a key.

        start: first index of the query's completion in the row. position: index of the query in its completion. index,
        key: indices of query and key in the row.
        """
        in_completion, in_prompt = (start <= key) & (key <= index), key >= self.length
        if self.window:
            in_completion = in_completion & (key > index - self.window)
            in_prompt = in_prompt & (key - self.shape[1] > position - self.window)
        return in_completion | in_prompt

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        index, key = self.q_sequence[block[0], None], np.arange(self.shape[1])[None, block[1]]
        return self._is_visible(0, 0, index, key) | (index < key) & (key <= index + self.max_lookahead)
