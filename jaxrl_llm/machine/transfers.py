"""Copies of arrays: from the host to a mesh and back, to another mesh or memory, and between processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.machine import distributed
from jaxrl_llm.machine.sharding import BATCH, prompt_shards
from jaxrl_llm.structs import PyTree

DEVICE, HOST = "device", "pinned_host"  # JAX's names of the memory of a device and of its host


def shard_batch(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts host arrays [B, ...], which hold the prompts of this process, on the mesh. Prompts are sharded (`BATCH`)."""
    batch_sharding = NamedSharding(mesh, BATCH)
    if distributed.count() == 1:
        return jax.device_put(tree, batch_sharding)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(batch_sharding, np.asarray(x)), tree)


def copy_to_mesh(x: jax.Array, new_sharding: NamedSharding) -> jax.Array:
    """Copies an array to another mesh. On both meshes each process must hold all of the array."""
    if distributed.count() == 1:
        return jax.device_put(x, new_sharding)
    # Each process copies between its own devices, so nothing crosses the network and no process waits for another.
    local_array = jax.make_array_from_single_device_arrays(x.shape, _local_sharding(x.sharding), _local_data(x))
    local_copy = jax.device_put(local_array, _local_sharding(new_sharding))
    return jax.make_array_from_single_device_arrays(x.shape, new_sharding, _local_data(local_copy))


def _local_sharding(whole_sharding: Any) -> NamedSharding:
    """Returns the sharding restricted to the devices of this process."""
    return NamedSharding(whole_sharding.mesh.local_mesh, whole_sharding.spec)


def _local_data(x: jax.Array) -> list[jax.Array]:
    """Returns the parts of an array that the devices of this process hold."""
    return [shard.data for shard in x.addressable_shards]


def move(tree: PyTree, memory: str) -> PyTree:
    """Moves the arrays of a tree to another memory of their devices: DEVICE or HOST. Scalars are not moved."""

    def move_array(x: jax.Array) -> jax.Array:
        is_in_place = x.ndim == 0 or x.sharding.memory_kind == memory
        return x if is_in_place else jax.device_put(x, x.sharding.with_memory_kind(memory))

    return jax.tree.map(move_array, tree)


def to_host(tree: PyTree) -> PyTree:
    """Copies device arrays to NumPy arrays in one transfer. Of a sharded batch it returns this process's prompts."""

    def local_parts(x: Any) -> Any:
        return x if _is_complete_here(x) else [shard.data for shard in _distinct_shards(x)]

    def join_parts(x: Any, fetched: Any) -> np.ndarray:
        return np.asarray(fetched) if _is_complete_here(x) else np.concatenate(fetched)

    # One device_get copies the whole tree, because it starts all copies before it waits for the first.
    fetched_tree = jax.device_get(jax.tree.map(local_parts, tree))
    return jax.tree.map(join_parts, tree, fetched_tree)


def gather_to_host(x: jax.Array) -> np.ndarray:
    """Copies a whole device array to NumPy in every process. All processes must call it in the same order."""
    return np.asarray(x if _is_complete_here(x) else multihost_utils.process_allgather(x, tiled=True))


def gather(tree: PyTree, mesh: Mesh) -> PyTree:
    """Concatenates host arrays [B, ...] of all processes, by a program on the devices.

    All processes must call it in the main thread, in the same order as other programs. A thread that samples ahead
    would mix up the order, so it uses `distributed.gather`, which is for small arrays.
    """
    if distributed.count() == 1:
        return tree
    return jax.tree.map(gather_to_host, shard_batch(tree, mesh))


def max_over_processes(numbers: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Returns the maximum over all processes of each number [N], by a program on the devices like `gather`."""
    if distributed.count() == 1:
        return numbers
    local_rows = prompt_shards(mesh) // distributed.count()
    # The rows are one per shard of this process, because BATCH splits the rows over the shards.
    rows = shard_batch(np.tile(numbers, (local_rows, 1)), mesh)
    return np.asarray(_column_maxima(rows, NamedSharding(mesh, P())))


def put_groups(
    old_groups: PyTree, new_groups: PyTree, replaced_groups: np.ndarray, source_groups: np.ndarray, mesh: Mesh
) -> PyTree:
    """Returns `old_groups` with some replaced by groups of `new_groups`, by a program on the devices like `gather`.

    old_groups, new_groups: trees of arrays [B, ...] with the groups of this process. replaced_groups, source_groups:
    indices in the batch of all processes; the i-th replaced group gets the i-th source group.
    """
    if distributed.count() == 1:

        def replace_groups(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            result = np.array(old)
            result[replaced_groups] = new[source_groups]
            return result

        return jax.tree.map(replace_groups, old_groups, new_groups)
    # `source` holds for each group of the batch the index of the group that replaces it, or -1. So one program of fixed
    # shape serves any number of replaced groups.
    source = np.full(len(jax.tree.leaves(old_groups)[0]) * distributed.count(), -1, np.int32)
    source[replaced_groups] = source_groups
    batch_sharding = NamedSharding(mesh, BATCH)
    return to_host(_put_rows(*shard_batch((old_groups, new_groups), mesh), source, batch_sharding))


@partial(jax.jit, static_argnums=1)
def _column_maxima(rows: jax.Array, replicated: NamedSharding) -> jax.Array:
    """Returns the maximum over the rows [rows, N] of all processes, on every device."""
    return jax.lax.with_sharding_constraint(rows.max(axis=0), replicated)


@partial(jax.jit, static_argnums=3)
def _put_rows(old_tree: PyTree, new_tree: PyTree, source: jax.Array, batch_sharding: NamedSharding) -> PyTree:
    """Replaces rows of arrays [B, ...] by rows of other arrays. source [B]: index of the new row, -1 = keep the old."""

    def replace_rows(old: jax.Array, new: jax.Array) -> jax.Array:
        is_replaced = source.reshape(-1, *[1] * (old.ndim - 1)) >= 0
        replaced = jnp.where(is_replaced, new[jnp.maximum(source, 0)], old)
        return jax.lax.with_sharding_constraint(replaced, batch_sharding)

    return jax.tree.map(replace_rows, old_tree, new_tree)


def _is_complete_here(x: Any) -> bool:
    """Returns whether this process holds all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _distinct_shards(x: jax.Array) -> list[jax.Shard]:
    """Returns one shard of this process for each block of rows, in the order of the rows."""
    # Devices along `tensor` hold the same rows, of which one shard is kept. `start` is None if the rows are not split.
    shards = {shard.index[0].start or 0: shard for shard in x.addressable_shards}
    return [shards[row] for row in sorted(shards)]
