"""Sections of a config as frozen records, which say what a config may hold and read it with types.

A record is a frozen dataclass with a field for each field of its section. A field may also be a section:
`Annotated[Call, module]` names a function of a module, `Annotated[KeywordArguments, function]` holds the keyword
arguments of a function, another record has fields of its own, `dict[str, record]` has sections of any names, and
`X | None = None` is a section that may be absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ml_collections import FrozenConfigDict

from jaxrl_llm.config.names import Place, defaults, offered, resolve
from jaxrl_llm.config.schema import Field, check_arguments, field_of, fields_of
from jaxrl_llm.config.suggestions import nearest
from jaxrl_llm.errors import UserError

T = TypeVar("T")


class KeywordArguments(FrozenConfigDict):
    """The keyword arguments of a function, as its section of a config gives them; also as attributes."""

    if TYPE_CHECKING:  # their types are those of the function's arguments

        def __getitem__(self, name: str) -> Any: ...

        def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Call:
    """A function that a section of a config names, with the keyword arguments that the section gives it."""

    name: str  # as the config has it
    function: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *inputs: Any, **columns: Any) -> Any:
        return self.function(*inputs, **columns, **self.arguments)


class SectionKind(NamedTuple):
    """What the annotation of a record's field says of a section."""

    kind: type  # Call, KeywordArguments or a record
    of: Any = None  # the module of a Call, the function of KeywordArguments
    optional: bool = False
    several: bool = False  # a dict of such sections


@cache
def _sections(record: type) -> dict[str, SectionKind]:
    """Returns the fields of a record that are sections."""
    hints = get_type_hints(record, include_extras=True)
    kinds = {each.name: _section_of(hints[each.name]) for each in fields(record)}
    return {name: kind for name, kind in kinds.items() if kind}


def _section_of(hint: Any) -> SectionKind | None:
    if NoneType in get_args(hint):
        inner = _section_of(next(kind for kind in get_args(hint) if kind is not NoneType))
        return inner._replace(optional=True) if inner else None
    if get_origin(hint) is Annotated and get_args(hint)[0] in (Call, KeywordArguments):
        return SectionKind(*get_args(hint))
    if get_origin(hint) is dict and is_dataclass(get_args(hint)[1]):
        return SectionKind(get_args(hint)[1], several=True)
    return SectionKind(hint) if isinstance(hint, type) and is_dataclass(hint) else None


class Table(NamedTuple):
    """What a config may hold."""

    fields: dict[str, Field]
    defaults: dict[str, Any]  # of fields that it may leave out
    named: dict[str, Place]  # sections that name a function
    optional: set[str]  # sections that it has, and may leave out


def table(record: type, values: Mapping[str, Any], section: str = "") -> Table:
    """Returns the table that `record` describes. A section that may be absent counts where `values` have it."""
    prefix, inner = f"{section}." if section else "", _sections(record)
    hints, known = get_type_hints(record, include_extras=True), Table({}, {}, {}, set())
    for each in fields(record):
        path, part = prefix + each.name, values.get(each.name, {})
        if each.name not in inner:
            kind = field_of(hints[each.name])
            known.fields.update({path: kind} if kind else {})
            known.defaults.update({path: each.default} if each.default is not MISSING else {})
            continue
        here, parts = inner[each.name], {path: part}
        if here.several:
            parts = {f"{path}.{name}": x for name, x in part.items()} if isinstance(part, dict) else {}
        elif here.optional and values.get(each.name) is None:
            continue
        known.optional.update([path] if here.optional else [])
        for name, below in parts.items():
            # A value of another type than a section is refused where the fields are checked.
            lower = _table_of(here, below if isinstance(below, dict) else {}, name)
            known.fields.update(lower.fields)
            known.defaults.update(lower.defaults)
            known.named.update(lower.named)
            known.optional.update(lower.optional)
    return known


def _table_of(section: SectionKind, values: Mapping[str, Any], path: str) -> Table:
    if section.kind is Call:
        return Table({}, {}, {path: section.of}, set())
    if section.kind is KeywordArguments:
        unset = {f"{path}.{name}": x for name, x in defaults(section.of).items()}
        return Table(fields_of(path, section.of), unset, {}, set())
    return table(section.kind, values, path)


def present(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config without the optional sections that are None. No sections of any names are {}."""
    kept, inner = dict[str, Any](), _sections(record)
    for name, value in values.items():
        here = inner.get(name)
        if here and here.optional and value is None:
            continue
        if here and here.several and value is None:
            value = {}
        is_record = here is not None and is_dataclass(here.kind) and here.kind is not Call and not here.several
        kept[name] = present(here.kind, value) if here and is_record and isinstance(value, dict) else value
    return kept


def read(record: type[T], values: Mapping[str, Any]) -> T:
    """Returns the checked values of a config, or of a section of one, as a frozen record."""
    inner, names = _sections(record), {each.name for each in fields(record)}  # pyright: ignore[reportArgumentType]
    return record(**{name: _read_field(inner.get(name), x) for name, x in values.items() if name in names})


def _read_field(section: SectionKind | None, values: Any) -> Any:
    """Returns the value of a field as it is, or the record of a section."""
    if section is None:
        return values
    if section.several:
        return {name: _read_field(section._replace(several=False), x) for name, x in values.items()}
    if section.kind is Call:
        return read_call(values, section.of)
    if section.kind is KeywordArguments:
        return KeywordArguments(defaults(section.of) | values)
    return read(section.kind, values)


def read_call(values: Mapping[str, Any], place: Place, what: str = "name") -> Call:
    """Returns the function of `place` that a section names, with its arguments. what: the field, for an error."""
    rest = {name: x for name, x in values.items() if name != "name"}
    return Call(values["name"], resolve(values["name"], place, what), rest)


def check_fields(known: Table, values: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
    """Checks that a config has exactly the fields of a table, with allowed values.

    values: the config as a dict; flat: the config as `flatten` returns it. Raises: UserError, naming the field.
    """
    for section, place in known.named.items():
        if f"{section}.name" not in flat:
            names = f"{', '.join(offered(place))}, or a dotted name of your own"
            raise UserError(f"config.{section}.name is missing: give one of {names}")
        name = flat[f"{section}.name"]
        if problem := Field(str).problem(name):
            raise UserError(f"config.{section}.name {problem}")
        given = {key: x for key, x in values[section].items() if key != "name"}
        check_arguments(section, name, resolve(name, place, f"config.{section}.name"), given)
    in_calls = [name for name in flat if name.split(".")[0] in known.named]
    rest = {name: value for name, value in flat.items() if name not in in_calls}
    for name in rest:
        if inside := [field for field in known.fields if field.startswith(f"{name}.")]:
            raise UserError(f"config.{name} is {rest[name]!r:.80}: give a section with {', '.join(inside)}")
        if name not in known.fields:
            near = nearest(name, [*known.fields, *in_calls])
            raise UserError(f"config.{name} is not a field" + (f"; did you mean {near}?" if near else ""))
    for name, allowed in known.fields.items():
        if name not in rest and name not in known.defaults:
            raise UserError(f"config.{name} is missing: add it to the config file (configs/ has complete ones)")
        if name in rest and (problem := allowed.problem(rest[name])):
            section = name.rpartition(".")[0]
            without = f"; without {section}: --config.{section}=none" if section in known.optional else ""
            raise UserError(f"config.{name} {problem}{without}")


def names_that_may_change(known: Table, flat: Mapping[str, Any]) -> set[str]:
    """Returns the fields of a checked config that a resumed run may change."""
    allowed = dict(known.fields)
    for section, place in known.named.items():
        allowed |= fields_of(section, resolve(flat[f"{section}.name"], place))
    return {name for name, field in allowed.items() if field.may_change}
