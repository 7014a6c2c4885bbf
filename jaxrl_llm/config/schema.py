"""Types, ranges and choices of config fields, read from the annotations of functions."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxrl_llm.config.load import shipped_with
from jaxrl_llm.config.names import Place, is_ours, keyword_only, marked, parameters, resolve, split_call
from jaxrl_llm.config.sections import KINDS
from jaxrl_llm.config.suggestions import nearest
from jaxrl_llm.errors import UserError


@dataclass(frozen=True)
class Field:
    """The allowed values of a config field: a type, and a range or a set of choices."""

    kind: type
    low: float | None = None  # smallest value; None = no limit
    high: float | None = None  # largest value; None = no limit
    choices: tuple[str, ...] = ()  # allowed texts; () = any
    above: bool = False  # whether `low` itself is excluded
    of: type | None = None  # type of each value of a tuple; None = any
    pattern: bool = False  # whether the text must be a regular expression
    may_change: bool = False  # whether a resumed run may change the field, because results stay equal to rounding

    def problem(self, value: Any) -> str | None:
        """Describes a wrong value, as the end of an error that begins with the field's name; None if it is allowed."""
        types = (int, float) if self.kind is float else self.kind
        # A bool is an int for Python, but not a number in a config.
        if not isinstance(value, types) or (isinstance(value, bool) and self.kind is not bool):
            return f"is {value!r}, but must be {KINDS[self.kind]}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"is {value}, but must be a finite number"
        if self.of and isinstance(value, tuple):
            problems = [problem for item in value if (problem := Field(self.of).problem(item))]
            return f"has an entry that {problems[0]}" if problems else None
        if self.pattern:
            try:
                re.compile(str(value))
            except re.error as error:
                return f"is {value!r}, but must be a regular expression: {error}"
        if self.choices and value not in self.choices:
            return f"is {value!r}, but must be one of {', '.join(map(repr, self.choices))}"
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return f"is {value}, but must be {'above' if self.above else 'at least'} {self.low}"
        if self.high is not None and value > self.high:
            return f"is {value}, but must be at most {self.high}"
        return None


# Annotations of arguments and record fields that are config fields. The checks of a config enforce them.
NotNegative = Annotated[float, Field(float, low=0)]
Positive = Annotated[float, Field(float, low=0, above=True)]
Share = Annotated[float, Field(float, low=0, high=1)]
AtLeastOne = Annotated[int, Field(int, low=1)]
Count = Annotated[int, Field(int, low=0)]
Pattern = Annotated[str, Field(str, pattern=True)]

T = TypeVar("T")
MAY_CHANGE = "in a resumed run"  # annotation of fields that a resumed run may change
MayChange = Annotated[T, MAY_CHANGE]  # MayChange[Count] is a Count that a resumed run may change


def check_arguments(section: str, name: str, function: Callable[..., Any], values: dict[str, Any]) -> None:
    """Checks that a section holds all keyword-only arguments of a function, with allowed values, and nothing else.

    section: path of the section; name: name of the function in the config; values: fields of the section without
    `name`. Raises: UserError, naming the field.
    """
    hints, arguments = _hints(function), keyword_only(function)
    for key, value in values.items():
        if key not in arguments:
            near = nearest(f"{section}.{key}", [f"{section}.{argument}" for argument in arguments])
            hint = f"; did you mean {near}?" if near else _shipped_hint(section, name)
            listed = ", ".join(arguments) or "none"
            raise UserError(f"config.{section}.{key} is no argument of {name}; its arguments: {listed}{hint}")
        if (field := field_of(hints.get(key))) and (problem := field.problem(value)):
            raise UserError(f"config.{section}.{key} {problem}")
    for key, parameter in arguments.items():
        if parameter.default is parameter.empty and key not in values:
            hint = _shipped_hint(section, name)
            raise UserError(f"config.{section}.{key} is missing, but {name} needs this argument{hint}")
    if inspect.isfunction(function):
        _apply("check", function, values)


def _shipped_hint(section: str, name: str) -> str:
    """Returns a hint to the shipped config that has a section with this function; "" if no shipped config has one."""
    shipped = shipped_with(f"{section}.name", name)
    return f"; replace the whole section in a config file, as the shipped config {shipped} does" if shipped else ""


def check_call(text: str, module: Place, what: str) -> None:
    """Checks the function and the arguments of "name" or "name(argument=value)".

    A config may set keyword-only arguments of our functions, and all named arguments of a user's function.
    module: place of the function; what: field with the text, for errors. Raises: UserError, naming the function.
    """
    name, values = split_call(text, what)
    function = resolve(name, module, what)
    if inspect.isclass(function):
        raise UserError(
            f"{what} {name!r} is a class, but must be a function or an instance: write score = {function.__name__}() "
            "in its module, and name score"
        )
    all_parameters = parameters(function)
    for key, parameter in all_parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(
                f"{what}: {name} takes {key} by position only, but arguments are passed by name: remove the / from its "
                "signature"
            )
    is_our_function = is_ours(function, module)
    arguments = {
        key: parameter
        for key, parameter in all_parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
        or (not is_our_function and parameter.kind is not parameter.VAR_KEYWORD)
    }
    hints = _hints(function) if inspect.isfunction(function) else {}
    for key, value in values.items():
        if key not in arguments:
            listed = ", ".join(arguments) or "none"
            raise UserError(f"{what}: {name} has no argument {key!r}; its arguments: {listed}")
        if (field := field_of(hints.get(key))) and (problem := field.problem(value)):
            raise UserError(f"{what}: argument {key} of {name} {problem}")
    for key, parameter in arguments.items():
        if is_our_function and parameter.default is parameter.empty and key not in values:
            raise UserError(f"{what}: {name} needs the argument {key}: write {name}({key}=...)")
    if is_our_function:
        _apply("check", function, values)


def _apply(check: str, function: Callable[..., Any], values: dict[str, Any]) -> None:
    """Runs the check ("check" or "reach") that `checked_by` attached to a function, if there is one.

    values: arguments that the config sets; the others have their defaults.
    """
    if run := getattr(function, check, None):
        run(**{key: values.get(key, parameter.default) for key, parameter in keyword_only(function).items()})


def check_reach(text: str, module: Place, what: str) -> None:
    """Contacts the server that the function of "name(argument=value)" needs, if it needs one.

    module: place of the function; what: field with the text, for errors. Raises: UserError, if there is no answer.
    """
    name, values = split_call(text, what)
    function = resolve(name, module, what)
    if is_ours(function, module):
        _apply("reach", function, values)


def checked_by(check: Callable[..., None], *, reach: Callable[..., None] | None = None) -> Callable[[T], T]:
    """Returns a decorator that attaches checks to a function which a config names with arguments.

    check: check(**arguments) runs when a config is read, and raises UserError for what no annotation can express, such
    as a missing file; reach: reach(**arguments) runs when a run starts, and raises UserError if a server is down.
    """
    return marked(check=check, reach=reach)


def fields_of(section: str, function: Callable[..., Any]) -> dict[str, Field]:
    """Returns {path: Field} of a section that holds a function's keyword arguments, from their annotations."""
    hints = _hints(function)
    arguments = {name: field_of(hints.get(name)) for name in keyword_only(function)}
    return {f"{section}.{name}": field for name, field in arguments.items() if field}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the annotations of a function, of a class's __init__ or of a record; {} if they cannot be resolved."""
    try:
        # A record has the hints of its fields, because inherited fields use names of another module.
        is_plain_class = inspect.isclass(function) and not is_dataclass(function)
        return get_type_hints(function.__init__ if is_plain_class else function, include_extras=True)
    except NameError:  # an annotation uses a name that only type checkers import
        return {}


def field_of(hint: Any) -> Field | None:
    """Returns the values that an annotation allows; None if the annotation cannot be checked."""
    if get_origin(hint) is Literal:
        return Field(str, choices=get_args(hint))
    if get_origin(hint) is tuple:
        return Field(tuple, of=get_args(hint)[0])
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        field = next((x for x in metadata if isinstance(x, Field)), None) or field_of(inner)
        return replace(field, may_change=MAY_CHANGE in metadata) if field else None
    kind = get_origin(hint) or hint
    return Field(kind) if kind in (bool, int, float, str, tuple, dict) else None
