"""Rows in the memory of a script or a notebook, which a config names as memory.rows_1, memory.rows_2, …"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import UserError

PREFIX = "memory.rows_"
ROWS: dict[str, list[Any]] = {}  # rows of this process, by name


def keep(rows: Any, field: str) -> str:
    """Stores rows for `rows_of`, and returns their name for the config.

    rows: a list of dicts, a `datasets.Dataset` or another sequence with a length; field: config field that holds them.
    Raises: UserError, naming the field, for a value without length, without rows, or whose first row is no dict.
    """
    kind = type(rows).__name__
    if isinstance(rows, (Mapping, set, frozenset)) or not (hasattr(rows, "__len__") and hasattr(rows, "__iter__")):
        raise UserError(
            f"config.{field} has a value of the type {kind}, but must be text, a list of rows, or a datasets.Dataset"
        )
    if len(rows) == 0:
        raise UserError(f"config.{field} has no rows: the list must have at least one row")
    if not isinstance(first := next(iter(rows)), Mapping):
        raise UserError(
            f"config.{field} is a {kind} whose first row has the type {type(first).__name__}, but each row must be a "
            "dict of columns; use df.to_dict('records') for a pandas.DataFrame"
        )
    name = f"{PREFIX}{len(ROWS) + 1}"
    ROWS[name] = list(rows)
    return name


def rows_of(name: str, field: str) -> list[Any]:
    """Returns the rows that `keep` stored under this name. Raises: UserError, in another process."""
    if name not in ROWS:
        raise UserError(
            f"{field} = {name!r}: these rows were in the memory of another process; run the script that makes them, or "
            "name a file of rows"
        )
    return list(ROWS[name])
