"""Checks that all processes of a run start with the same config, code and versions, and names the machine of a run."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

import jaxrl_llm
from jaxrl_llm.config.names import own_files
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.distributed import agreement

VERSIONS = {"JAX": jax.__version__, "Python": platform.python_version(), "jaxrl_llm": jaxrl_llm.__version__}
# JAX's settings that change the programs.
FLAGS = "jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable"


def machine() -> dict[str, str]:
    """Returns what decides the rounding of a run besides its config: versions, processor and number of devices."""
    kind = jax.devices()[0].device_kind
    if jax.default_backend() == "cpu":  # XLA compiles for the instructions of the processor
        with suppress(OSError):
            model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
            kind = model[1] if model else platform.machine()
    return VERSIONS | {"processor": kind, "devices": f"{jax.device_count()}"}


def check(fields: Mapping[str, Any]) -> None:
    """Checks that these fields of a config, the code and the versions are equal in all processes.

    The modules that the fields name must be imported. Raises: UserError, naming the difference.
    """
    if distributed.count() == 1:
        return
    code = {"the code of jaxrl_llm": _hash_files(sorted(Path(jaxrl_llm.__file__).parent.rglob("*.py")))}
    code |= {f"the file of {name}": _hash_files([file]) for name, file in own_files(fields.values()).items()}
    flags = {name: jax.config.values[name] for name in FLAGS}
    agreement.check_alike({f"config.{name}": x for name, x in fields.items()} | VERSIONS | flags, code)


def _hash_files(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
