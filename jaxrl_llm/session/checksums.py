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
    """Returns the checksum of each array, by the array's path: the sum of its bit patterns modulo 2**32.

    The sum does not depend on how the mesh divides the array, so a run may resume on another mesh.
    """

    def in_host_memory(array: Any) -> bool:
        return isinstance(array, jax.Array) and array.sharding.memory_kind == transfers.HOST

    def on_device(array: Any) -> Any:
        return transfers.move(array, transfers.DEVICE) if in_host_memory(array) else array

    paths_and_leaves = jax.tree.leaves_with_path(arrays)
    leaves = [leaf for _, leaf in paths_and_leaves]
    # Arrays of the host move one by one, because all of them together may not fit on the devices.
    one_by_one = any(map(in_host_memory, leaves))
    sums = [_sums([on_device(leaf)])[0] for leaf in leaves] if one_by_one else _sums(leaves)
    names = [keystr(path, simple=True, separator="/") for path, _ in paths_and_leaves]
    return {name: int(total) for name, total in zip(names, sums, strict=True)}


@jax.jit
def _sums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sum of the bit patterns of each array, modulo 2**32."""

    def total(array: jax.Array) -> jax.Array:
        bits = array if array.dtype == bool else array.view(f"uint{8 * array.dtype.itemsize}")
        return jnp.sum(bits, dtype=jnp.uint32)

    return [total(array) for array in arrays]


def changed(arrays: PyTree, saved: Mapping[str, int]) -> list[str]:
    """Returns the paths of the arrays whose checksum differs from the saved one."""
    return [path for path, value in checksums(arrays).items() if saved[path] != value]
