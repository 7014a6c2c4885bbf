"""The device mesh, and the rules that shard parameters and batches over its axes."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.config.schema import Field, MayChange
from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import PyTree

MeshSize: TypeAlias = MayChange[Annotated[int, Field(int, low=-1)]]

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))  # shards the leading axis (prompts) of each array in a batch

# The first match counts. Parameters of `layers/` have a leading layer axis L, which is never sharded.
RULES: tuple[tuple[str, P], ...] = (
    (r"embed/embedding$", P("tensor", "fsdp")),  # [V, D]
    (r"head/kernel$", P("fsdp", "tensor")),  # [D, V]
    (r"(query|key|value|gate|up)/kernel$", P(None, "fsdp", "tensor")),  # [L, D, out]
    (r"(query|key|value)/bias$", P(None, "tensor")),  # [L, out]
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
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise UserError(f"mesh.{axis} = {size}: give a size of 1 or more, or -1 for all devices left")
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

    Raises: UserError, if JAX runs in more than one process or the mesh does not fit the devices.
    """
    if jax.process_count() > 1:
        raise UserError(
            f"JAX runs in {jax.process_count()} processes, on several hosts perhaps, and this program can only be one: "
            "start it on a single host, once"
        )
    shape = mesh_shape(data, fsdp, tensor, jax.device_count())
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def path_name(path: tuple[Any, ...]) -> str:
    """Formats a pytree path, for example as "layers/attention/query/kernel"."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def spec_for(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """PartitionSpec of a parameter. Drops a mesh axis if its size does not divide the dimension."""
    rule = next((spec for pattern, spec in RULES if re.search(pattern, name)), P())
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
    """Puts host arrays on the mesh, with prompts sharded over data and fsdp."""
    return jax.device_put(tree, NamedSharding(mesh, BATCH))


def to_host(tree: PyTree) -> PyTree:
    """Copies device arrays to NumPy arrays in one transfer."""
    return jax.tree.map(np.asarray, jax.device_get(tree))
