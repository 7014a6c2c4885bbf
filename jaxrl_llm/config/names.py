"""Resolves function names in a config, and lists the arguments of functions."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

from jaxrl_llm.config.user_modules import imported_file, own_file
from jaxrl_llm.errors import MissingHere, UserError, describe

T = TypeVar("T")
OWN: dict[str, Callable[..., Any]] = {}  # functions that no module has, by the names that a config has for them
OURS = "jaxrl_llm.tasks."
NEAR = 0.75  # similarity of two words of which one is a slip
BESIDE = 0.6  # in one section


@dataclass(frozen=True)
class Kind:
    """The functions and classes of one kind in the files of a package, such as the rewards among all of a task."""

    package: ModuleType
    includes: Callable[[Any], bool]  # tells by what a function takes, or a class has


Place: TypeAlias = ModuleType | Kind  # where the functions are that a field of a config may name


def resolve(name: str, place: Place, what: str = "name") -> Callable[..., Any]:
    """Returns the function `name`.

    It is in a module ("grpo"), in a submodule of it ("arithmetic.accuracy"), or in any module ("my.mod.f"). In files of
    a `Kind` of ours, it is of this kind.
    Raises: UserError, listing the known names, or both functions if the name is ambiguous.
    """
    if name in OWN:
        return OWN[name]
    path, _, attribute = name.rpartition(".")
    room, inner = package(place), None
    if not path and name in _functions(room, place):
        return getattr(room, name)
    if path:
        ours = f"{room.__name__}.{path}"
        inner = _imported(ours, what, name)
        # A user's file may have the same name as one of our modules. Then the name is ambiguous.
        file = own_file(path, attribute) if inner else None
        if file and _has(inner, attribute, place):
            raise UserError(
                f"{what} {name!r} could be ours or that of {file}: "
                f"write '{ours}.{attribute}' for ours, or rename your file"
            )
        if file or not inner:
            inner = _imported(path, what, name)
        if _has(inner, attribute, place):
            return getattr(inner, attribute)
    others = [f"{path}.{other}" for other in _functions(inner, place)] if inner else []
    if not inner or (not others and _is_inside(inner.__name__, room)):
        others = offered(place)
    close = closest(name, others)
    if close:
        hint = f"did you mean {close[0]}?"
    elif path and not inner:
        hint = f"if {path} is yours, start in the folder that has it; ours are {', '.join(others)}"
    elif others:
        hint = f"there is {', '.join(others)}, or a dotted name of your own"
    else:  # such as __main__, in another program than the one that had the function
        hint = "put it into a file beside the config and name it 'file.function'"
    missing = f": there is no module {path}" if path and not inner else ""
    raise UserError(f"{what} {name!r} does not exist{missing}; {hint}")


def name_of(function: Any, home: str, field: str) -> str:
    """Returns the name of a function object, which `resolve` knows also if no module has it; a name as it is.

    home: the module of functions that a config file defines. Raises: UserError, if a function has no name.
    """
    if not callable(function):
        return function
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or "<" in name:
        raise UserError(
            f"config.{field} has {function!r}, which has no name: define a function with def, not within another one, "
            "or put it into a file and name it 'file.f'"
        )
    module = sys.modules.get(function.__module__)
    full = f"{function.__module__ if module else home or '__main__'}.{name}".removeprefix(OURS)
    if getattr(module, name, None) is not function:
        OWN[full] = function
    return full


def own_files(values: Iterable[Any]) -> dict[str, Path]:
    """Returns the files of the user's functions that values of a checked config name, by these names."""
    found = {}
    for name in _names_in(values):
        function = _without_module(name)
        file = Path(function.__code__.co_filename) if function else imported_file(name.rpartition(".")[0])
        if file and file.is_file():
            found[name] = file
    return found


def notebook_functions(values: Iterable[Any]) -> dict[str, Callable[..., Any]]:
    """Returns the functions of the user's that values of a checked config name and that are in no file."""
    functions = {name: _without_module(name) for name in _names_in(values)}
    return {name: f for name, f in functions.items() if f and not Path(f.__code__.co_filename).is_file()}


def _names_in(values: Iterable[Any]) -> list[str]:
    texts = chain(*(value if isinstance(value, tuple) else (value,) for value in values))
    return [str(text).partition("(")[0] for text in texts]


def _without_module(name: str) -> Any:
    """Returns a function of the user's script, notebook or config file; None if it is in a module."""
    module, _, attribute = name.rpartition(".")
    return OWN.get(name) or (getattr(sys.modules.get("__main__"), attribute, None) if module == "__main__" else None)


def split_call(text: str, what: str = "name") -> tuple[str, dict[str, Any]]:
    """Splits "text.repetition(size=3)" into the name and the keyword arguments; a name alone has none.

    Raises: UserError, if it is neither.
    """
    if "(" not in text:
        return text, {}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError
        return ast.unparse(call.func), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise UserError(
            f"{what} {text!r} cannot be read: give a name, or a call with keywords and plain values, like "
            "'text.repetition(size=3)'"
        ) from None


def bind(text: str, module: Place, what: str = "name") -> Callable[..., Any]:
    """Returns the function of "name" or "name(argument=value)", with these arguments. Raises: UserError, as `resolve`.

    In a function of ours, keyword-only arguments are never columns of the data, so their defaults are bound too.
    """
    name, given = split_call(text, what)
    function = resolve(name, module, what)
    if is_ours(function, module):
        given = defaults(function) | given
    return partial(function, **given) if given else function


def is_ours(function: Callable[..., Any], module: Place) -> bool:
    """Returns whether a function is defined in a submodule of `module`."""
    return _is_inside(str(getattr(function, "__module__", "")), package(module))


def marked(**marks: Any) -> Callable[[T], T]:
    """Returns a decorator that sets attributes of a function or a class, which the checks of a config read."""

    def mark(function: T) -> T:
        for name, value in marks.items():
            setattr(function, name, value)
        return function

    return mark


def own_name(function: Callable[..., Any], module: ModuleType) -> str:
    """Returns the plain name of a function that `module` defines, or "" for any other function."""
    return function.__name__ if function.__module__ == module.__name__ else ""


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by their names; {}: a function in C that does not tell them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def required_inputs(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of a function's positional arguments. Its caller supplies them, not the config."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters(function).values() if p.kind in kinds)


def keyword_only(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns a function's keyword-only arguments. The config supplies them."""
    return {k: p for k, p in parameters(function).items() if p.kind is p.KEYWORD_ONLY}


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the defaults of a function's keyword-only arguments."""
    return {k: p.default for k, p in keyword_only(function).items() if p.default is not p.empty}


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Returns the known name that is most similar to a dotted `name`, in a list, or an empty list.

    Names of one section share a prefix. So the last parts decide whether a name is near, and the whole names which one.
    """
    section, _, last = name.rpartition(".")
    similar = {other: _similarity(other.rpartition(".")[2], last) for other in known}
    bounds = {other: BESIDE if section and other.rpartition(".")[0] == section else NEAR for other in similar}
    near = [other for other, value in similar.items() if value == 1.0]
    near = near or [other for other, value in similar.items() if value >= bounds[other]]
    return sorted(near, key=lambda other: -_similarity(other, name))[:1]


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def package(place: Place) -> ModuleType:
    """Returns the module or package of a place."""
    return place.package if isinstance(place, Kind) else place


def _is_inside(module: str, room: ModuleType) -> bool:
    return module.startswith(f"{room.__name__}.")


def _kind(module: ModuleType, place: Place) -> Callable[[Any], bool] | None:
    """Returns what tells the kind that is asked for in a file of ours; None: each function of the module will do."""
    return place.includes if isinstance(place, Kind) and _is_inside(module.__name__, place.package) else None


def _has(module: ModuleType | None, name: str, place: Place) -> bool:
    is_asked_for = (module and _kind(module, place)) or callable
    return is_asked_for(getattr(module, name, None))


def _imported(module: str, what: str, name: str) -> ModuleType | None:
    """Imports a module. Returns None if it does not exist."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and end the program
        # None only if this module is missing, not if one of its imports is.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise MissingHere(f"{what} {name!r}: importing {module} failed: {describe(error)}") from error


def offered(place: Place) -> list[str]:
    """Lists the functions of a module or of a package that has `__all__`, or those of a package's "module.function"."""
    module = package(place)
    if not hasattr(module, "__path__") or getattr(module, "__all__", ()):
        return _functions(module, place)
    names = sorted(file.stem for file in Path(module.__path__[0]).glob("[!_]*.py"))
    inner = {name: importlib.import_module(f"{module.__name__}.{name}") for name in names}
    return [f"{name}.{function}" for name in names for function in _functions(inner[name], place)]


def _functions(module: ModuleType, place: Place) -> list[str]:
    """Lists what a config may name in a module: `__all__`, or all public functions; in a file of ours, of the kind."""
    kind = _kind(module, place)
    members = inspect.getmembers(module, kind or inspect.isfunction)
    mine = [name for name, f in members if not name.startswith("_") and f.__module__ == module.__name__]
    listed = getattr(module, "__all__", mine)
    return [name for name in listed if name in mine] if kind else listed
