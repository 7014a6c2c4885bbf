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
BATCH = P(("data", "fsdp"))  # shards the leading axis (prompts) of each array in a batch
DEVICE, HOST = "device", "pinned_host"  # kinds of memory

# The first match counts. Parameters of `layers/` have a leading layer axis L, which is never sharded.
RULES: tuple[tuple[str, P], ...] = (
    # The tower is not split over tensor: each of its devices runs the whole tower on its prompts. Over fsdp, the width
    # is split.
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
    """Resolves the sizes of the mesh axes. At most one may be -1, for all remaining devices.

    Raises: UserError, if the mesh does not fit the devices.
    """
    sizes: dict[str, int] = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError(f"mesh.{' and mesh.'.join(free)} are both -1: only one axis can take the rest")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        sizes[free[0]] = max(devices // fixed, 1)
    total = math.prod(sizes.values())
    text = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if total > devices:
        raise UserError(f"mesh ({text}) needs {total} devices, but there are {devices}: make mesh.* smaller")
    if free and total < devices:
        raise UserError(f"mesh ({text}) leaves {devices - total} of {devices} devices idle: mesh.* must divide them")
    return sizes["data"], sizes["fsdp"], sizes["tensor"]


def make_mesh(*, data: MeshSize, fsdp: MeshSize, tensor: MeshSize) -> Mesh:
    """Makes a mesh with Auto axes (the compiler propagates shardings) over the first devices.

    With several processes it has all devices, and every process has consecutive prompts of a batch.
    Raises: UserError, if the mesh does not fit the devices or the processes.
    """
    return mesh_over(all_devices(), data=data, fsdp=fsdp, tensor=tensor)


def make_meshes(sampler_devices: int, **sizes: int) -> tuple[Mesh, Mesh]:
    """Makes the mesh of the trainer, with `sizes` as `make_mesh`, and that of the sampler. See `meshes_over`."""
    return meshes_over(all_devices(), sampler_devices, **sizes)


def all_devices() -> list[Any]:
    """Starts and returns the devices of all processes. Raises: UserError, if processes do not know of each other."""
    with progress.task("starting the devices"):
        devices = jax.devices()
    if jax.process_count() > distributed.count():  # a TPU slice finds itself
        raise UserError(
            f"JAX runs in {jax.process_count()} processes, which do not know of each other: start train and sft with "
            "--distributed auto, and all other programs only on one host of its own"
        )
    return devices


def meshes_over(devices: Sequence[Any], sampler_devices: int, **sizes: int) -> tuple[Mesh, Mesh]:
    """Makes the meshes of trainer and sampler over devices that need not be here.

    The sampler has the last `sampler_devices` of them, as many of each process, and the trainer the others; 0: they
    share one mesh. Raises: UserError, if the devices cannot be split so, or the mesh does not fit.
    """
    if not sampler_devices:
        shared = mesh_over(devices, **sizes)
        return shared, shared
    trainer, sampler = _split_from_sampler(devices, sampler_devices)
    try:
        mesh = mesh_over(trainer, **sizes)
    except UserError as error:
        raise UserError(f"{error} (config.engine.devices = {sampler_devices} are the sampler's)") from error
    # `local` is the number of devices of a process, because a tensor axis must stay within one.
    local = sampler_devices // len({d.process_index for d in devices})
    # No fsdp: the sampler's copy of the weights is gathered over it anyway.
    return mesh, mesh_over(sampler, data=-1, fsdp=1, tensor=math.gcd(mesh.shape["tensor"], local))


def _split_from_sampler(devices: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Splits devices into those of the trainer and `count` of the sampler, the last ones of each process."""
    processes = sorted({d.process_index for d in devices})
    each = count // len(processes)
    if count % len(processes):
        raise UserError(
            f"config.engine.devices = {count} cannot be split evenly over {len(processes)} processes: give a multiple"
        )
    local = [[d for d in devices if d.process_index == process] for process in processes]
    if each >= min(map(len, local)):
        raise UserError(
            f"config.engine.devices = {count} of {len(devices)} leaves the trainer no device: give fewer, or 0, with "
            "which sampler and trainer share all"
        )
    return [d for of in local for d in of[:-each]], [d for of in local for d in of[-each:]]


def mesh_over(devices: Sequence[Any], *, data: int, fsdp: int, tensor: int) -> Mesh:
    """Makes a mesh as `make_mesh`, over devices that need not be here. Raises: UserError, as it."""
    shape, processes = mesh_shape(data, fsdp, tensor, len(devices)), len({d.process_index for d in devices})
    if processes > 1:
        placed = _split_by_process(devices, processes, shape)
    else:
        first = devices[: math.prod(shape)]
        # A mesh axis may be smaller than an axis of the TPU's torus, which JAX splits only if it is allowed to.
        try:
            placed = mesh_utils.create_device_mesh(shape, first, allow_split_physical_axes=True)
        except AssertionError as error:  # JAX's own check of a TPU's chips
            raise UserError(
                f"{len(first)} of these TPU chips are no block of the torus without a hole: give another number "
                "(mesh.*, engine.devices)"
            ) from error
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _split_by_process(devices: Sequence[Any], count: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Returns all devices in the shape of a mesh. A process has whole prompts: no tensor axis leaves it."""
    data, fsdp, tensor = shape
    text = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
    if math.prod(shape) < len(devices):
        raise UserError(
            f"mesh ({text}) leaves some of {len(devices)} devices idle: several processes use all of theirs"
        )
    # Processes divide data first, then fsdp: over data only gradients cross the network between hosts, over fsdp the
    # parameters of every layer do.
    outer = (count, 1, 1) if data % count == 0 else (data, count // data, 1)
    if math.prod(outer) != count or fsdp % outer[1]:
        raise UserError(
            f"mesh ({text}) cannot be split over {count} processes of {len(devices) // count} devices: let mesh.tensor "
            "divide the devices of a process, and mesh.data their number"
        )
    slices = len({_slice(d) for d in devices})
    if data % slices:
        raise UserError(
            f"mesh ({text}) would gather parameters over the slow network between {slices} slices: let mesh.data be a "
            "multiple of their number"
        )
    inner = (data // outer[0], fsdp // outer[1], tensor)
    # All processes sort alike: on a large slice, the TPU compiler finds no route for an axis in another order.
    ordered = sorted(devices, key=lambda d: (_slice(d), d.process_index, getattr(d, "coords", None) or (), d.id))
    # [outer data, outer fsdp, 1, inner data, inner fsdp, tensor]; then each mesh axis is (outer, inner).
    blocks = np.array(ordered, dtype=object).reshape(*outer, *inner)
    return blocks.transpose(0, 3, 1, 4, 2, 5).reshape(shape)


def _slice(device: Any) -> int:
    """Returns the number of a device's TPU slice. Between slices there is only a data-center network."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def prompt_shards(mesh: Mesh) -> int:
    """Returns the number of devices that share the prompts of a batch: each has others, over data and fsdp."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def path_name(path: tuple[Any, ...]) -> str:
    """Formats a pytree path, for example as "layers/attention/query/kernel"."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def spec_for(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """PartitionSpec of a parameter. Drops a mesh axis if its size does not divide the dimension.

    An adapter's A [L, in, r] is sharded as the input of its kernel [L, in, out], and B [L, r, out] as its output. A
    kernel in int8 has values [L, in, out] and scales [L, 1, out], which are sharded as the kernel.
    """
    of, which = re.subn(r"/lora_([ab])$", "/kernel", re.sub(r"/kernel/(qvalue|scale)$", "/kernel", name))
    rule = next((spec for pattern, spec in RULES if re.search(pattern, of)), P())
    if which and len(rule) == 3:
        rule = P(rule[0], rule[1], None) if name.endswith("a") else P(rule[0], None, rule[2])
    if len(rule) > len(shape):
        return P()
    return P(*(axis if axis and shape[i] % mesh.shape[axis] == 0 else None for i, axis in enumerate(rule)))


def shardings(tree: PyTree, mesh: Mesh, leave_out: str = "") -> PyTree:
    """NamedShardings of parameters, and of optimizer states with the same structure (matched by path).

    leave_out: a mesh axis over which arrays are replicated.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        spec = spec_for(path_name(path), leaf.shape, mesh)
        return NamedSharding(mesh, P(*(None if axis == leave_out else axis for axis in spec)))

    return jax.tree_util.tree_map_with_path(place, tree)


def heads_spec(kv_heads: int, mesh: Mesh) -> P:
    """Returns the spec of arrays [B, K, ...]: prompts over data and fsdp, heads over tensor if it divides them."""
    return P(("data", "fsdp"), "tensor" if kv_heads % mesh.shape["tensor"] == 0 else None)


def shard_batch(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts host arrays on the mesh, with prompts sharded over data and fsdp. They have the prompts of this process."""
    place = NamedSharding(mesh, BATCH)
    if distributed.count() == 1:
        return jax.device_put(tree, place)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(place, np.asarray(x)), tree)


def copy_to_mesh(x: jax.Array, at: NamedSharding) -> jax.Array:
    """Copies an array to another mesh. On both meshes the devices of each process have all of it."""
    if distributed.count() == 1:
        return jax.device_put(x, at)
    # Each process copies between its own devices: so nothing crosses the network, and no process waits for another.
    local = jax.make_array_from_single_device_arrays(x.shape, _local_sharding(x.sharding), _local_data(x))
    moved = jax.device_put(local, _local_sharding(at))
    return jax.make_array_from_single_device_arrays(x.shape, at, _local_data(moved))


def _local_sharding(at: Any) -> NamedSharding:
    """Returns the same sharding over the devices of this process alone."""
    return NamedSharding(at.mesh.local_mesh, at.spec)


def _local_data(x: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in x.addressable_shards]


def move(tree: PyTree, memory: str) -> PyTree:
    """Moves the arrays of a tree to another memory of their devices: DEVICE or HOST. Scalars stay where they are."""

    def move_array(x: jax.Array) -> jax.Array:
        stays = x.ndim == 0 or x.sharding.memory_kind == memory
        return x if stays else jax.device_put(x, x.sharding.with_memory_kind(memory))

    return jax.tree.map(move_array, tree)


def to_host(tree: PyTree) -> PyTree:
    """Copies device arrays to NumPy arrays in one transfer. A sharded batch gives the prompts of this process."""
    # One device_get for the tree: it starts all copies before it waits for the first.
    local = jax.tree.map(lambda x: x if _whole(x) else [shard.data for shard in _rows(x)], tree)
    arrays = jax.device_get(local)
    return jax.tree.map(lambda x, fetched: np.asarray(fetched) if _whole(x) else np.concatenate(fetched), tree, arrays)


def whole_to_host(x: jax.Array) -> np.ndarray:
    """Copies a whole device array to NumPy in every process. All processes must call it, in the same order."""
    return np.asarray(x if _whole(x) else multihost_utils.process_allgather(x, tiled=True))


def gather(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns arrays with the rows of all processes, on the host, of arrays with those of this one: by the devices.

    All processes must call it in the main thread, in the same order as other programs: one that samples ahead in
    another thread would mix up the order, and takes `distributed.gather`, for small arrays.
    """
    if distributed.count() == 1:
        return tree
    return jax.tree.map(whole_to_host, shard_batch(tree, mesh))


def largest(numbers: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Returns the largest value of each number [N] in any process: by the devices, as `gather`."""
    if distributed.count() == 1:
        return numbers
    local_rows = prompt_shards(mesh) // distributed.count()
    # A row for each shard that this process has of a batch: BATCH splits the rows over them.
    rows = shard_batch(np.tile(numbers, (local_rows, 1)), mesh)
    return np.asarray(_column_maxima(rows, NamedSharding(mesh, P())))


def put_groups(old: PyTree, new: PyTree, at: np.ndarray, chosen: np.ndarray, mesh: Mesh) -> PyTree:
    """Returns `old` with its groups `at` replaced by the groups `chosen` of `new`, by the devices, as `gather`.

    Arrays [B, ...] have the groups of this process; at, chosen: numbers in the batch of all processes.
    """
    if distributed.count() == 1:

        def replaced(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            x = np.array(x)
            x[at] = y[chosen]
            return x

        return jax.tree.map(replaced, old, new)
    # `source` has for each group of the batch the group that replaces it, or -1. So the devices run one gather of fixed
    # shape, whatever the number of replaced groups.
    source = np.full(len(jax.tree.leaves(old)[0]) * distributed.count(), -1, np.int32)
    source[at] = chosen
    placed = NamedSharding(mesh, BATCH)
    return to_host(_put_rows(*shard_batch((old, new), mesh), source, placed))


@partial(jax.jit, static_argnums=1)
def _column_maxima(rows: jax.Array, placed: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(rows.max(axis=0), placed)


@partial(jax.jit, static_argnums=3)
def _put_rows(old: PyTree, new: PyTree, source: jax.Array, placed: NamedSharding) -> PyTree:
    def replaced(x: jax.Array, y: jax.Array) -> jax.Array:
        sources = source.reshape(-1, *[1] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(jnp.where(sources >= 0, y[jnp.maximum(source, 0)], x), placed)

    return jax.tree.map(replaced, old, new)


def _whole(x: Any) -> bool:
    """Returns whether this process has all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _rows(x: jax.Array) -> list[jax.Shard]:
    """Returns the shards of this process in the order of their rows, each once."""
    # Devices along `tensor` hold the same rows, and start is None where an axis is not split.
    shards = {shard.index[0].start or 0: shard for shard in x.addressable_shards}
    return [shards[row] for row in sorted(shards)]
