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
    """The allowed values of a field: a type, and a range or a set of choices."""

    kind: type
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    above: bool = False  # excludes `low`
    of: type | None = None  # type of each value of a tuple
    pattern: bool = False  # text that is a regular expression
    may_change: bool = False  # in a resumed run: the run's numbers stay the same, to rounding

    def problem(self, value: Any) -> str | None:
        """Describes the problem with a value; None if there is none."""
        wanted = (int, float) if self.kind is float else self.kind
        # A bool is an int for Python, but not a number in a config.
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.kind is not bool):
            return f"is {value!r}: give {KINDS[self.kind]}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"is {value}: give a finite number"
        if self.of and isinstance(value, tuple):
            problems = [problem for one in value if (problem := Field(self.of).problem(one))]
            return f"has one that {problems[0]}" if problems else None
        if self.pattern:
            try:
                re.compile(str(value))
            except re.error as error:
                return f"is {value!r}, which is no regular expression: {error}"
        if self.choices and value not in self.choices:
            return f"is {value!r}: give one of {', '.join(map(repr, self.choices))}"
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return f"is {value}: give a value {'above' if self.above else 'of at least'} {self.low}"
        if self.high is not None and value > self.high:
            return f"is {value}: give a value of at most {self.high}"
        return None


# Annotations for arguments that are config fields. The checks enforce them.
NotNegative = Annotated[float, Field(float, low=0)]
Positive = Annotated[float, Field(float, low=0, above=True)]
Share = Annotated[float, Field(float, low=0, high=1)]
AtLeastOne = Annotated[int, Field(int, low=1)]
Count = Annotated[int, Field(int, low=0)]
Pattern = Annotated[str, Field(str, pattern=True)]

T = TypeVar("T")
MAY_CHANGE = "in a resumed run"
MayChange = Annotated[T, MAY_CHANGE]  # MayChange[Count] is a Count that a resumed run may change


def check_arguments(section: str, name: str, function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Checks that a section gives a function's keyword-only arguments as declared, and no others."""
    hints, taken = _hints(function), keyword_only(function)
    for key, value in given.items():
        if key not in taken:
            near = nearest(f"{section}.{key}", [f"{section}.{other}" for other in taken])
            hint = f"; did you mean {near}?" if near else _whole(section, name)
            takes = ", ".join(taken) or "nothing"
            raise UserError(f"config.{section}.{key} is not an argument: {name} takes {takes}{hint}")
        if (field := field_of(hints.get(key))) and (problem := field.problem(value)):
            raise UserError(f"config.{section}.{key} {problem}")
    for key, parameter in taken.items():
        if parameter.default is parameter.empty and key not in given:
            raise UserError(f"config.{section}.{key} is missing: {name} needs it{_whole(section, name)}")
    if inspect.isfunction(function):
        _apply("check", function, given)


def _whole(section: str, name: str) -> str:
    """Says where a section with this function is changed as a whole."""
    shipped = shipped_with(f"{section}.name", name)
    return f"; change the whole section in a file, as the shipped config {shipped} does" if shipped else ""


def check_call(text: str, module: Place, what: str) -> None:
    """Checks the function and the arguments of "name" or "name(argument=value)". what: the field.

    Arguments are keyword-only in our functions, and any named ones in those of a user.
    Raises: UserError, naming the function.
    """
    name, given = split_call(text, what)
    function = resolve(name, module, what)
    if inspect.isclass(function):
        raise UserError(
            f"{what} {name!r} is a class: make an instance of it in its module, as score = {function.__name__}()"
        )
    known = parameters(function)
    for key, parameter in known.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(
                f"{what}: {name} takes {key} by its position, but it is called by names: take the / out of it"
            )
    own = is_ours(function, module)
    taken = {k: p for k, p in known.items() if p.kind is p.KEYWORD_ONLY or (not own and p.kind is not p.VAR_KEYWORD)}
    hints = _hints(function) if inspect.isfunction(function) else {}
    for key, value in given.items():
        if key not in taken:
            raise UserError(f"{what}: {name} has no argument {key!r}: it takes {', '.join(taken) or 'none'}")
        if (field := field_of(hints.get(key))) and (problem := field.problem(value)):
            raise UserError(f"{what}: argument {key} of {name} {problem}")
    for key, parameter in taken.items():
        if own and parameter.default is parameter.empty and key not in given:
            raise UserError(f"{what}: {name} needs an argument {key}: write {name}({key}=...)")
    if own:
        _apply("check", function, given)


def _apply(check: str, function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Runs a check that `checked_by` gave a function, with defaults in place of arguments that are not given."""
    if run := getattr(function, check, None):
        run(**{key: given.get(key, parameter.default) for key, parameter in keyword_only(function).items()})


def check_reach(text: str, module: Place, what: str) -> None:
    """Asks once what the function of "name(argument=value)" needs outside of this process. Arguments as `check_call`.

    Raises: UserError, if there is no answer.
    """
    name, given = split_call(text, what)
    function = resolve(name, module, what)
    if is_ours(function, module):
        _apply("reach", function, given)


def checked_by(check: Callable[..., None], *, reach: Callable[..., None] | None = None) -> Callable[[T], T]:
    """Returns a decorator for a function that a config names with arguments: check(**arguments) runs before a run.

    check raises UserError. It looks at what no annotation can say, such as whether a file is there. reach does so too:
    it asks a server, so it runs when a run starts, and not when a config is only read.
    """
    return marked(check=check, reach=reach)


def fields_of(section: str, function: Callable[..., Any]) -> dict[str, Field]:
    """Returns the fields of a section that holds a function's keyword arguments, from their annotations."""
    hints = _hints(function)
    found = {name: field_of(hints.get(name)) for name in keyword_only(function)}
    return {f"{section}.{name}": field for name, field in found.items() if field}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        # A record has the hints of its fields, because inherited fields use names of another module.
        plain = inspect.isclass(function) and not is_dataclass(function)
        return get_type_hints(function.__init__ if plain else function, include_extras=True)
    except NameError:  # an annotation uses a name that only type checkers import
        return {}


def field_of(hint: Any) -> Field | None:
    """Returns the values that an annotation allows; None if it allows no check."""
    if get_origin(hint) is Literal:
        return Field(str, choices=get_args(hint))
    if get_origin(hint) is tuple:
        return Field(tuple, of=get_args(hint)[0])
    if get_origin(hint) is Annotated:
        inner, *said = get_args(hint)
        field = next((x for x in said if isinstance(x, Field)), None) or field_of(inner)
        return replace(field, may_change=MAY_CHANGE in said) if field else None
    kind = get_origin(hint) or hint
    return Field(kind) if kind in (bool, int, float, str, tuple, dict) else None
