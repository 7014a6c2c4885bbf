"""Names in a config: the functions that they stand for, and what those functions take."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxrl_llm.config.user_modules import own_file
from jaxrl_llm.errors import UserError, describe

if TYPE_CHECKING:  # it imports jax, which the processes of rewards do without
    from jaxrl_llm.structs import Config


def resolve(name: str, module: ModuleType, what: str = "name") -> Callable[..., Any]:
    """The function `name`: of `module` ("grpo"), of a module in it ("arithmetic.accuracy"), or anywhere ("my.mod.f").

    Raises: UserError, naming what there is, or both functions that a name could mean.
    """
    path, _, attribute = name.rpartition(".")
    inner, found = None, None
    if not path and name in _functions(module):
        found = getattr(module, name)
    if path:
        ours = f"{module.__name__}.{path}"
        inner = _imported(ours, what, name)
        file = own_file(path, attribute) if inner else None
        if file and hasattr(inner, attribute):
            raise UserError(
                f"{what} {name!r} could be ours or that of {file}: "
                f"write '{ours}.{attribute}' for ours, or rename your file"
            )
        if file or not inner:
            inner = _imported(path, what, name)
        found = getattr(inner, attribute, None)
    if callable(found):
        return found
    offered = [f"{path}.{other}" for other in _functions(inner)] if inner else _offered(module)
    close = closest(name, offered)
    hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(offered)}, or a dotted name of your own"
    missing = f": there is no module {path}" if path and not inner else ""
    raise UserError(f"{what} {name!r} does not exist{missing}; {hint}")


def own_name(function: Callable[..., Any], module: ModuleType) -> str:
    """The name of a function of our module, however it was named; "" for anybody else's."""
    return function.__name__ if function.__module__ == module.__name__ else ""


def arguments(section: Config) -> dict[str, Any]:
    """A named section's keyword arguments: all but the name."""
    return {key: value for key, value in section.items() if key != "name"}


def required_inputs(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's positional arguments: what it asks of its caller, not of the config."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


def keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's keyword-only arguments: what it takes from the config."""
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The one that was meant, if any; two names of a section are not alike for that alone."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)


def _imported(module: str, what: str, name: str) -> ModuleType | None:
    """A module, or None if it is not there at all."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever the module does
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise UserError(f"{what} {name!r}: importing {module} failed: {describe(error)}") from error


def _offered(module: ModuleType) -> list[str]:
    """Public functions of a module, and those of the modules of a package as "module.function"."""
    if not hasattr(module, "__path__"):
        return _functions(module)
    names = sorted(file.stem for file in Path(module.__path__[0]).glob("[!_]*.py"))
    inner = {name: importlib.import_module(f"{module.__name__}.{name}") for name in names}
    return [f"{name}.{function}" for name in names for function in _functions(inner[name])]


def _functions(module: ModuleType) -> list[str]:
    """What a module offers by name: its `__all__`, or its public functions."""
    members = inspect.getmembers(module, inspect.isfunction)
    mine = [name for name, f in members if not name.startswith("_") and f.__module__ == module.__name__]
    return getattr(module, "__all__", mine)
