"""What the processes of a run start with: the same config, code and versions in all of them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path

import jax

import jaxrl_llm
from jaxrl_llm.config.load import flatten
from jaxrl_llm.config.names import own_files
from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.structs import Config

VERSIONS = {"JAX": jax.__version__, "Python": platform.python_version(), "jaxrl_llm": jaxrl_llm.__version__}


def check(config: Config) -> None:
    """Checks that all processes have this config, and the same code and versions.

    config: checked, so that the modules which it names are imported. Raises: UserError, naming what differs.
    """
    if distributed.count() == 1:
        return
    fields = flatten(config)
    code = {"the code of jaxrl_llm": _hash(sorted(Path(jaxrl_llm.__file__).parent.rglob("*.py")))}
    code |= {f"the file of {name}": _hash([file]) for name, file in own_files(fields.values()).items()}
    agreement.check_alike({f"config.{name}": x for name, x in fields.items()} | VERSIONS, code)


def _hash(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
