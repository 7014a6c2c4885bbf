"""Imports the user's modules anew for each config file, and finds user files with the names of our modules."""

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
    old_path, old_modules = list(sys.path), dict(sys.modules)
    # User modules that are imported already and also exist in the folders are hidden until the end. Packages are
    # compared, because a process with JAX has thousands of modules in a few hundred packages.
    shared = {name for name in set(map(_package, old_modules)) if _folder_of(name) and _is_in(folders, name)}
    hidden = [name for name in old_modules if _package(name) in shared]
    for name in hidden:
        del sys.modules[name]
    sys.path[:0] = map(str, folders)
    # Python caches the listings of folders, in which a module that was just written is missing.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = old_path
        imported = [name for name in sys.modules if name not in old_modules or name in hidden]
        for name in [name for name in imported if _folder_of(name) in folders]:
            del sys.modules[name]
        sys.modules.update({name: old_modules[name] for name in hidden})


def own_file(name: str, attribute: str) -> Path | None:
    """Returns the file of the user's module `name` if it defines `attribute`, else None. Does not run the file.

    Modules of this package and installed modules are not the user's.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.has_location or _home(spec) is None:
        return None
    file = Path(str(spec.origin))
    # A file that cannot be compiled counts as one that defines the attribute, because it may define anything.
    with suppress(SyntaxError, ValueError):
        code = compile(file.read_bytes(), file, "exec")
        # `from x import *` may define any name; it leaves ("*",) as a constant of the code.
        return file if attribute in code.co_names or ("*",) in code.co_consts else None
    return file


def imported_file(name: str) -> Path | None:
    """Returns the file of an imported module of the user; None if it is not imported, or not the user's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file) if file and _folder_of(name) else None


def _package(name: str) -> str:
    """Returns the top-level package or module of a module."""
    return name.partition(".")[0]


def _is_in(folders: tuple[Path, ...], package: str) -> bool:
    """Returns whether one of the folders has a module or package of this name."""
    return any((folder / f"{package}.py").is_file() or (folder / package).is_dir() for folder in folders)


def _folder_of(name: str) -> Path | None:
    """Returns the folder that holds a module's top-level package; None if the package is ours or installed."""
    spec = getattr(sys.modules.get(_package(name)), "__spec__", None)
    return _home(spec) if spec else None


def _home(spec: ModuleSpec) -> Path | None:
    """Returns the folder that holds a package or a module; None if it is ours, installed or in no file."""
    if _package(spec.name) == _package(__name__):
        return None
    location = next(iter(spec.submodule_search_locations or ()), spec.origin if spec.has_location else None)
    home = Path(location).parent if location else None
    return home if home and not any(home.is_relative_to(folder) for folder in INSTALLED) else None
