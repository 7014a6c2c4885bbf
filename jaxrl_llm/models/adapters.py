"""Adapters: small arrays that learn, beside the frozen kernels of a base model.

A kind of adapters (a subclass of `AdapterKind`, such as `lora.Lora`) defines the arrays beside a kernel and their
effect. This file does what all kinds share: it selects the kernels, stores the base, and combines both to a model.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl_llm.config.schema import Pattern
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import sharding
from jaxrl_llm.structs import AnyArray, Array, PyTree

if TYPE_CHECKING:  # it takes a second, which a check of a config need not wait for
    from qwix import QArray

BaseKernel: TypeAlias = "AnyArray | QArray"  # a kernel of the base model, in floats or in int8
ArrayInit: TypeAlias = Callable[[Array], jax.Array]  # (random key) -> initial values in float32


@dataclass(frozen=True)
class AdaptedKernel(ABC):
    """A kernel with its adapter, which replaces the kernel in a parameter tree. The axis L of layers may be absent.

    Each kind of adapters has its own subclass with the arrays of the adapter, registered with JAX as a pytree.
    """

    frozen: BaseKernel  # base kernel W [L, D, E], which does not learn

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frozen.shape

    @abstractmethod
    def applied(self, x: Array, y: Array, precision: jax.lax.Precision | None) -> jax.Array:
        """Returns the output with the adapter [T, E], in float32. x: input [T, D]. y: product x W in float32."""

    @abstractmethod
    def merged(self) -> jax.Array:
        """Returns the ordinary kernel with the same output as the base kernel and its adapter, in float32."""


class PeftForm(NamedTuple):
    """The names that PEFT's folders use for a kind of adapters, its settings and its arrays."""

    type: str  # value of peft_type in adapter_config.json
    settings: Mapping[str, str]  # {field of the kind: key of adapter_config.json}
    leaves: Mapping[str, str]  # {array beside a kernel: its part of a tensor's name}


@dataclass(frozen=True, kw_only=True)
class AdapterKind(ABC):
    """A kind of adapters with its settings, the fields of a config's section `adapters`.

    targets: regular expression; a layer kernel whose name, such as self_attn.q_proj, contains a match gets an adapter.
    base_dtype: dtype of the frozen layer kernels; "" = the dtype of their products.
    """

    targets: Pattern = "_proj"
    base_dtype: Literal["", "int8"] = ""

    path: ClassVar[str] = ""  # PEFT folder with the initial adapters; "" = new adapters
    peft: ClassVar[PeftForm | None] = None  # names in PEFT folders; None if PEFT has no such adapters
    # Whether averaging the arrays of two adapters averages their effects. This is false where the effect is a product.
    linear: ClassVar[bool] = False

    @abstractmethod
    def leaves(self, layers: int, d: int, e: int) -> dict[str, ArrayInit]:
        """Returns {name: initializer} of the arrays beside a kernel [L, D, E]. New adapters must not change the output.

        layers: L. d: D, input width of the kernel. e: E, output width of the kernel.
        """

    @abstractmethod
    def adapted(self, frozen: BaseKernel, leaves: Mapping[str, AnyArray]) -> AdaptedKernel:
        """Returns a kernel combined with the arrays of its adapter. Copies nothing; arguments may be shapes."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model: their kind, and which kernels they adapt."""

    kind: AdapterKind
    leaves: PyTree  # tree with only the paths of adapted kernels, and there {name: ArrayInit} of the adapter's arrays
    modules: dict[str, str]  # {path of an adapted kernel's module: its name in checkpoints, with {} for the layer}
    int8_paths: frozenset[str]  # paths of the base kernels that are stored in int8
    excluded_module: str = ""  # name of the vision tower's module in checkpoints, which gets no adapters; "" = no tower

    @property
    def shapes(self) -> PyTree:
        """Shapes and dtypes of the adapters' arrays."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    @property
    def size(self) -> int:
        """Number of parameters of the adapters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes))

    def init(self, key: Array) -> PyTree:
        """Returns new adapters: the tree of their arrays."""
        leaves, tree = jax.tree.flatten(self.leaves)
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(tree, [init(key) for init, key in zip(leaves, keys, strict=True)])

    def base_shapes(self, shapes: PyTree) -> PyTree:
        """Returns the shapes of the base as a run stores it, with int8 kernels. shapes: shapes of the model."""

        def stored_shape(path: Any, leaf: Any) -> Any:
            return jax.eval_shape(quantize_int8, leaf) if sharding.path_name(path) in self.int8_paths else leaf

        return jax.tree_util.tree_map_with_path(stored_shape, shapes)

    def combine(self, base: PyTree, adapters: PyTree) -> PyTree:
        """Returns the parameters of the model with its adapters. Copies nothing; arguments may be shapes."""
        # The tree of adapters has only the paths of adapted kernels, so a kernel met here is adapted.
        if "kernel" in base:
            return base | {"kernel": self.kind.adapted(base["kernel"], adapters)}
        return base | {name: self.combine(base[name], inner) for name, inner in adapters.items()}


def make_adapters(kind: AdapterKind, kernels: Mapping[str, tuple[int, ...]], table: Mapping[str, str]) -> Adapters:
    """Returns the adapters of a model.

    kernels: {path: shape [L, D, E]} of the kernels that may be adapted. table: {path: name of the tensor in
    checkpoints}. Raises: UserError, if kind.targets matches the name of no kernel.
    """
    module_names = {path: table[path].removesuffix(".weight") for path in kernels}
    # Names are compared without the layer, such as self_attn.q_proj.
    names_in_layer = {path: module.rpartition("{}.")[2] for path, module in module_names.items()}
    leaf_inits, adapted_paths = (
        dict[str, Any](),
        [path for path in kernels if re.search(kind.targets, names_in_layer[path])],
    )
    if not adapted_paths:
        kernel_names = ", ".join(names_in_layer.values())
        raise UserError(
            f"config.adapters.targets = {kind.targets!r}: the expression matches the name of no kernel: let it match "
            f"some of {kernel_names}"
        )
    for path in adapted_paths:
        # Only adapted kernels get a path in this tree, because `combine` takes all other leaves from the base.
        node = reduce(lambda node, part: node.setdefault(part, {}), path.split("/")[:-1], leaf_inits)
        node |= kind.leaves(*kernels[path])
    adapted_modules = {path.removesuffix("/kernel"): module_names[path] for path in adapted_paths}
    # The tower is excluded by name, because its modules may have the names of the decoder's modules.
    tower_module = next((name for path, name in table.items() if path.startswith("visual/layers/")), "")
    tower_module = tower_module.removeprefix("model.").partition(".")[0]
    return Adapters(kind, leaf_inits, adapted_modules, frozenset(kernels if kind.base_dtype else ()), tower_module)


def quantize_int8(kernel: AnyArray) -> QArray:
    """Rounds a kernel [L, D, E] to int8, with one float32 scale for each output [L, 1, E]: its largest |W| / 127."""
    from qwix import quantize

    return quantize(kernel.astype(jnp.float32), jnp.int8, channelwise_axes=(0, 2))


def as_array(kernel: BaseKernel) -> jax.Array:
    """Returns a base kernel as an ordinary array; an int8 kernel becomes float32."""
    from qwix import QArray, dequantize

    return dequantize(kernel) if isinstance(kernel, QArray) else kernel


def is_kernel(x: Any) -> bool:
    """Returns whether x is a kernel that consists of several arrays: an adapted or an int8 kernel."""
    from qwix import QArray

    return isinstance(x, AdaptedKernel | QArray)


def merge_adapters(params: PyTree) -> PyTree:
    """Returns a tree or a kernel with adapters merged into ordinary arrays; ordinary arrays are unchanged."""

    def merge_kernel(x: Any) -> Any:
        return x.merged() if isinstance(x, AdaptedKernel) else as_array(x)

    return jax.tree.map(merge_kernel, params, is_leaf=is_kernel)
