"""LoRA (arXiv 2106.09685): a small matrix product beside each frozen kernel W [D, E], the only parameters that learn.

y = x W + s (x A) B, with A [D, r], B [r, E] and s = alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732). B begins
as 0, so the model begins as its base. W may be in int8, with a scale for each output (`int8`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from qwix import QArray, dequantize, quantize

from jaxrl_llm.structs import AnyArray, Array, PyTree

Stored: TypeAlias = AnyArray | QArray  # a kernel of the base


@partial(jax.tree_util.register_dataclass, data_fields=("frozen", "a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class Adapted:
    """A kernel with its adapter, in the place of the kernel in a parameter tree. The axis L of layers may be absent."""

    frozen: Stored  # W [L, D, E]
    a: AnyArray  # [L, D, r]
    b: AnyArray  # [L, r, E]
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frozen.shape

    def added(self, x: Array, precision: jax.lax.Precision | None) -> jax.Array:
        """Returns s (x A) B: [T, D] -> [T, E], in float32. W + s A B would take the memory of another kernel."""
        inner, b = jnp.matmul(x, self.a.astype(x.dtype), precision=precision), self.b.astype(x.dtype)
        # Its batch axis of size 1 keeps this product out of what remat "dots" saves, where it would be
        # beside that of the kernel: `inner` is enough.
        batched = (((2,), (1,)), ((0,), (0,)))
        outer = jax.lax.dot_general(inner[None], b[None], batched, precision, preferred_element_type=jnp.float32)
        return self.scale * outer[0]

    def merged(self) -> jax.Array:
        """Returns W + s A B, in float32."""
        # HIGHEST: what is exported must be what was trained, to float32.
        product = jnp.matmul(self.a, self.b, precision=jax.lax.Precision.HIGHEST)
        return as_array(self.frozen).astype(jnp.float32) + self.scale * product


@dataclass(frozen=True)
class Lora:
    """The adapters of a model."""

    shapes: PyTree  # of the adapters: the model's tree, with lora_a and lora_b in the place of each adapted kernel
    modules: dict[str, str]  # path of an adapted layer of weights -> its name in checkpoints, with {} for the layer
    rank: int
    alpha: float
    rs: bool
    in_int8: frozenset[str]  # paths of the kernels of the base that are kept in int8

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes))

    def as_stored(self, path: str, parameter: AnyArray) -> Stored:
        """Returns a parameter of the base as a run stores it: int8 for the kernels in `in_int8`."""
        return int8(parameter) if path in self.in_int8 else parameter

    def init(self, key: Array) -> PyTree:
        """Initializes adapters, float32: A is uniform in -1 / sqrt(D) ... 1 / sqrt(D) as in PEFT, B is 0."""
        leaves, tree = jax.tree.flatten_with_path(self.shapes)
        keys = jax.random.split(key, len(leaves))

        def init_leaf(path: Any, leaf: Any, key: Array) -> jax.Array:
            if path[-1].key == "lora_b":
                return jnp.zeros(leaf.shape)
            # PEFT's kaiming_uniform with a = sqrt(5): the bound depends on D alone, not on the rank.
            bound = 1 / math.sqrt(leaf.shape[1])
            return jax.random.uniform(key, leaf.shape, minval=-bound, maxval=bound)

        return jax.tree.unflatten(tree, [init_leaf(*leaf, key) for leaf, key in zip(leaves, keys, strict=True)])

    def combine(self, base: PyTree, adapters: PyTree) -> PyTree:
        """Returns the parameters of the whole model. Copies nothing; shapes are enough."""
        if "lora_a" in adapters:
            return base | {"kernel": Adapted(base["kernel"], adapters["lora_a"], adapters["lora_b"], self.scale)}
        return base | {name: self.combine(base[name], inner) for name, inner in adapters.items()}


def int8(kernel: AnyArray) -> QArray:
    """Rounds a kernel [L, D, E] to 127 parts of the largest |W| of each output, [L, 1, E], which is in float32."""
    return quantize(kernel.astype(jnp.float32), jnp.int8, channelwise_axes=(0, 2))


def as_array(kernel: Stored) -> jax.Array:
    """Returns a kernel of the base as numbers; one in int8 gets float32."""
    return dequantize(kernel) if isinstance(kernel, QArray) else kernel


def is_kernel(x: Any) -> bool:
    """Returns whether x is a kernel that is more than one array."""
    return isinstance(x, Adapted | QArray)


def merged_kernel(kernel: Any) -> Any:
    """Returns W [D, E] of a kernel as an array, its adapter merged. Plain arrays stay as they are."""
    return kernel.merged() if isinstance(kernel, Adapted) else as_array(kernel)


def merged(params: PyTree) -> PyTree:
    """Merges all adapters of a tree into their kernels."""
    return jax.tree.map(merged_kernel, params, is_leaf=is_kernel)
