"""Rows that a script or a notebook has in memory, by the names that a config has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.errors import UserError

PREFIX = "memory.rows_"
ROWS: dict[str, list[Any]] = {}  # of this process


def keep(rows: Any, field: str) -> str:
    """Keeps rows, and returns their name: a list of dicts, a `datasets.Dataset` or anything else with a length.

    Raises: UserError, naming the field, for what has no length, or is empty, or whose first row is no dict.
    """
    kind = type(rows).__name__
    no_rows = isinstance(rows, (Mapping, ConfigDict, set, frozenset))
    if no_rows or not (hasattr(rows, "__len__") and hasattr(rows, "__iter__")):
        split = ", such as one of its splits" if isinstance(rows, Mapping) else ""
        raise UserError(
            f"config.{field} is of the type {kind}: give text, a list of rows, or a datasets.Dataset{split}"
        )
    if len(rows) == 0:
        raise UserError(f"config.{field} has no rows: give some")
    if not isinstance(first := next(iter(rows)), Mapping):
        raise UserError(
            f"config.{field} is of the type {kind}, and its first row of the type {type(first).__name__}: make each "
            "row a dict of columns; of a pandas.DataFrame, to_dict('records')"
        )
    name = f"{PREFIX}{len(ROWS) + 1}"
    ROWS[name] = list(rows)
    return name


def rows_of(name: str, field: str) -> list[Any]:
    """Returns the rows of a name. Raises: UserError, in another process than theirs."""
    if name not in ROWS:
        raise UserError(
            f"{field} = {name!r} were rows in the memory of another process: run the script that has them, or "
            "give a file"
        )
    return list(ROWS[name])
