"""The rules that shard parameters and batches over the axes of a mesh."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.structs import PyTree

BATCH = P(("data", "fsdp"))  # spec of arrays [B, ...]: shards the prompts

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
