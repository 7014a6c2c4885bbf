"""Configs that know the path of each field, so that a value of a wrong type is refused where it is set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import FunctionType
from typing import Any, ClassVar

from ml_collections import ConfigDict, FieldReference

from jaxrl_llm.config import memory
from jaxrl_llm.errors import UserError

# {type of a field: its name in error messages}
KINDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a tuple",
    dict: "a section",
}
# {path of a field that was True or False in earlier versions: what its value must be now}
FORMER_SWITCHES = {
    "rollout.partial": "the number of groups that are open beyond prompts_per_step: 0 in place of False, "
    "prompts_per_step in place of True"
}
# Fields of text that also take a function object (`load.with_names`).
EVAL_FUNCTION = re.compile(r"eval\.(extra_sets\.[^.]+\.)?function")


class Section(ConfigDict):
    """A config or a section of one, which checks the type of each value that is set.

    A single value becomes a tuple of one where the field holds a tuple. A section that is set to None is absent, and
    gets its old fields back when one of them is set by its path.
    Raises: UserError, with the path of the field, for a value of another type.
    """

    _path = ""  # path in the whole config, such as "critic.optim"; "" for the whole config
    _removed: ClassVar[Mapping[str, Any]] = {}  # sections that None has replaced
    # Whether `section_named` made the section. It may then get fields of any names, which are checked with the whole
    # config.
    is_open = False

    def __setitem__(self, key: str, value: Any) -> None:
        path = f"{self._path}.{key}" if self._path else key
        if "." in key:
            raise UserError(f"config.{self._path or 'FIELD'}: the name {key!r} of a section must have no dot")
        old_value = self.get(key)
        if type(value) is bool and type(old_value) is int:  # ml_collections would store the bool, as it is an int
            raise UserError(f"config.{path} = {value}: the value must be {required_type(value, old_value, path)}")
        named = (str, Mapping, ConfigDict, FieldReference, FunctionType, type(None))
        if key == "source" and (not isinstance(value, named) or (isinstance(old_value, str) and is_mapping(value))):
            value = memory.keep(value, path)
        if is_mapping(value):
            value = sections(value)
            value._set_path(path)
        elif isinstance(old_value, tuple) and not isinstance(value, (tuple, list, FieldReference, type(None))):
            value = (value,)
        try:
            if removes := value is None and isinstance(old_value, ConfigDict):
                object.__setattr__(self, "_removed", {**self._removed, key: old_value})
            if removes or (EVAL_FUNCTION.fullmatch(path) and (callable(value) or isinstance(value, str))):
                with self.ignore_type():
                    super().__setitem__(key, value)
            else:
                super().__setitem__(key, value)
        except TypeError:
            raise UserError(
                f"config.{path} = {display(value)}: the value must be {required_type(value, old_value, path)}"
            ) from None

    def _set_path(self, path: str) -> None:
        """Sets the path of this section, and of all sections in it."""
        object.__setattr__(self, "_path", path)
        for key, value in self.items(preserve_field_references=True):
            if isinstance(value, Section):
                value._set_path(f"{path}.{key}")

    def update_from_flattened_dict(self, flattened_dict: Mapping[str, Any], strip_prefix: str = "") -> None:
        """Sets fields by their paths, such as "critic.optim.learning_rate", and makes missing sections."""
        for path, value in flattened_dict.items():
            if path.startswith(strip_prefix):
                *parts, last = path.removeprefix(strip_prefix).split(".")
                section: Any = self
                for part in parts:
                    section = section.section_named(part)
                section[last] = value

    def update(self, *other: Any, **fields: Any) -> None:
        """Sets fields, and fields of inner sections. Each value is checked as if its field were set alone."""
        for values in (*other, fields):
            # Other values for a section are set one by one, because ml_collections would treat them as sections.
            no_sections = [
                name
                for name, value in values.items()
                if isinstance(self.get(name), ConfigDict) and not isinstance(value, (Mapping, ConfigDict))
            ]
            for name in no_sections:
                self[name] = values[name]
            remaining = {name: value for name, value in values.items() if name not in no_sections}
            super().update(remaining if no_sections else values)

    def section_named(self, name: str) -> Any:
        """Returns the value of a field. If the field is missing or None, it becomes a section first."""
        if self.get(name) is None:
            if name not in self._removed:
                self[name] = Section()
                object.__setattr__(self[name], "is_open", True)
            else:
                self[name] = self._removed[name]
        return self[name]


def is_mapping(value: Any) -> bool:
    """Returns whether a value can be a section of a config."""
    return isinstance(value, (Mapping, ConfigDict))


def sections(config: Any) -> Section:
    """Returns a ConfigDict or a dict, and all sections in it, as an unlocked `Section`; a `Section` stays as it is."""
    if isinstance(config, Section):
        return config
    section = Section(config)
    section.unlock()
    return section


def display(value: Any) -> str:
    """Returns at most 80 characters that show a refused value in an error."""
    if isinstance(value, ConfigDict):
        return "a section"
    return value.__qualname__ if isinstance(value, FunctionType) else f"{value!r:.80}"


def required_type(value: Any, old_value: Any, path: str) -> str:
    """Returns the type that a field must keep, with the fix, as the end of an error after "must be".

    value: refused value of another type. old_value: value that the field has. path: path of the field.
    """
    if old_value is None:
        return f"a section, which is absent: set its fields, as {path}.FIELD"
    if isinstance(old_value, ConfigDict) and not old_value:
        return f"a section of sections: add sections, as {path}.NAME = ConfigDict(dict(...))"
    if isinstance(old_value, ConfigDict):
        fields = ", ".join(f"{path}.{key}" for key in old_value)
        return f"a section: set one of its fields {fields}"
    if isinstance(value, FunctionType) and "<" in value.__qualname__:
        return "the name of a function: define the function by def at the top of a module, and set its name"
    if isinstance(value, FunctionType) and isinstance(old_value, str):
        return f"the name of a function, not the function: use '{value.__module__}.{value.__qualname__}'"
    if path in FORMER_SWITCHES:
        return FORMER_SWITCHES[path]
    example = f", such as {old_value!r}" if not isinstance(old_value, bool) and old_value not in ("", ()) else ""
    return KINDS.get(type(old_value), type(old_value).__name__) + example
