"""Checksums of arrays, which show whether the bytes of a checkpoint have changed on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxrl_llm.machine import sharding
from jaxrl_llm.structs import PyTree


def checksums(arrays: PyTree) -> dict[str, int]:
    """Returns the sum of each array's bit patterns modulo 2**32, by the array's path.

    It does not depend on the mesh.
    """

    def on_device(x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else sharding.move(x, sharding.DEVICE)

    leaves = jax.tree.leaves_with_path(arrays)
    # The arrays move one by one, because all arrays that are kept in host memory may not fit on the devices together.
    return {keystr(path, simple=True, separator="/"): int(_checksum(on_device(leaf))) for path, leaf in leaves}


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    bits = array if array.dtype == bool else array.view(f"uint{8 * array.dtype.itemsize}")
    return jnp.sum(bits, dtype=jnp.uint32)


def changed(arrays: PyTree, saved: Mapping[str, int]) -> list[str]:
    """Returns the paths of the arrays whose checksum differs from the saved one."""
    return [path for path, value in checksums(arrays).items() if saved[path] != value]
