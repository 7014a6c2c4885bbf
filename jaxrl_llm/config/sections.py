"""Configs that know the path of each field, so that a value of a wrong type is refused in one line where it is set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import FunctionType
from typing import Any, ClassVar

from ml_collections import ConfigDict, FieldReference

from jaxrl_llm.config import memory
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
# Fields of text that also take a function object (`load.with_names`).
JUDGE = re.compile(r"eval\.(extra_sets\.[^.]+\.)?function")


class Section(ConfigDict):
    """A config or a section of one. Where a field holds a tuple, one value becomes a tuple of one.

    None in the place of a section is a section that is not there; it is as it was before once a field of it is set by
    its path. Raises: UserError, with the path of the field, for a value of another type.
    """

    _path = ""  # in the whole config, such as "critic.optim"; "": it is the whole
    _left_out: ClassVar[Mapping[str, Any]] = {}  # sections that None has replaced
    # It was made by `section_named`: it may get fields of any names, which are checked with the whole config.
    is_open = False

    def __setitem__(self, key: str, value: Any) -> None:
        path = f"{self._path}.{key}" if self._path else key
        if "." in key:
            raise UserError(f"config.{self._path or 'FIELD'} gets a section {key!r}: a name must have no dot")
        before = self.get(key)
        named = (str, Mapping, ConfigDict, FieldReference, FunctionType, type(None))
        if key == "source" and (not isinstance(value, named) or (isinstance(before, str) and is_mapping(value))):
            value = memory.keep(value, path)
        if is_mapping(value):
            value = sections(value)
            value._move(path)
        elif isinstance(before, tuple) and not isinstance(value, (tuple, list, FieldReference, type(None))):
            value = (value,)
        try:
            if off := value is None and isinstance(before, ConfigDict):
                object.__setattr__(self, "_left_out", {**self._left_out, key: before})
            if off or (JUDGE.fullmatch(path) and (callable(value) or isinstance(value, str))):
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

    def update_from_flattened_dict(self, flattened_dict: Mapping[str, Any], strip_prefix: str = "") -> None:
        """Sets fields by their paths, such as "critic.optim.learning_rate". A section that is not there is made."""
        for path, value in flattened_dict.items():
            if path.startswith(strip_prefix):
                *parts, last = path.removeprefix(strip_prefix).split(".")
                section: Any = self
                for part in parts:
                    section = section.section_named(part)
                section[last] = value

    def update(self, *other: Any, **fields: Any) -> None:
        """Sets fields, and those of sections that both have. Each is checked as where a field is set alone."""
        for given in (*other, fields):
            # ml_collections would take any value of a section for a section.
            plain = [
                name
                for name, value in given.items()
                if isinstance(self.get(name), ConfigDict) and not isinstance(value, (Mapping, ConfigDict))
            ]
            for name in plain:
                self[name] = given[name]
            super().update({name: value for name, value in given.items() if name not in plain} if plain else given)

    def section_named(self, name: str) -> Any:
        """Returns what is under a name, and makes a section where nothing or None is."""
        if self.get(name) is None:
            if name not in self._left_out:
                self[name] = Section()
                object.__setattr__(self[name], "is_open", True)
            else:
                self[name] = self._left_out[name]
        return self[name]


def is_mapping(value: Any) -> bool:
    """Returns whether a value can be a section of a config."""
    return isinstance(value, (Mapping, ConfigDict))


def sections(config: Any) -> Section:
    """Returns a ConfigDict or a dict, with all sections in it, as an unlocked `Section`; a `Section` as it is."""
    if isinstance(config, Section):
        return config
    section = Section(config)
    section.unlock()
    return section


def problem(value: Any, before: Any, path: str) -> str:
    """Describes a value of another type than that before it, for an error message with the field's name."""
    if before is None:
        return f"is a section that is not there: set its fields, as {path}.FIELD"
    if isinstance(before, ConfigDict) and not before:
        return f"is a section: give it sections, as {path}.NAME = ConfigDict(dict(...))"
    if isinstance(before, ConfigDict):
        return f"is a section: set one of {', '.join(f'{path}.{key}' for key in before)}"
    if isinstance(value, FunctionType) and "<" in value.__qualname__:
        return "takes no function without a name: define it with def, not within another one, and give its name"
    if isinstance(value, FunctionType) and isinstance(before, str):
        return f"takes no function: give its name, '{value.__module__}.{value.__qualname__}'"
    shown = "a section" if isinstance(value, ConfigDict) else f"{value!r:.80}"
    example = f", such as {before!r}" if not isinstance(before, bool) and before not in ("", ()) else ""
    kind = KINDS.get(type(before), type(before).__name__)
    return f"is {shown}: give {kind}{example}"
