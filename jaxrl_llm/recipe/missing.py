"""Steps of the checks that look at this machine: `train` refuses what is missing, and `doctor` judges all else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jaxrl_llm.errors import MissingHere

_collected: ContextVar[list[str] | None] = ContextVar("missing", default=None)


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collects what the steps within it miss, one line each, so that the checks go on. Yields the list."""
    lines: list[str] = []
    token = _collected.set(lines)
    try:
        yield lines
    finally:
        _collected.reset(token)


@contextmanager
def tried() -> Iterator[None]:
    """Tries a step of a check. Raises: MissingHere, unless `collected` is around it."""
    try:
        yield
    except MissingHere as error:
        lines = _collected.get()
        if lines is None:
            raise
        if str(error) not in lines:
            lines.append(str(error))
