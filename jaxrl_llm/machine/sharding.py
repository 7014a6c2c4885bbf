"""The device mesh, and the rules that shard parameters and batches over its axes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.config.schema import Field, MayChange
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import distributed, progress
from jaxrl_llm.structs import PyTree

MeshSize: TypeAlias = MayChange[Annotated[int, Field(int, low=-1)]]

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))  # spec of arrays [B, ...]: shards the prompts
DEVICE, HOST = "device", "pinned_host"  # JAX's names of the memory of a device and of its host

# (pattern of the parameter's path, spec): the first match counts. Parameters of `layers/` have a leading layer axis L,
# which is never sharded.
RULES: tuple[tuple[str, P], ...] = (
    # The vision tower is not split over tensor, because each device runs the whole tower on its prompts. Its width is
    # split over fsdp.
    (r"visual/patches/kernel$", P(None, None, None, None, "fsdp")),  # [columns, rows, frames, channels, E]
    (r"visual/patches/still/kernel$", P(None, None, None, "fsdp")),  # [columns, rows, channels, E]
    (r"visual/layers/mlp/down/kernel$", P(None, None, "fsdp")),  # [L, in, E]
    (r"visual/layers/.*kernel$", P(None, "fsdp")),  # [L, E, out]
    (r"visual/deep/.*kernel$", P(None, "fsdp")),  # [K, E * patches of a token, out]
    (r"visual/merger/.*kernel$", P("fsdp")),  # [E * patches of a token, out]
    (r"visual/", P()),
    (r"embed/embedding$", P("tensor", "fsdp")),  # [V, D]
    (r"head/kernel$", P("fsdp", "tensor")),  # [D, V]
    (r"experts/router/kernel$", P()),  # [L, D, experts]
    (r"experts/(gate|up|gate_up)/kernel$", P(None, "tensor", "fsdp")),  # [L, experts, D, width of an expert]
    (r"experts/down/kernel$", P(None, "tensor", None, "fsdp")),  # [L, experts, width of an expert, D]
    # These kernels split their outputs over tensor, and `output` and `down` split their inputs. So attention and the
    # MLP of a layer need one sum over tensor each (Megatron, arXiv 1909.08053).
    (r"(query|key|value|gate|up)/kernel$", P(None, "fsdp", "tensor")),  # [L, D, out]
    (r"(query|key|value|gate|up)/bias$", P(None, "tensor")),  # [L, out]
    (r"(output|down)/bias$", P()),  # [L, D]: added once, after the sum over tensor
    (r"(output|down)/kernel$", P(None, "tensor", "fsdp")),  # [L, in, D]
    (r"norm/scale$", P()),
    (r"readout/(kernel|bias)$", P()),  # a critic's [D, 1] and [1]
)


def mesh_shape(data: int, fsdp: int, tensor: int, devices: int) -> tuple[int, int, int]:
    """Resolves the sizes of the mesh axes, of which at most one may be -1 for all remaining devices.

    Raises: UserError, if the mesh does not fit the devices.
    """
    sizes: dict[str, int] = {"data": data, "fsdp": fsdp, "tensor": tensor}
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        names = " = ".join(f"config.mesh.{axis}" for axis in open_axes)
        raise UserError(f"{names} = -1: only one mesh axis can be -1, which takes all remaining devices")
    fixed_devices = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        sizes[open_axes[0]] = max(devices // fixed_devices, 1)
    total = math.prod(sizes.values())
    text = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if total > devices:
        raise UserError(
            f"config.mesh ({text}) needs {total} devices, but only {devices} exist: choose smaller config.mesh.*"
        )
    if open_axes and total < devices:
        raise UserError(
            f"config.mesh ({text}) leaves {devices - total} of {devices} devices idle: the axes of config.mesh must "
            "divide the number of devices"
        )
    return sizes["data"], sizes["fsdp"], sizes["tensor"]


def make_mesh(*, data: MeshSize, fsdp: MeshSize, tensor: MeshSize) -> Mesh:
    """Makes a mesh over the first devices, with Auto axes, for which the compiler propagates shardings.

    With several processes the mesh has all devices, and each process has consecutive prompts of a batch.
    Raises: UserError, if the mesh does not fit the devices or the processes.
    """
    return mesh_over(all_devices(), data=data, fsdp=fsdp, tensor=tensor)


def make_meshes(sampler_devices: int, **sizes: int) -> tuple[Mesh, Mesh]:
    """Makes the meshes of the trainer and of the sampler over all devices.

    sampler_devices: number of devices that only the sampler uses; 0 = both share one mesh. sizes: data, fsdp and
    tensor, the axis sizes of the trainer's mesh. Raises: UserError, if the meshes do not fit the devices.
    """
    return meshes_over(all_devices(), sampler_devices, **sizes)


def all_devices() -> list[Any]:
    """Initializes and returns the devices of all processes. Raises: UserError, if the processes are not connected."""
    with progress.task("starting the devices"):
        devices = jax.devices()
    if jax.process_count() > distributed.count():  # the processes of a TPU slice find each other without our help
        raise UserError(
            f"JAX runs in {jax.process_count()} processes, which are not connected: start train and sft with "
            "--distributed auto, and all other programs on a single host"
        )
    return devices


def meshes_over(devices: Sequence[Any], sampler_devices: int, **sizes: int) -> tuple[Mesh, Mesh]:
    """Makes the meshes of the trainer and of the sampler over `devices`, which need not exist on this machine.

    The sampler gets `sampler_devices` of them, the last devices of each process, and the trainer all others; 0 = both
    share one mesh. Raises: UserError, if the devices cannot be split in this way, or a mesh does not fit.
    """
    if not sampler_devices:
        shared = mesh_over(devices, **sizes)
        return shared, shared
    trainer, sampler = _split_from_sampler(devices, sampler_devices)
    try:
        mesh = mesh_over(trainer, **sizes)
    except UserError as error:
        raise UserError(
            f"{error} (config.engine.devices = {sampler_devices} devices are reserved for the sampler)"
        ) from error
    # The tensor axis divides the sampler's devices of one process, because it must stay within a process.
    devices_per_process = sampler_devices // len({d.process_index for d in devices})
    # The fsdp axis is 1, because the sampler's copy of the weights is gathered over fsdp anyway.
    return mesh, mesh_over(sampler, data=-1, fsdp=1, tensor=math.gcd(mesh.shape["tensor"], devices_per_process))


def _split_from_sampler(devices: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Splits devices into the trainer's and the sampler's, which are `count` devices, the last of each process."""
    processes = sorted({d.process_index for d in devices})
    count_per_process = count // len(processes)
    if count % len(processes):
        raise UserError(
            f"config.engine.devices = {count} must be a multiple of the number of processes, which is {len(processes)}"
        )
    devices_by_process = [[d for d in devices if d.process_index == process] for process in processes]
    if count_per_process >= min(map(len, devices_by_process)):
        raise UserError(
            f"config.engine.devices = {count} of {len(devices)} devices leaves no device for the trainer: choose a "
            "smaller number, or 0 to let sampler and trainer share all devices"
        )
    return [d for process_devices in devices_by_process for d in process_devices[:-count_per_process]], [
        d for process_devices in devices_by_process for d in process_devices[-count_per_process:]
    ]


def mesh_over(devices: Sequence[Any], *, data: int, fsdp: int, tensor: int) -> Mesh:
    """Makes a mesh over `devices`, which need not exist on this machine.

    Raises: UserError, if the mesh does not fit.
    """
    shape, processes = mesh_shape(data, fsdp, tensor, len(devices)), len({d.process_index for d in devices})
    if processes > 1:
        device_grid = _split_by_process(devices, processes, shape)
    else:
        used_devices = devices[: math.prod(shape)]
        # JAX must be allowed to split an axis of the TPU's torus, because a mesh axis may be smaller than it.
        try:
            device_grid = mesh_utils.create_device_mesh(shape, used_devices, allow_split_physical_axes=True)
        except AssertionError as error:  # JAX's own check of a TPU's chips
            raise UserError(
                f"config.mesh: {len(used_devices)} of these TPU chips do not form a complete block of the torus: "
                "change the number of devices (config.mesh.*, config.engine.devices)"
            ) from error
    return Mesh(device_grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _split_by_process(devices: Sequence[Any], count: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Arranges the devices of all processes in the shape of a mesh. The tensor axis stays within a process."""
    data, fsdp, tensor = shape
    text = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
    if math.prod(shape) < len(devices):
        raise UserError(
            f"config.mesh ({text}) leaves some of {len(devices)} devices idle: a run of several processes must use all "
            "devices"
        )
    # The processes divide the data axis first and fsdp second, because over data only gradients cross the network
    # between hosts, but over fsdp the parameters of every layer do.
    outer = (count, 1, 1) if data % count == 0 else (data, count // data, 1)
    if math.prod(outer) != count or fsdp % outer[1]:
        raise UserError(
            f"config.mesh ({text}) cannot be split over {count} processes of {len(devices) // count} devices: "
            "config.mesh.tensor must divide the devices of a process, and config.mesh.data the number of processes"
        )
    slices = len({_slice_number(d) for d in devices})
    if data % slices:
        raise UserError(
            f"config.mesh ({text}) would gather parameters over the slow network between {slices} TPU slices: "
            f"config.mesh.data must be a multiple of {slices}"
        )
    inner = (data // outer[0], fsdp // outer[1], tensor)
    # The devices are sorted in the same way in all processes. On a large slice the TPU compiler finds no route for an
    # axis in another order.
    ordered = sorted(devices, key=lambda d: (_slice_number(d), d.process_index, getattr(d, "coords", None) or (), d.id))
    # [outer data, outer fsdp, 1, inner data, inner fsdp, tensor]; then each mesh axis is (outer, inner).
    blocks = np.array(ordered, dtype=object).reshape(*outer, *inner)
    return blocks.transpose((0, 3, 1, 4, 2, 5)).reshape(shape)


def _slice_number(device: Any) -> int:
    """Returns the number of a device's TPU slice, 0 for other devices. Slices are connected by a slow network."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def prompt_shards(mesh: Mesh) -> int:
    """Returns the number of shards into which data and fsdp split the prompts of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def path_name(path: tuple[Any, ...]) -> str:
    """Formats a pytree path, for example as "layers/attention/query/kernel"."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def spec_for(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the PartitionSpec of a parameter. A mesh axis whose size does not divide the dimension is dropped.

    name: path of the parameter. An adapter's matrix A [L, in, r] is sharded like the input of its kernel [L, in, out],
    and B [L, r, out] like the output. The values [L, in, out] and scales [L, 1, out] of an int8 kernel are sharded like
    the kernel.
    """
    kernel_name, is_adapter = re.subn(r"/lora_([ab])$", "/kernel", re.sub(r"/kernel/(qvalue|scale)$", "/kernel", name))
    rule = next((spec for pattern, spec in RULES if re.search(pattern, kernel_name)), P())
    if is_adapter and len(rule) == 3:
        rule = P(rule[0], rule[1], None) if name.endswith("a") else P(rule[0], None, rule[2])
    if len(rule) > len(shape):
        return P()
    return P(*(axis if axis and shape[i] % mesh.shape[axis] == 0 else None for i, axis in enumerate(rule)))


def shardings(tree: PyTree, mesh: Mesh, replicated_axis: str = "") -> PyTree:
    """Returns the NamedSharding of each parameter. Optimizer states have the same paths, so they are sharded alike.

    replicated_axis: mesh axis over which arrays are replicated instead of sharded.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        spec = spec_for(path_name(path), leaf.shape, mesh)
        return NamedSharding(mesh, P(*(None if axis == replicated_axis else axis for axis in spec)))

    return jax.tree_util.tree_map_with_path(place, tree)


def heads_spec(kv_heads: int, mesh: Mesh) -> P:
    """Returns the spec of arrays [B, K, ...]: shards prompts over data and fsdp, and heads over tensor if possible."""
    return P(("data", "fsdp"), "tensor" if kv_heads % mesh.shape["tensor"] == 0 else None)


def shard_batch(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts host arrays [B, ...], which hold the prompts of this process, on the mesh. Prompts are sharded (`BATCH`)."""
    place = NamedSharding(mesh, BATCH)
    if distributed.count() == 1:
        return jax.device_put(tree, place)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(place, np.asarray(x)), tree)


def copy_to_mesh(x: jax.Array, new_sharding: NamedSharding) -> jax.Array:
    """Copies an array to another mesh. On both meshes each process must hold all of the array."""
    if distributed.count() == 1:
        return jax.device_put(x, new_sharding)
    # Each process copies between its own devices, so nothing crosses the network and no process waits for another.
    local = jax.make_array_from_single_device_arrays(x.shape, _local_sharding(x.sharding), _local_data(x))
    local_copy = jax.device_put(local, _local_sharding(new_sharding))
    return jax.make_array_from_single_device_arrays(x.shape, new_sharding, _local_data(local_copy))


def _local_sharding(whole_sharding: Any) -> NamedSharding:
    """Returns the sharding restricted to the devices of this process."""
    return NamedSharding(whole_sharding.mesh.local_mesh, whole_sharding.spec)


def _local_data(x: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in x.addressable_shards]


def move(tree: PyTree, memory: str) -> PyTree:
    """Moves the arrays of a tree to another memory of their devices: DEVICE or HOST. Scalars are not moved."""

    def move_array(x: jax.Array) -> jax.Array:
        is_in_place = x.ndim == 0 or x.sharding.memory_kind == memory
        return x if is_in_place else jax.device_put(x, x.sharding.with_memory_kind(memory))

    return jax.tree.map(move_array, tree)


def to_host(tree: PyTree) -> PyTree:
    """Copies device arrays to NumPy arrays in one transfer. Of a sharded batch it returns this process's prompts."""
    # One device_get copies the whole tree, because it starts all copies before it waits for the first.
    local = jax.tree.map(lambda x: x if _is_complete_here(x) else [shard.data for shard in _distinct_shards(x)], tree)
    arrays = jax.device_get(local)
    return jax.tree.map(
        lambda x, fetched: np.asarray(fetched) if _is_complete_here(x) else np.concatenate(fetched), tree, arrays
    )


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

        def replace_groups(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            x = np.array(x)
            x[replaced_groups] = y[source_groups]
            return x

        return jax.tree.map(replace_groups, old_groups, new_groups)
    # `source` holds for each group of the batch the index of the group that replaces it, or -1. So one program of fixed
    # shape serves any number of replaced groups.
    source = np.full(len(jax.tree.leaves(old_groups)[0]) * distributed.count(), -1, np.int32)
    source[replaced_groups] = source_groups
    batch_sharding = NamedSharding(mesh, BATCH)
    return to_host(_put_rows(*shard_batch((old_groups, new_groups), mesh), source, batch_sharding))


@partial(jax.jit, static_argnums=1)
def _column_maxima(rows: jax.Array, replicated: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(rows.max(axis=0), replicated)


@partial(jax.jit, static_argnums=3)
def _put_rows(old: PyTree, new: PyTree, source: jax.Array, batch_sharding: NamedSharding) -> PyTree:
    def replace_rows(x: jax.Array, y: jax.Array) -> jax.Array:
        sources = source.reshape(-1, *[1] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(jnp.where(sources >= 0, y[jnp.maximum(source, 0)], x), batch_sharding)

    return jax.tree.map(replace_rows, old, new)


def _is_complete_here(x: Any) -> bool:
    """Returns whether this process holds all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _distinct_shards(x: jax.Array) -> list[jax.Shard]:
    """Returns one shard of this process for each block of rows, in the order of the rows."""
    # Devices along `tensor` hold the same rows, of which one shard is kept. `start` is None if the rows are not split.
    shards = {shard.index[0].start or 0: shard for shard in x.addressable_shards}
    return [shards[row] for row in sorted(shards)]
