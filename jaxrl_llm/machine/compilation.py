"""XLA compilation: the persistent cache, deterministic operations, rounding, and a counter of compiled programs."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax

# No public function says whether the backends are initialized.
from jax._src import xla_bridge

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import progress, user_cache
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.memory import device_memory
from jaxrl_llm.structs import PyTree

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
M_ARENA_MAX = -8  # from glibc's malloc.h

# Compiler options of programs that compute log-probabilities. By default XLA skips roundings to bfloat16 inside a
# fusion. Sampling, scoring and updating fuse differently, so their log-probabilities would differ by 1e-2.
ROUND_AS_WRITTEN = {"xla_allow_excess_precision": False}

COMPILER = "compiler"  # name of the thread that compiles ahead
PROGRAMS = 10 * 2**30  # bytes of compiled programs that are kept: some hundred runs of large models
# Heaps of glibc for all threads. By default it makes 8 for each core, and each keeps memory that the compiler freed.
HEAPS = 4


def keep_compilations() -> str:
    """Turns on JAX's persistent compilation cache in the user's cache folder, whose size is bounded.

    Returns the folder, "off", or that nothing can be kept there.

    JAX_COMPILATION_CACHE_DIR sets another folder. If it is set but empty, the cache is off.
    Call this before JAX starts threads, because it also limits the number of malloc heaps.
    """
    # mallopt, because glibc reads MALLOC_ARENA_MAX only at the start of a process.
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # JAX's own limit (jax_compilation_cache_max_size) stops to store anything in a folder that began without a
        # limit, and in one where a process was killed between the two files of an entry.
        user_cache.forget(user_cache.home() / "xla", math.inf, PROGRAMS)
        jax.config.update("jax_compilation_cache_dir", str(user_cache.home() / "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    where = jax.config.values["jax_compilation_cache_dir"]
    if not where:
        return "off"
    shown = where.replace(str(Path.home()), "~")
    # JAX itself writes to a bucket.
    refused = "" if "://" in where else user_cache.refused(Path(where))
    if refused:
        if not Path(where).is_dir():  # JAX would warn about each program; a full folder may be read
            jax.config.update("jax_compilation_cache_dir", None)
        return f"not kept: {shown} cannot be written ({refused}); set JAX_COMPILATION_CACHE_DIR to a folder that can"
    return shown


def compute_deterministically() -> None:
    """Makes XLA use only bit-for-bit reproducible operations on a GPU.

    Raises: UserError, if JAX has already initialized its devices, because XLA reads its flags right before that.
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


def compiling(name: str) -> AbstractContextManager[Any]:
    """Shows that a program is traced and compiled, unless steps go on meanwhile."""
    # A line about work in the background would look as if the run stood still.
    behind = threading.current_thread().name.startswith(COMPILER)
    return nullcontext() if behind else progress.task(f"compiling {name}")


def needed_memory(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of a device for arguments, temporaries and results of a program; 0: its platform does not say.

    A donated argument and the result that takes its place count once.
    """
    used: Any = compiled.memory_analysis()
    if used is None:
        return 0
    return used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes


def compile_checked(lowered: jax.stages.Lowered, what: str, remedy: str, memory: int = 0) -> jax.stages.Compiled:
    """Compiles a program, and checks that the memory of a device holds it. JAX keeps the program for its next call.

    what: the program's name; remedy: what to change in the config to make it smaller.
    memory: bytes of a device that is not here; 0: it is that of this process.
    Raises: UserError, if the memory is too small.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"{what} does not fit the device's memory ({reason}): {remedy}") from error
    need, limit = needed_memory(compiled), memory or device_memory(jax.local_devices()[0])
    if limit and need > limit:
        raise UserError(
            f"{what} needs {need / 2**30:.1f} GiB on each device, which has {limit / 2**30:.1f} GiB: {remedy}"
        )
    return compiled


class Program(NamedTuple):
    """A program of a run, which shapes are enough to compile."""

    phase: str  # of a step: push | prompts | decoding | scoring | update
    name: str
    trace: Callable[[], jax.stages.Traced]
    remedy: str  # what to change in the config if it does not fit the memory
    states: PyTree  # the states of models among its arguments, as shapes with shardings
    beside: PyTree = ()  # what else is in memory then, without the states of models
    times: int = 1  # that it runs in its phase

    def compile(self, memory: int = 0) -> jax.stages.Compiled:
        """Compiles it. memory: as in `compile_checked`. Raises: UserError, if the memory is too small."""
        with compiling(self.name):
            return compile_checked(self.trace().lower(), self.name, self.remedy, memory)


class Compilations:
    """Counts the programs that are compiled or read from the cache after its creation."""

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()  # by name of the jitted function
        self.seconds = 0.0  # of the threads that run steps
        self.in_background = 0.0  # seconds of the thread that compiles ahead (`shapes.Book`)
        self.from_cache = 0
        jax.monitoring.register_event_duration_secs_listener(self._lasted)
        jax.monitoring.register_event_listener(self._happened)

    def close(self) -> None:
        """Stops counting: the listeners of JAX outlive a run in a notebook."""
        jax.monitoring.unregister_event_duration_listener(self._lasted)
        jax.monitoring.unregister_event_listener(self._happened)

    def _lasted(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        # JAX sends it for a program from the persistent cache too; `_happened` counts how many these are.
        if event == "/jax/core/compile/backend_compile_duration":
            # A start compiles for many minutes without a step: each program is a sign of life.
            WATCHDOG.moved()
            self.programs[str(kwargs.get("fun_name", ""))] += 1
            if threading.current_thread().name.startswith(COMPILER):
                self.in_background += duration_secs
            else:
                self.seconds += duration_secs

    def _happened(self, event: str, **kwargs: str | int) -> None:
        self.from_cache += event == "/jax/compilation_cache/cache_hits"

    def __str__(self) -> str:
        behind = f" and {self.in_background:.0f} s in the background" if self.in_background else ""
        total, cached = self.programs.total(), self.from_cache
        return f"{total} programs: {cached} from the cache, {total - cached} compiled in {self.seconds:.0f} s{behind}"
