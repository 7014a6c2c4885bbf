"""The number of processes of a run, the index of this process, and its part of the rows of a batch."""

from __future__ import annotations

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine.jax_private import global_state


def count() -> int:
    """Returns the number of processes."""
    return global_state.num_processes


def index() -> int:
    """Returns the index of this process, from 0."""
    return global_state.process_id


def first() -> bool:
    """Returns whether this is process 0, which writes the log, the config and the exported model."""
    return index() == 0


def part(size: int) -> slice:
    """Returns the slice of `size` rows that belongs to this process. Raises: UserError, if `size` does not divide."""
    if size % count():
        raise UserError(
            f"config.prompts_per_step: {size} prompts cannot be split evenly over {count()} processes: use a multiple "
            f"of {count()}"
        )
    part_size = size // count()
    return slice(index() * part_size, (index() + 1) * part_size)
