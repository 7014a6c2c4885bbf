"""Finds the functions that a config names, and lists the arguments of functions."""

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
# Functions of the user's script, notebook or config file that no module holds, by their names in a config.
USER_FUNCTIONS: dict[str, Callable[..., Any]] = {}
OURS = "jaxrl_llm.tasks."
SLIP_SIMILARITY = 0.75  # smallest similarity of two words of which one is a slip of the other
SECTION_SIMILARITY = 0.6  # the same for two fields of one section


@dataclass(frozen=True)
class Kind:
    """The functions or classes of one kind in the files of a package, such as all rewards of the tasks."""

    package: ModuleType
    includes: Callable[[Any], bool]  # whether a function or a class is of this kind


Place: TypeAlias = ModuleType | Kind  # place of the functions that a field of a config may name


def resolve(name: str, place: Place, field: str = "name") -> Callable[..., Any]:
    """Returns the function that a config names.

    name: function of the module `place` ("grpo"), of one of its submodules ("arithmetic.accuracy"), or of any other
    module ("my.module.f"); field: config field with the name, for errors.
    Raises: UserError, listing the known names, or both functions if the name is ambiguous.
    """
    if name in USER_FUNCTIONS:
        return USER_FUNCTIONS[name]
    path, _, attribute = name.rpartition(".")
    our_package, module = package(place), None
    if not path and name in _functions(our_package, place):
        return getattr(our_package, name)
    if path:
        our_module = f"{our_package.__name__}.{path}"
        module = _imported(our_module, field, name)
        # The name is ambiguous if a user's file has the same name as one of our modules.
        file = own_file(path, attribute) if module else None
        if file and _has(module, attribute, place):
            raise UserError(
                f"{field} {name!r} is both a function of this package and of {file}: write "
                f"'{our_module}.{attribute}' for that of this package, or rename your file"
            )
        if file or not module:
            module = _imported(path, field, name)
        if _has(module, attribute, place):
            return getattr(module, attribute)
    known_names = [f"{path}.{function}" for function in _functions(module, place)] if module else []
    if not module or (not known_names and _is_inside(module.__name__, our_package)):
        known_names = offered(place)
    close = closest(name, known_names)
    if close:
        hint = f"did you mean {close[0]}?"
    elif path and not module:
        functions_here = f"; functions here: {', '.join(known_names)}" if known_names else ""
        hint = f"if {path} is your module, start in the folder that has it{functions_here}"
    elif known_names:
        hint = f"use one of {', '.join(known_names)}, or a dotted name of your own"
    else:  # for example a function of __main__ of another program
        hint = "put the function into a file beside the config, and name it 'file.function'"
    missing = f", because no module {path} exists" if path and not module else ""
    raise UserError(f"{field} {name!r} does not exist{missing}; {hint}")


def name_of(function: Any, home: str, field: str) -> str:
    """Returns a name by which `resolve` finds a function, even if no module holds the function.

    function: function object, or its name, which is returned unchanged. home: name of the module of functions that a
    config file defines. field: config field with the function. Raises: UserError, if a function has no name.
    """
    if not callable(function):
        return function
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or "<" in name:
        raise UserError(
            f"config.{field} has {function!r}, but needs a function with a name: define it with def outside of other "
            "functions, or put it into a file and name it 'file.f'"
        )
    module = sys.modules.get(function.__module__)
    full_name = f"{function.__module__ if module else home or '__main__'}.{name}".removeprefix(OURS)
    if getattr(module, name, None) is not function:
        USER_FUNCTIONS[full_name] = function
    return full_name


def own_files(values: Iterable[Any]) -> dict[str, Path]:
    """Returns {name of a function of the user: its file}. values: all values of a checked config."""
    files = {}
    for name in _names_in(values):
        function = _script_function(name)
        file = Path(function.__code__.co_filename) if function else imported_file(name.rpartition(".")[0])
        if file and file.is_file():
            files[name] = file
    return files


def notebook_functions(values: Iterable[Any]) -> dict[str, Callable[..., Any]]:
    """Returns {name: function of the user that is in no file}. values: all values of a checked config."""
    functions = {name: _script_function(name) for name in _names_in(values)}
    return {name: f for name, f in functions.items() if f and not Path(f.__code__.co_filename).is_file()}


def _names_in(values: Iterable[Any]) -> list[str]:
    """Returns all values of a config, also those in tuples, as text without arguments in brackets."""
    texts = chain(*(value if isinstance(value, tuple) else (value,) for value in values))
    return [str(text).partition("(")[0] for text in texts]


def _script_function(name: str) -> Any:
    """Returns a function of the user's script, notebook or config file; None if no function there has this name."""
    module, _, attribute = name.rpartition(".")
    in_main = getattr(sys.modules.get("__main__"), attribute, None) if module == "__main__" else None
    return USER_FUNCTIONS.get(name) or in_main


def is_call(text: str) -> bool:
    """Returns whether a text is a call, such as "text.repetition(size=3)", and neither a name nor a path."""
    return text.endswith(")")


def split_call(text: str, field: str = "name") -> tuple[str, dict[str, Any]]:
    """Splits "text.repetition(size=3)" into the name and the keyword arguments, which are {} for a name alone.

    field: config field with the text, for errors. Raises: UserError, if the text is neither a name nor a call.
    """
    if "(" not in text:
        return text, {}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError
        return ast.unparse(call.func), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, TypeError):
        raise UserError(
            f"{field} {text!r} must be a name, or a call with keyword arguments and plain values, such as "
            "'text.repetition(size=3)'"
        ) from None


def bind(text: str, module: Place, field: str = "name") -> Callable[..., Any]:
    """Returns the function of "name" or "name(argument=value)", with these arguments bound.

    The defaults of keyword-only arguments of our functions are bound too, because these are never columns of the data.
    Raises: UserError, as `resolve`.
    """
    name, arguments = split_call(text, field)
    function = resolve(name, module, field)
    if is_ours(function, module):
        arguments = defaults(function) | arguments
    return partial(function, **arguments) if arguments else function


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
    """Returns the parameters of a function by their names; {} for a function in C without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def required_inputs(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of a function's positional arguments, which its caller supplies, and not the config."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters(function).values() if p.kind in kinds)


def keyword_only(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns a function's keyword-only arguments, which the config supplies."""
    return {k: p for k, p in parameters(function).items() if p.kind is p.KEYWORD_ONLY}


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the defaults of a function's keyword-only arguments."""
    return {k: p.default for k, p in keyword_only(function).items() if p.default is not p.empty}


def closest(name: str, known_names: Iterable[str]) -> list[str]:
    """Returns [the known name that is most similar to a dotted `name`], or [] if none is near.

    The last parts decide whether a name is near, because names of one section share a prefix. The whole names decide
    which of the near names is returned.
    """
    section, _, last = name.rpartition(".")
    similarities = {candidate: _similarity(candidate.rpartition(".")[2], last) for candidate in known_names}
    bounds = {
        candidate: SECTION_SIMILARITY if section and candidate.rpartition(".")[0] == section else SLIP_SIMILARITY
        for candidate in similarities
    }
    near_names = [candidate for candidate, value in similarities.items() if value == 1.0]
    near_names = near_names or [candidate for candidate, value in similarities.items() if value >= bounds[candidate]]
    return sorted(near_names, key=lambda candidate: -_similarity(candidate, name))[:1]


def _similarity(text: str, other_text: str) -> float:
    return difflib.SequenceMatcher(None, text, other_text).ratio()


def package(place: Place) -> ModuleType:
    """Returns the module or package of a place."""
    return place.package if isinstance(place, Kind) else place


def _is_inside(module_name: str, our_package: ModuleType) -> bool:
    """Returns whether a package of ours holds the module of this name."""
    return module_name.startswith(f"{our_package.__name__}.")


def _kind(module: ModuleType, place: Place) -> Callable[[Any], bool] | None:
    """Returns the test for members of `place` in a module of ours; None if every function of the module counts."""
    return place.includes if isinstance(place, Kind) and _is_inside(module.__name__, place.package) else None


def _has(module: ModuleType | None, name: str, place: Place) -> bool:
    """Returns whether a module has a member of this name that `place` includes."""
    is_member = (module and _kind(module, place)) or callable
    return is_member(getattr(module, name, None))


def _imported(module: str, field: str, name: str) -> ModuleType | None:
    """Imports a module; returns None if it does not exist. Raises: MissingHere, if its import fails."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise any error, and end the program
        # A missing module inside the user's module is an error, and not a module that does not exist.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise MissingHere(f"{field} {name!r}: importing {module} failed: {describe(error)}") from error


def offered(place: Place) -> list[str]:
    """Returns the names that a config may use for the functions of `place`: "function", or "module.function"."""
    module = package(place)
    if not hasattr(module, "__path__") or getattr(module, "__all__", ()):
        return _functions(module, place)
    names = sorted(file.stem for file in Path(module.__path__[0]).glob("[!_]*.py"))
    submodules = {name: importlib.import_module(f"{module.__name__}.{name}") for name in names}
    return [f"{name}.{function}" for name in names for function in _functions(submodules[name], place)]


def _functions(module: ModuleType, place: Place) -> list[str]:
    """Returns the names of the functions in `__all__` of a module, or of all public ones, that `place` includes."""
    is_member = _kind(module, place)
    members = inspect.getmembers(module, is_member or inspect.isfunction)
    public = [name for name, f in members if not name.startswith("_") and f.__module__ == module.__name__]
    listed_names = getattr(module, "__all__", public)
    return [name for name in listed_names if name in public] if is_member else listed_names
