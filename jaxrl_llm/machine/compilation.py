"""XLA compilation: the persistent cache, deterministic operations, rounding options, and a count of programs."""

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

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import progress, user_cache
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.jax_private import backends_are_initialized
from jaxrl_llm.machine.memory import device_memory
from jaxrl_llm.structs import PyTree

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
M_ARENA_MAX = -8  # option number of glibc's mallopt, from malloc.h

# Compiler options of programs that compute log-probabilities. By default XLA omits roundings to bfloat16 inside a
# fusion. Sampling, scoring and updates fuse differently, so their log-probabilities would differ by 1e-2.
ROUND_AS_WRITTEN = {"xla_allow_excess_precision": False}

COMPILER = "compiler"  # name of the thread that compiles ahead
CACHE_BYTES = 10 * 2**30  # size limit of the compilation cache: about a hundred runs of large models
# Number of malloc arenas of glibc for all threads. The default is 8 per core, and each retains memory that the compiler
# has freed.
MALLOC_ARENAS = 4


def enable_compilation_cache() -> str:
    """Enables JAX's persistent compilation cache in the user's cache folder, and limits its size.

    The environment variable JAX_COMPILATION_CACHE_DIR sets another folder; "" disables the cache. Call this before JAX
    starts threads, because it also limits the number of malloc arenas.
    Returns text for the banner: the folder, "off", or why the folder cannot be written.
    """
    # mallopt is called because glibc reads MALLOC_ARENA_MAX only at the start of a process.
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, MALLOC_ARENAS)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # JAX's own limit (jax_compilation_cache_max_size) is not used. With it JAX stores nothing in a folder that was
        # created without a limit, or in which a process was killed between the two files of an entry.
        user_cache.remove_least_recent(user_cache.home() / "xla", math.inf, CACHE_BYTES)
        jax.config.update("jax_compilation_cache_dir", str(user_cache.home() / "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        return "off"
    shown_folder = folder.replace(str(Path.home()), "~")
    # A folder in a bucket is not tested, because JAX itself writes there.
    write_error = "" if "://" in folder else user_cache.write_error(Path(folder))
    if write_error:
        if not Path(folder).is_dir():  # without a folder JAX would warn at each program; a full one can still be read
            jax.config.update("jax_compilation_cache_dir", None)
        return (
            f"not kept: {shown_folder} cannot be written ({write_error}); set JAX_COMPILATION_CACHE_DIR to a writable "
            "folder"
        )
    return shown_folder


def compute_deterministically() -> None:
    """Makes XLA use only operations whose results on a GPU are reproducible bit for bit.

    Raises: UserError, if JAX has initialized its devices already, because XLA reads its flags only before that.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if DETERMINISTIC in flags:
        return
    if backends_are_initialized():
        raise UserError(
            "config.deterministic = True comes too late, because JAX has initialized its devices already: start the "
            f"run in a new process, or set XLA_FLAGS={DETERMINISTIC} before JAX is used"
        )
    os.environ["XLA_FLAGS"] = " ".join([*flags, DETERMINISTIC])


def show_compilation(name: str) -> AbstractContextManager[Any]:
    """Shows on the console that a program is being compiled, unless the background thread compiles it."""
    # A line about background work would look as if the run were waiting for it.
    is_in_background = threading.current_thread().name.startswith(COMPILER)
    return nullcontext() if is_in_background else progress.task(f"compiling {name}")


def needed_memory(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes per device for a program's arguments, temporaries and results; 0 if the platform is silent.

    A donated argument and the result that reuses its memory count once.
    """
    analysis: Any = compiled.memory_analysis()
    if analysis is None:
        return 0
    return (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def compile_checked(lowered: jax.stages.Lowered, name: str, remedy: str, memory: int = 0) -> jax.stages.Compiled:
    """Compiles a program, which JAX reuses for its next call, and checks that it fits the memory of a device.

    name: name of the program in an error. remedy: config change that makes the program smaller. memory: bytes of the
    device; 0 = memory of this process's device. Raises: UserError, if the memory is too small.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"{name} does not fit the device's memory ({reason}): {remedy}") from error
    needed, limit = needed_memory(compiled), memory or device_memory(jax.local_devices()[0])
    if limit and needed > limit:
        raise UserError(
            f"{name} needs {needed / 2**30:.1f} GiB on each device, but a device has {limit / 2**30:.1f} GiB: {remedy}"
        )
    return compiled


class Program(NamedTuple):
    """A program of a run, which can be traced and compiled from shapes alone. Runs and `jaxrl plan` compile it."""

    phase: str  # phase of a step: push | prompts | decoding | scoring | update
    name: str
    trace: Callable[[], jax.stages.Traced]
    remedy: str  # config change that makes the program smaller, if it does not fit the memory
    states: PyTree  # states of models among its arguments, as shapes with shardings
    other_memory: PyTree = ()  # shapes of other arrays that are in memory at the same time, except states of models
    repetitions: int = 1  # how often it runs in its phase

    def compile(self, memory: int = 0) -> jax.stages.Compiled:
        """Compiles the program.

        memory: bytes of the device, 0 = this process's device. Raises: UserError, if too big.
        """
        with show_compilation(self.name):
            return compile_checked(self.trace().lower(), self.name, self.remedy, memory)


class Compilations:
    """Counts the programs that are compiled, or read from the compilation cache, while this object exists."""

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()  # number of programs by name of the jitted function
        self.seconds = 0.0  # compile time of the threads that run steps
        self.background_seconds = 0.0  # compile time of the thread that compiles ahead (`shapes.ShapeCache`)
        self.from_cache = 0  # number of programs that were read from the cache
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def close(self) -> None:
        """Stops counting, because JAX's listeners would outlive a run in a notebook."""
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Counts a compiled program and its seconds. JAX calls this function at each event of its monitoring."""
        # JAX sends this event also for programs from the persistent cache, which `_on_event` counts separately.
        if event == "/jax/core/compile/backend_compile_duration":
            # Each compiled program is progress, because the start of a run compiles for many minutes without a step.
            WATCHDOG.report_progress()
            self.programs[str(kwargs.get("fun_name", ""))] += 1
            if threading.current_thread().name.startswith(COMPILER):
                self.background_seconds += duration_secs
            else:
                self.seconds += duration_secs

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        self.from_cache += event == "/jax/compilation_cache/cache_hits"

    def __str__(self) -> str:
        background = f" and {self.background_seconds:.0f} s in the background" if self.background_seconds else ""
        total, cached = self.programs.total(), self.from_cache
        return (
            f"{total} programs: {cached} from the cache, {total - cached} compiled in {self.seconds:.0f} s{background}"
        )
