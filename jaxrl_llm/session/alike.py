"""What the processes of a run start with: the same config, code and versions in all of them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

import jaxrl_llm
from jaxrl_llm.config.names import own_files
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.distributed import agreement

VERSIONS = {"JAX": jax.__version__, "Python": platform.python_version(), "jaxrl_llm": jaxrl_llm.__version__}
FLAGS = "jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable"  # JAX's; they change programs


def check(fields: Mapping[str, Any]) -> None:
    """Checks that all processes have these fields of a config, and the same code and versions.

    The modules that the fields name are imported. Raises: UserError, naming what differs.
    """
    if distributed.count() == 1:
        return
    code = {"the code of jaxrl_llm": _hash(sorted(Path(jaxrl_llm.__file__).parent.rglob("*.py")))}
    code |= {f"the file of {name}": _hash([file]) for name, file in own_files(fields.values()).items()}
    flags = {name: jax.config.values[name] for name in FLAGS}
    agreement.check_alike({f"config.{name}": x for name, x in fields.items()} | VERSIONS | flags, code)


def _hash(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
