"""Adapters: small arrays beside frozen kernels of a model, its base. Only they learn.

A kind of adapters says which arrays stand beside a kernel, and what they make of it. Which kernels get some, how the
base is stored, and how both make a model, is the same for all kinds.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from qwix import QArray, dequantize, quantize

from jaxrl_llm.config.schema import Pattern
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import sharding
from jaxrl_llm.structs import AnyArray, Array, PyTree

Stored: TypeAlias = AnyArray | QArray  # a kernel of the base
Init: TypeAlias = Callable[[Array], jax.Array]  # key -> first values, in float32


@dataclass(frozen=True)
class AdaptedKernel(ABC):
    """A kernel with its adapter, in the place of the kernel in a parameter tree. The axis L of layers may be absent.

    Each kind of adapters has a class of its own, with more arrays, which it registers with JAX.
    """

    frozen: Stored  # W [L, D, E]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frozen.shape

    @abstractmethod
    def applied(self, x: Array, y: Array, precision: jax.lax.Precision | None) -> jax.Array:
        """Returns the output with the adapter, [T, E] in float32. x: [T, D]; y: x W, in float32."""

    @abstractmethod
    def merged(self) -> jax.Array:
        """Returns the kernel that gives this output alone, in float32."""


class PeftForm(NamedTuple):
    """What PEFT's folders call a kind of adapters and its parts."""

    type: str  # peft_type of adapter_config.json
    settings: Mapping[str, str]  # field of the kind -> key of adapter_config.json
    leaves: Mapping[str, str]  # array beside a kernel -> its part of a tensor's name


@dataclass(frozen=True, kw_only=True)
class AdapterKind(ABC):
    """A kind of adapters with its settings, the fields of a config's section `adapters`.

    targets: a kernel of the layers gets an adapter if this is found in its name, such as self_attn.q_proj. base_dtype:
    of the kernels of the layers, which do not learn; "": that of their products.
    """

    targets: Pattern = "_proj"
    base_dtype: Literal["", "int8"] = ""

    path: ClassVar[str] = ""  # a folder of PEFT to start from; "": new adapters
    peft: ClassVar[PeftForm | None] = None  # None: PEFT has no such adapters
    # Whether the mean of two adapters is the adapter of the mean. It is not, where the adapter is a product.
    linear: ClassVar[bool] = False

    @abstractmethod
    def leaves(self, layers: int, d: int, e: int) -> dict[str, Init]:
        """Returns how to make each array beside a new kernel [L, D, E], by name. New ones change no output."""

    @abstractmethod
    def adapted(self, frozen: Stored, leaves: Mapping[str, AnyArray]) -> AdaptedKernel:
        """Returns a kernel with the arrays beside it. Copies nothing; shapes are enough."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model."""

    kind: AdapterKind
    leaves: PyTree  # the model's tree, with an `Init` for each array in the place of an adapted kernel
    modules: dict[str, str]  # path of an adapted layer of weights -> its name in checkpoints, with {} for the layer
    in_int8: frozenset[str]  # paths of the kernels of the base that are kept in int8
    without: str = ""  # what the names of modules contain that get no adapter, whatever their last part is

    @property
    def shapes(self) -> PyTree:
        """The adapters as shapes."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes))

    def init(self, key: Array) -> PyTree:
        """Makes new adapters."""
        leaves, tree = jax.tree.flatten(self.leaves)
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(tree, [init(key) for init, key in zip(leaves, keys, strict=True)])

    def base_shapes(self, shapes: PyTree) -> PyTree:
        """Returns the parameters beside the adapters as a run stores them, as shapes, from those of the model."""

        def stored(path: Any, leaf: Any) -> Any:
            return jax.eval_shape(int8, leaf) if sharding.path_name(path) in self.in_int8 else leaf

        return jax.tree_util.tree_map_with_path(stored, shapes)

    def combine(self, base: PyTree, adapters: PyTree) -> PyTree:
        """Returns the parameters of the whole model. Copies nothing; shapes are enough."""
        # The tree of adapters has only paths with an adapter, so a kernel here is an adapted one.
        if "kernel" in base:
            return base | {"kernel": self.kind.adapted(base["kernel"], adapters)}
        return base | {name: self.combine(base[name], inner) for name, inner in adapters.items()}


def make_adapters(kind: AdapterKind, kernels: Mapping[str, tuple[int, ...]], table: Mapping[str, str]) -> Adapters:
    """Returns the adapters of a model.

    kernels: path -> shape [L, D, E] of those that may have some. table: path -> name of the weights in checkpoints.
    Raises: UserError, if the targets are in no name.
    """
    modules = {path: table[path].removesuffix(".weight") for path in kernels}
    # The name within a layer, such as self_attn.q_proj.
    in_layer = {path: module.rpartition("{}.")[2] for path, module in modules.items()}
    leaves, adapted = dict[str, Any](), [path for path in kernels if re.search(kind.targets, in_layer[path])]
    if not adapted:
        known = ", ".join(in_layer.values())
        raise UserError(f"config.adapters.targets = {kind.targets!r} is in no name of a kernel; there is {known}")
    for path in adapted:
        # The tree has only paths with an adapter: `combine` takes all else from the base.
        node = reduce(lambda node, part: node.setdefault(part, {}), path.split("/")[:-1], leaves)
        node |= kind.leaves(*kernels[path])
    names = {path.removesuffix("/kernel"): modules[path] for path in adapted}
    # Modules of the tower may be called as those of the layers.
    tower = next((name for path, name in table.items() if path.startswith("visual/layers/")), "")
    tower = tower.removeprefix("model.").partition(".")[0]
    return Adapters(kind, leaves, names, frozenset(kernels if kind.base_dtype else ()), tower)


def int8(kernel: AnyArray) -> QArray:
    """Rounds a kernel [L, D, E] to 127 parts of the largest |W| of each output, [L, 1, E], which is in float32."""
    return quantize(kernel.astype(jnp.float32), jnp.int8, channelwise_axes=(0, 2))


def as_array(kernel: Stored) -> jax.Array:
    """Returns a kernel of the base as numbers; one in int8 gets float32."""
    return dequantize(kernel) if isinstance(kernel, QArray) else kernel


def is_kernel(x: Any) -> bool:
    """Returns whether x is a kernel that is more than one array."""
    return isinstance(x, AdaptedKernel | QArray)


def merged(params: PyTree) -> PyTree:
    """Returns a tree, or a kernel, with each kernel as an array, its adapter merged. Plain arrays stay as they are."""

    def merge(x: Any) -> Any:
        return x.merged() if isinstance(x, AdaptedKernel) else as_array(x)

    return jax.tree.map(merge, params, is_leaf=is_kernel)
