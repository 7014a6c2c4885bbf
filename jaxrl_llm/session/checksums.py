"""Checksums of arrays, which show whether the bytes of a checkpoint have changed on the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jaxrl_llm.machine import transfers
from jaxrl_llm.structs import PyTree


def checksums(arrays: PyTree) -> dict[str, int]:
    """Returns the sum of each array's bit patterns modulo 2**32, by the array's path.

    It does not depend on the mesh.
    """

    def in_host_memory(x: Any) -> bool:
        return isinstance(x, jax.Array) and x.sharding.memory_kind == transfers.HOST

    named = jax.tree.leaves_with_path(arrays)
    leaves = [x for _, x in named]
    if any(map(in_host_memory, leaves)):
        # They move one by one, because all arrays that are kept in host memory may not fit on the devices together.
        sums = [_sums([transfers.move(x, transfers.DEVICE) if in_host_memory(x) else x])[0] for x in leaves]
    else:
        sums = _sums(leaves)
    return {keystr(path, simple=True, separator="/"): int(x) for (path, _), x in zip(named, sums, strict=True)}


@jax.jit
def _sums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    def total(array: jax.Array) -> jax.Array:
        bits = array if array.dtype == bool else array.view(f"uint{8 * array.dtype.itemsize}")
        return jnp.sum(bits, dtype=jnp.uint32)

    return [total(array) for array in arrays]


def changed(arrays: PyTree, saved: Mapping[str, int]) -> list[str]:
    """Returns the paths of the arrays whose checksum differs from the saved one."""
    return [path for path, value in checksums(arrays).items() if saved[path] != value]
