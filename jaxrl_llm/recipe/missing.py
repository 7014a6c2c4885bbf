"""Checks that need files or packages of this machine: `train` refuses what is missing, and `doctor` lists it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jaxrl_llm.errors import MissingHere

_collected_lines: ContextVar[list[str] | None] = ContextVar("missing", default=None)  # None outside of `collected`


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collects the MissingHere errors of `tried` blocks, so that the checks continue. Yields the list of messages."""
    lines: list[str] = []
    token = _collected_lines.set(lines)
    try:
        yield lines
    finally:
        _collected_lines.reset(token)


@contextmanager
def tried() -> Iterator[None]:
    """Context for a part of a check that needs a file or package which this machine may lack.

    Raises: MissingHere, unless it runs inside of `collected`, which keeps the message of the error instead.
    """
    try:
        yield
    except MissingHere as error:
        lines = _collected_lines.get()
        if lines is None:
            raise
        if str(error) not in lines:
            lines.append(str(error))
