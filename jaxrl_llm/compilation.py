"""XLA's compilations: kept on disk from run to run, and counted."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter
from pathlib import Path

import jax
from jax._src import xla_bridge  # nothing public says whether JAX has its devices

from jaxrl_llm.errors import UserError
from jaxrl_llm.host import user_cache

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
M_ARENA_MAX = -8  # of glibc's malloc.h

# Compiler options of programs that give log-probabilities. By itself XLA leaves out roundings to bfloat16 between
# operations that it fuses. It fuses otherwise in sampling, scoring and updating, and the three differ by 1e-2.
ROUND_AS_WRITTEN = {"xla_allow_excess_precision": False}

HEAPS = 4  # that all threads share; glibc would take 8 a core, and keep in each what the compiler freed


def keep_compilations() -> str:
    """Has JAX keep what it compiles in the user's cache folder, unless told otherwise; returns where.

    JAX_COMPILATION_CACHE_DIR names another folder; set but empty, it switches the cache off.
    To be called before JAX has threads, so that they share a few heaps.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(user_cache.home() / "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    where = jax.config.values["jax_compilation_cache_dir"]
    return where.replace(str(Path.home()), "~") if where else "off"


def compute_deterministically() -> None:
    """Has XLA take only operations that repeat bit for bit, on a GPU.

    Raises: UserError, where JAX has found its devices, since XLA reads its flags just before.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if DETERMINISTIC in flags:
        return
    if xla_bridge.backends_are_initialized():
        raise UserError(
            "config.deterministic = True comes too late, JAX has found its devices: run the command in a process of "
            f"its own, or set XLA_FLAGS={DETERMINISTIC} before JAX is used"
        )
    os.environ["XLA_FLAGS"] = " ".join([*flags, DETERMINISTIC])


class Compilations:
    """Counts the programs compiled, and read from the cache instead, from now on."""

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()  # by the name of the jitted function
        self.seconds = 0.0
        self.from_cache = 0
        jax.monitoring.register_event_duration_secs_listener(self._lasted)
        jax.monitoring.register_event_listener(self._happened)

    def _lasted(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.programs[str(kwargs.get("fun_name", ""))] += 1
            self.seconds += duration_secs

    def _happened(self, event: str, **kwargs: str | int) -> None:
        self.from_cache += event == "/jax/compilation_cache/cache_hits"

    def __str__(self) -> str:
        return f"{self.programs.total()} programs in {self.seconds:.0f}s, {self.from_cache} of them from the cache"
