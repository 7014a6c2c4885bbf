"""Configs that know the path of each field, so that a value of a wrong type is refused in one line where it is set."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jaxrl_llm.errors import UserError

# Types of fields, in error messages.
KINDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a tuple",
    dict: "a section",
}
JUDGE = "eval.function"  # a field of text that also takes a function object (`names.with_names`)


class Section(ConfigDict):
    """A config or a section of one. Where a field holds a tuple, one value becomes a tuple of one.

    Raises: UserError, with the path of the field, for a value of another type.
    """

    _path = ""  # in the whole config, such as "critic.optim"; "": it is the whole

    def __setitem__(self, key: str, value: Any) -> None:
        path = f"{self._path}.{key}" if self._path else key
        before = self.get(key)
        if isinstance(value, (Mapping, ConfigDict)):
            value = sections(value)
            value._move(path)
        elif isinstance(before, tuple) and not isinstance(value, (tuple, list, FieldReference, type(None))):
            value = (value,)
        try:
            if path == JUDGE and (callable(value) or isinstance(value, str)):
                with self.ignore_type():
                    super().__setitem__(key, value)
            else:
                super().__setitem__(key, value)
        except TypeError:
            raise UserError(f"config.{path} {problem(value, before, path)}") from None

    def _move(self, path: str) -> None:
        object.__setattr__(self, "_path", path)
        for key, value in self.items(preserve_field_references=True):
            if isinstance(value, Section):
                value._move(f"{path}.{key}")


def sections(config: Any) -> Section:
    """Returns a ConfigDict or a dict, with all sections in it, as an unlocked `Section`; a `Section` as it is."""
    if isinstance(config, Section):
        return config
    section = Section(config)
    section.unlock()
    return section


def problem(value: Any, before: Any, path: str) -> str:
    """Describes a value of another type than that before it, for an error message with the field's name."""
    if isinstance(before, ConfigDict):
        return f"is a section: set one of {', '.join(f'{path}.{key}' for key in before)}"
    if isinstance(value, FunctionType) and isinstance(before, str):
        return f"takes no function: give its name, '{value.__module__}.{value.__qualname__}'"
    shown = "a section" if isinstance(value, ConfigDict) else repr(value)
    example = f", such as {before!r}" if not isinstance(before, bool) and before not in ("", ()) else ""
    kind = KINDS.get(type(before), type(before).__name__)
    return f"is {shown}: give {kind}{example}"
