"""The memory of devices: its size, and the bytes that arrays occupy."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.machine.transfers import HOST
from jaxrl_llm.structs import PyTree

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes that a Linux container may use, or "max"


def device_memory(device: Any) -> int:
    """Returns the bytes of a device that JAX may use; 0 if the platform does not report them.

    The CPU devices of a process share the memory of the machine, or of the container.
    """
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit", 0)
    return _host_memory() // len(jax.local_devices(backend="cpu"))


def _host_memory() -> int:
    """Returns the bytes of memory that this machine has, or this container; 0 if the system does not tell."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return 0
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else "max"
    return installed if limit == "max" else min(installed, int(limit))


def device_bytes(tree: PyTree) -> int:
    """Returns the bytes that a tree of arrays, or of shapes with shardings, occupies on each device."""

    def array_bytes(x: Any) -> int:
        on_host = x.sharding.memory_kind == HOST
        return 0 if on_host else math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(array_bytes(x) for x in jax.tree.leaves(tree))
