"""The memory of devices: its size, and the bytes that arrays occupy."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxrl_llm.machine.sharding import HOST
from jaxrl_llm.structs import PyTree


def device_memory(device: Any) -> int:
    """Returns the bytes of a device that JAX may use; 0 if the platform does not report them, such as a CPU."""
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def device_bytes(tree: PyTree) -> int:
    """Returns the bytes that a tree of arrays, or of shapes with shardings, occupies on each device."""

    def array_bytes(x: Any) -> int:
        on_host = x.sharding.memory_kind == HOST
        return 0 if on_host else math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(array_bytes(x) for x in jax.tree.leaves(tree))
