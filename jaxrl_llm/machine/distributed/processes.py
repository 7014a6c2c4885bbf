"""The number of processes, the place of this one among them, and its part of the rows of a batch."""

from __future__ import annotations

# JAX's public functions initialize the devices.
from jax._src.distributed import global_state

from jaxrl_llm.errors import UserError


def count() -> int:
    """Returns the number of processes."""
    return global_state.num_processes


def index() -> int:
    """Returns the number of this process, from 0."""
    return global_state.process_id


def first() -> bool:
    """Returns whether this process writes the log, the config and the exported model."""
    return index() == 0


def part(size: int) -> slice:
    """Returns this process's part of `size` rows. Raises: UserError, if they cannot be split evenly."""
    if size % count():
        raise UserError(f"{size} prompts cannot be split evenly over {count()} processes: give a multiple")
    each = size // count()
    return slice(index() * each, (index() + 1) * each)
