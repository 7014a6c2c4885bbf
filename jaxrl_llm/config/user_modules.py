"""Imports the user's modules for each config file, and finds user files that share a name with our modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

from jaxrl_llm.errors import INSTALLED


@contextmanager
def importing_from(*folders: Path) -> Iterator[None]:
    """Puts the folders first on sys.path inside the context, and imports their modules from the start.

    At the end it removes these modules again, so two folders may each have a `grpo.py`. Installed packages and this
    package are not affected.
    """
    path, known = list(sys.path), dict(sys.modules)
    # Imported user modules with a name that is also in the folders. They come back at the end. A process with JAX has
    # thousands of modules, in a few hundred packages.
    shared = {name for name in set(map(_package, known)) if _folder_of(name) and _is_in(folders, name)}
    hidden = [name for name in known if _package(name) in shared]
    for name in hidden:
        del sys.modules[name]
    sys.path[:0] = map(str, folders)
    # Python keeps the listing of a folder: a module that was written a moment ago would not be found.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        imported = [name for name in sys.modules if name not in known or name in hidden]
        for name in [name for name in imported if _folder_of(name) in folders]:
            del sys.modules[name]
        sys.modules.update({name: known[name] for name in hidden})


def own_file(name: str, attribute: str) -> Path | None:
    """Returns the file of the user's module `name` if it defines `attribute`, else None. Does not run the file.

    Installed modules are not the user's.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.has_location or _home(spec) is None:
        return None
    file = Path(str(spec.origin))
    # Broken, or no Python source: it may define anything.
    with suppress(SyntaxError, ValueError):
        code = compile(file.read_bytes(), file, "exec")
        # "*" is a constant of the code after `from x import *`, which may define any name.
        return file if attribute in code.co_names or ("*",) in code.co_consts else None
    return file


def imported_file(name: str) -> Path | None:
    """Returns the file of the user's module `name`, which is imported; None if it is not, or not the user's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file) if file and _folder_of(name) else None


def _package(name: str) -> str:
    """Returns the top-level package or module of a module."""
    return name.partition(".")[0]


def _is_in(folders: tuple[Path, ...], package: str) -> bool:
    return any((folder / f"{package}.py").is_file() or (folder / package).is_dir() for folder in folders)


def _folder_of(name: str) -> Path | None:
    """Returns the folder of a module's top-level package; None if the package is ours or installed."""
    spec = getattr(sys.modules.get(_package(name)), "__spec__", None)
    return _home(spec) if spec else None


def _home(spec: ModuleSpec) -> Path | None:
    if _package(spec.name) == _package(__name__):
        return None
    inside = next(iter(spec.submodule_search_locations or ()), spec.origin if spec.has_location else None)
    home = Path(inside).parent if inside else None
    return home if home and not any(home.is_relative_to(place) for place in INSTALLED) else None
