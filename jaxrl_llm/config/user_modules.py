"""Modules of a user's own: imported anew for each config file, and told apart from ours of the same name."""

from __future__ import annotations

import importlib
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)


@contextmanager
def importing_from(*folders: Path) -> Iterator[None]:
    """Inside, the folders are first on sys.path; their modules are imported anew, and forgotten at the end.

    So two folders may each have a `grpo.py`. What is installed, and this package, is left alone.
    """
    path, known = list(sys.path), dict(sys.modules)
    hidden = [name for name in known if _folder_of(name) and any(_stands_in(name, folder) for folder in folders)]
    for name in hidden:
        del sys.modules[name]
    sys.path[:0] = map(str, folders)
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
    """The file of the user's own module `name`, if there is one that defines `attribute`. It is not run.

    What is installed is not the user's own.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.has_location or _home(spec) is None:
        return None
    file = Path(str(spec.origin))
    with suppress(SyntaxError, ValueError):  # broken, or no Python source: it may define anything
        code = compile(file.read_bytes(), file, "exec")
        return file if attribute in code.co_names or ("*",) in code.co_consts else None
    return file


def _stands_in(name: str, folder: Path) -> bool:
    top = name.partition(".")[0]
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def _folder_of(name: str) -> Path | None:
    """The folder that an imported module's topmost package was found in; None if it is ours or installed."""
    spec = getattr(sys.modules.get(name.partition(".")[0]), "__spec__", None)
    return _home(spec) if spec else None


def _home(spec: ModuleSpec) -> Path | None:
    if spec.name.partition(".")[0] == __name__.partition(".")[0]:
        return None
    inside = next(iter(spec.submodule_search_locations or ()), spec.origin if spec.has_location else None)
    home = Path(inside).parent if inside else None
    return home if home and not any(home.is_relative_to(place) for place in INSTALLED) else None
