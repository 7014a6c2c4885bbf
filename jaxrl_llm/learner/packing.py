"""Rows of an update: packs several completions of a group into one row, so that little of it is padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_llm.machine.shapes import Shape, ShapePolicy
from jaxrl_llm.structs import AnyArray, Sizes

# Short completions share a row of at most ROW tokens, because narrower rows are slow.
ROW = 32
# The TPU's attention kernel needs rows of a multiple of KERNEL tokens. Rows that are narrower than that save little.
KERNEL = 128
# The first step takes a shape that does not hold every batch if it takes at most this share of the time.
FIRST_SHARE = 0.5


def minibatches(sizes: Sizes, seed: int, step: int) -> Iterator[AnyArray]:
    """Yields the prompts of each update of a step: first epoch in order, later ones shuffled by (seed, step, epoch)."""
    for epoch in range(sizes.epochs):
        rows = np.arange(sizes.prompts_per_step)
        if epoch:
            # The seed does not depend on earlier steps, so a resumed run gets the same prompts.
            np.random.default_rng((seed, step, epoch)).shuffle(rows)
        yield from rows.reshape(-1, sizes.prompts_per_update).astype(np.int32)


def packed_shapes(group_size: int, limit: int) -> list[Shape]:
    """Lists the shapes [N, T] of the packed rows of a prompt in a micro-batch, the largest first.

    limit: C, the token limit of completions. The largest shape of each width holds all completions of a group, and each
    smaller one has half as many rows.

    A row has C tokens, or several whole completions if C is small. A shape with 1.5 C tokens leaves less padding at the
    end of rows. If C is large, rows of a quarter of C, of a sixteenth and so on serve short completions.
    """
    divisors = [count for count in range(1, group_size + 1) if group_size % count == 0]
    completions_per_row = max(count for count in divisors if count == 1 or count * limit <= ROW)
    widths = [completions_per_row * limit]
    if completions_per_row == 1 < group_size:
        step = 1 if limit % KERNEL else KERNEL
        widths.append(-(-3 * limit // (2 * step)) * step)
    narrow = limit
    while narrow >= 2 * KERNEL:
        narrow = -(-narrow // (4 * KERNEL)) * KERNEL
        widths.append(narrow)
    shapes: list[Shape] = []
    for width in widths:
        rows = max_rows(group_size, limit, width)
        while shapes[-1:] != [(1, width)]:
            shapes.append((rows, width))
            rows = -(-rows // 2)
    return sorted(shapes, key=lambda shape: (-shape[0] * shape[1], -shape[1]))


def max_rows(group_size: int, limit: int, width: int) -> int:
    """Returns the most rows of a width that the completions of a group may need. limit: C."""
    return -(-group_size // max(width // limit, 1))


def index_shape(group_size: int, limit: int, shape: Shape) -> tuple[int, int, int]:
    """Returns the last three axes of a packed_index [B, E, N, T].

    E: most micro-batches that hold rows of one prompt. N: rows of a prompt in a micro-batch. T: tokens of a row.
    limit: token limit of completions (C). shape: (N, T).
    """
    rows, width = shape
    return -(-max_rows(group_size, limit, width) // rows), rows, width


class Packing:
    """Packs the completions of each step into rows, whose shape it chooses from few allowed shapes."""

    def __init__(self, shape_policy: ShapePolicy, seconds: Callable[[Shape, int, np.ndarray], float], limit: int):
        """seconds(shape, mean tokens of a prompt, parts): estimated time of scoring and updates, with parts [B]
        micro-batches of each prompt.

        limit: C.
        """
        self.shape_policy, self._seconds, self._limit = shape_policy, seconds, limit

    def __call__(self, lengths: np.ndarray, prompt_tokens: int) -> np.ndarray:
        """Returns the packed_index [B, E, N, T] of completions with these lengths [B, G]. Call it once per step."""
        # Width of a row -> number of rows [B] that each prompt needs.
        rows: dict[int, np.ndarray] = {}
        for width in {width for _, width in self.shape_policy.shapes if width >= lengths.max()}:
            rows[width] = np.array([len(fill_rows(group_lengths, width)) for group_lengths in lengths])

        def seconds(shape: Shape) -> float:
            count, width = shape
            return self._seconds(shape, prompt_tokens, -(-rows[width] // count)) if width in rows else math.inf

        # A row of C tokens or more holds a completion of any length.
        wide_shapes = [shape for shape in self.shape_policy.shapes if shape[1] >= self._limit]
        holds_every_batch = min(wide_shapes, key=seconds)
        fastest = min(self.shape_policy.shapes, key=seconds)
        # If completions are much shorter than their limit, the first step is fast with the smaller shape. The shape
        # that holds every batch is then compiled beside it.
        is_much_faster = seconds(fastest) < FIRST_SHARE * seconds(holds_every_batch)
        self.shape_policy.start_call(holds_every_batch, *([fastest] if is_much_faster else []))
        # No later shape is larger than the first shapes, so a run whose first programs fit the memory always fits.
        largest = max(math.prod(shape) for shape in self.shape_policy.first_calls)
        self.shape_policy.add_shapes(lambda shapes: min(seconds(s) for s in shapes if math.prod(s) <= largest))
        return pack(lengths, self._limit, min(self.shape_policy.usable_shapes(), key=seconds))


def pack(lengths: np.ndarray, limit: int, shape: Shape) -> np.ndarray:
    """Assigns each token to a place in the rows of its group. lengths [B, G]: at most `limit` = C tokens.

    Returns packed_index [B, E, N, T] int32. Its entries are the index g * C + t of a token in its group, and -1 for
    padding. A row has only whole completions.
    """
    rows, width = shape
    packed_index = np.full((len(lengths), *index_shape(lengths.shape[1], limit, shape)), -1, np.int32)
    for prompt, group_lengths in enumerate(lengths):
        for row, completions in enumerate(fill_rows(group_lengths, width)):
            token_index = np.concatenate(
                [completion * limit + np.arange(group_lengths[completion]) for completion in completions]
            )
            packed_index[prompt, row // rows, row % rows, : len(token_index)] = token_index
    return packed_index


def fill_rows(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Lists the completions of each row. The longest completions come first, each in the first row with room.

    lengths: tokens of each completion of a group. width: tokens that fit in a row.
    """
    rows: list[list[int]] = []
    free_tokens: list[int] = []  # of each row
    # A stable sort gives the same rows in all processes and in a resumed run.
    for completion in np.argsort(-lengths, kind="stable"):
        length = int(lengths[completion])
        row = next((row for row, free in enumerate(free_tokens) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            free_tokens.append(width)
        rows[row].append(int(completion))
        free_tokens[row] -= length
    return rows
