"""Optional packages, the extras of pyproject.toml, each of which only one feature needs."""

from __future__ import annotations

from importlib.util import find_spec

from jaxrl_llm.errors import MissingHere


def require(package: str, extra: str, feature: str) -> None:
    """Raises: MissingHere, with the command that installs the package, if the package is missing.

    feature: the flag or config field that needs the package.
    """
    if not find_spec(package):
        raise MissingHere(f"{feature} needs {package}, which is not installed: pip install 'jaxrl_llm[{extra}]'")
