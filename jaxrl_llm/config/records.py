"""Reads sections of a config into frozen records, which declare the fields of a section and their types.

A record is a frozen dataclass with a field for each field of its section. A field may also be a section:
`Annotated[Call, module]` names a function of a module, `Annotated[KeywordArguments, function]` holds the keyword
arguments of a function, another record has its own fields, `dict[str, record]` has sections of any names, and
`X | None = None` is a section that may be absent. A field with init=False is no field of this
config: the config of another program has the setting, and a run of this config uses the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass
from functools import cache, reduce
from operator import getitem
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ml_collections import FrozenConfigDict

from jaxrl_llm.config.names import Place, defaults, offered, resolve
from jaxrl_llm.config.schema import Field, check_arguments, field_of, fields_of
from jaxrl_llm.config.suggestions import nearest
from jaxrl_llm.errors import UserError

T = TypeVar("T")


class KeywordArguments(FrozenConfigDict):
    """Keyword arguments of a function, from a section of a config; they can also be read as attributes."""

    if TYPE_CHECKING:  # an argument may have any type

        def __getitem__(self, name: str) -> Any: ...

        def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Call:
    """A function that a section of a config names, with the keyword arguments in that section."""

    name: str  # name in the config
    function: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *inputs: Any, **columns: Any) -> Any:
        return self.function(*inputs, **columns, **self.arguments)


class SectionKind(NamedTuple):
    """Kind of a section, from the annotation of a record's field."""

    kind: type  # Call, KeywordArguments or a record
    target: Any = None  # module of a Call, function of KeywordArguments
    optional: bool = False  # whether the section may be absent
    several: bool = False  # whether the field is a dict of such sections


def _config_fields(record_class: type) -> list[dataclasses.Field[Any]]:
    """Returns the fields of a record that a config has."""
    return [record_field for record_field in dataclasses.fields(record_class) if record_field.init]


@cache
def _sections(record_class: type) -> dict[str, SectionKind]:
    """Returns {field of a record that is a section: its kind}."""
    hints = get_type_hints(record_class, include_extras=True)
    kinds = {record_field.name: _section_of(hints[record_field.name]) for record_field in _config_fields(record_class)}
    return {name: kind for name, kind in kinds.items() if kind}


def _section_of(hint: Any) -> SectionKind | None:
    """Returns the kind of section that an annotation declares; None for a plain field."""
    if NoneType in get_args(hint):
        inner = _section_of(next(kind for kind in get_args(hint) if kind is not NoneType))
        return inner._replace(optional=True) if inner else None
    if get_origin(hint) is Annotated and get_args(hint)[0] in (Call, KeywordArguments):
        return SectionKind(*get_args(hint))
    if get_origin(hint) is dict and is_dataclass(get_args(hint)[1]):
        return SectionKind(get_args(hint)[1], several=True)
    return SectionKind(hint) if isinstance(hint, type) and is_dataclass(hint) else None


class Table(NamedTuple):
    """The fields that a config may hold, by their paths."""

    fields: dict[str, Field]  # allowed values of each field
    defaults: dict[str, Any]  # values of fields that the config may omit
    call_places: dict[str, Place]  # {section that names a function: where its functions are}
    optional_sections: set[str]  # sections of this config that another config may omit


def table(record_class: type, values: Mapping[str, Any], section: str = "") -> Table:
    """Returns the table of the fields that a record declares. An optional section counts only if the config has it.

    record_class: class of the record; values: values of the config; section: path of the record's section, "" for the
    whole config.
    """
    prefix, inner_sections = f"{section}." if section else "", _sections(record_class)
    hints, whole_table = get_type_hints(record_class, include_extras=True), Table({}, {}, {}, set())
    for record_field in _config_fields(record_class):
        path, value = prefix + record_field.name, values.get(record_field.name, {})
        if record_field.name not in inner_sections:
            allowed = field_of(hints[record_field.name])
            whole_table.fields.update({path: allowed} if allowed else {})
            whole_table.defaults.update({path: record_field.default} if record_field.default is not MISSING else {})
            continue
        kind, parts = inner_sections[record_field.name], {path: value}
        if kind.several:
            parts = {f"{path}.{name}": x for name, x in value.items()} if isinstance(value, dict) else {}
        elif kind.optional and values.get(record_field.name) is None:
            continue
        whole_table.optional_sections.update([path] if kind.optional else [])
        for part_path, part in parts.items():
            # A value that is no section counts as an empty one here; `check_fields` refuses it.
            part_table = _section_table(kind, part if isinstance(part, dict) else {}, part_path)
            whole_table.fields.update(part_table.fields)
            whole_table.defaults.update(part_table.defaults)
            whole_table.call_places.update(part_table.call_places)
            whole_table.optional_sections.update(part_table.optional_sections)
    return whole_table


def _section_table(section: SectionKind, values: Mapping[str, Any], path: str) -> Table:
    """Returns the table of the fields of one section at `path`."""
    if section.kind is Call:
        return Table({}, {}, {path: section.target}, set())
    if section.kind is KeywordArguments:
        default_values = {f"{path}.{name}": x for name, x in defaults(section.target).items()}
        return Table(fields_of(path, section.target), default_values, {}, set())
    return table(section.kind, values, path)


def present(record_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config without optional sections that are None; a section of any names is {} instead."""
    present_values, inner_sections = dict[str, Any](), _sections(record_class)
    for name, value in values.items():
        section = inner_sections.get(name)
        if section and section.optional and value is None:
            continue
        if section and section.several and value is None:
            value = {}
        is_record = section is not None and section.kind is not Call and is_dataclass(section.kind)
        if section and is_record and not section.several and isinstance(value, dict):
            value = present(section.kind, value)
        present_values[name] = value
    return present_values


def read(record_class: type[T], values: Mapping[str, Any]) -> T:
    """Returns the checked values of a config, or of a section of one, as a frozen record."""
    inner_sections = _sections(record_class)
    names = {record_field.name for record_field in _config_fields(record_class)}
    known_values = {name: x for name, x in values.items() if name in names}
    return record_class(**{name: _read_field(inner_sections.get(name), x) for name, x in known_values.items()})


def _read_field(section: SectionKind | None, values: Any) -> Any:
    """Returns the value of a field as it is, or the record of a section."""
    if section is None:
        return values
    if section.several:
        return {name: _read_field(section._replace(several=False), x) for name, x in values.items()}
    if section.kind is Call:
        return read_call(values, section.target)
    if section.kind is KeywordArguments:
        return KeywordArguments(defaults(section.target) | values)
    return read(section.kind, values)


def read_call(values: Mapping[str, Any], place: Place, field_name: str = "name") -> Call:
    """Returns the function of `place` that a section names, with its arguments. field_name: field with the name."""
    arguments = {name: x for name, x in values.items() if name != "name"}
    return Call(values["name"], resolve(values["name"], place, field_name), arguments)


def check_fields(field_table: Table, values: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
    """Checks that a config has exactly the fields of a table, with allowed values.

    values: the config as a dict; flat: the config as `flatten` returns it. Raises: UserError, naming the field.
    """
    for section, place in field_table.call_places.items():
        if f"{section}.name" not in flat:
            names = f"{', '.join(offered(place))}, or a dotted name of your own"
            raise UserError(f"config.{section}.name is missing: set it to one of {names}")
        name = flat[f"{section}.name"]
        if problem := Field(str).problem(name):
            raise UserError(f"config.{section}.name {problem}")
        arguments = {key: x for key, x in _section_values(values, section).items() if key != "name"}
        check_arguments(section, name, resolve(name, place, f"config.{section}.name"), arguments)
    # Arguments of functions are checked above, and all other fields below.
    call_sections = tuple(f"{section}." for section in field_table.call_places)
    argument_fields = [name for name in flat if f"{name}.".startswith(call_sections)]
    plain_fields = {name: value for name, value in flat.items() if name not in argument_fields}
    for name in plain_fields:
        if inner_fields := [field for field in field_table.fields if field.startswith(f"{name}.")]:
            shown = f"{plain_fields[name]!r:.80}"
            raise UserError(f"config.{name} = {shown} must be a section: set {', '.join(inner_fields)}")
        if name not in field_table.fields:
            suggestion = nearest(name, [*field_table.fields, *argument_fields])
            raise UserError(f"config.{name} is not a field" + (f"; did you mean {suggestion}?" if suggestion else ""))
    for name, allowed in field_table.fields.items():
        if name not in plain_fields and name not in field_table.defaults:
            raise UserError(f"config.{name} is missing: add it to the config file (configs/grpo.py has every field)")
        if name in plain_fields and (problem := allowed.problem(plain_fields[name])):
            section = name.rpartition(".")[0]
            is_optional = section in field_table.optional_sections
            remove = f"; --config.{section}=none removes the section" if is_optional else ""
            raise UserError(f"config.{name} {problem}{remove}")


def _section_values(values: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Returns the values of a section, such as "environments.game.env"."""
    return reduce(getitem, section.split("."), values)


def names_that_may_change(field_table: Table, flat: Mapping[str, Any]) -> set[str]:
    """Returns the fields of a checked config that a resumed run may change."""
    allowed = dict(field_table.fields)
    for section, place in field_table.call_places.items():
        allowed |= fields_of(section, resolve(flat[f"{section}.name"], place))
    return {name for name, field in allowed.items() if field.may_change}
