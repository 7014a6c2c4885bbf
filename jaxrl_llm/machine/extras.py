"""The optional packages: extras of pyproject.toml, each of which a feature needs and a plain run does not."""

from __future__ import annotations

from importlib.util import find_spec

from jaxrl_llm.errors import MissingHere


def require(package: str, extra: str, feature: str) -> None:
    """Raises: MissingHere, with the command that installs it, if the package that a feature needs is missing."""
    if not find_spec(package):
        raise MissingHere(f"{feature} needs {package}, which is not installed: pip install 'jaxrl_llm[{extra}]'")
