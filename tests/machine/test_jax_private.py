"""The private names of JAX are in one module, and exist in the installed version."""

from __future__ import annotations

from pathlib import Path

from jaxrl_llm.machine import jax_private

PACKAGE = Path(jax_private.__file__).parents[1]


def test_the_private_names_of_jax_exist():
    names = ("client", "coordinator_address", "num_processes", "process_id")
    assert [name for name in names if not hasattr(jax_private.global_state, name)] == []
    assert jax_private.backends_are_initialized() in (True, False)


def test_only_one_module_imports_private_names_of_jax():
    files = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py") if "jax._src" in file.read_text()}
    assert files == {"machine/jax_private.py"}
