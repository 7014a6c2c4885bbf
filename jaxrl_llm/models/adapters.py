"""Adapters (such as LoRA): small arrays that are trained beside the frozen kernels of a base model.

A kind of adapters (a subclass of `AdapterKind`, such as `lora.Lora`) defines the arrays beside a kernel and their
effect. This file has the code of all kinds: it selects the kernels, stores the base, and combines base and adapters to
a model. Shapes: L layers, D input width and E output width of a kernel, T tokens.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl_llm.config.schema import Pattern
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import sharding
from jaxrl_llm.structs import AnyArray, Array, PyTree

if TYPE_CHECKING:  # The import takes a second, and a check of a config does not need it.
    from qwix import QArray

BaseKernel: TypeAlias = "AnyArray | QArray"  # a kernel of the base model, in floats or in int8
ArrayInit: TypeAlias = Callable[[Array], jax.Array]  # (random key) -> initial float32 values of an adapter's array


@dataclass(frozen=True)
class AdaptedKernel(ABC):
    """A kernel with its adapter, which replaces the kernel in a parameter tree. The axis L of layers may be absent.

    Each kind of adapters has its own subclass, which adds the arrays of the adapter and is registered as a JAX pytree.
    """

    frozen: BaseKernel  # base kernel W [L, D, E], which is not trained

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frozen.shape

    @abstractmethod
    def applied(self, x: Array, y: Array, precision: jax.lax.Precision | None) -> jax.Array:
        """Adds the adapter's effect to an output; returns float32 [T, E]. x: input [T, D]. y: product x W, float32."""

    @abstractmethod
    def merged(self) -> jax.Array:
        """Returns one float32 kernel that has the output of the base kernel with its adapter."""


class PeftForm(NamedTuple):
    """The names of a kind of adapters, of its settings and of its arrays in folders of the library PEFT."""

    type: str  # value of peft_type in adapter_config.json
    settings: Mapping[str, str]  # {field of the `AdapterKind`: key of adapter_config.json}
    leaves: Mapping[str, str]  # {name of an array beside a kernel: its part of the tensor's name in the file}


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
    # Whether averaging the arrays of two adapters averages their effects. It is False if the effect is a product of two
    # arrays, as in LoRA.
    linear: ClassVar[bool] = False

    @abstractmethod
    def leaves(self, layers: int, d: int, e: int) -> dict[str, ArrayInit]:
        """Returns {name: initializer} of the arrays beside a kernel [L, D, E]. New adapters must not change the output.

        layers: number L of layers. d: input width D of the kernel. e: output width E of the kernel.
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

        def stored_shape(path: Any, parameter_shape: Any) -> Any:
            is_int8 = sharding.path_name(path) in self.int8_paths
            return jax.eval_shape(quantize_int8, parameter_shape) if is_int8 else parameter_shape

        return jax.tree_util.tree_map_with_path(stored_shape, shapes)

    def combine(self, base: PyTree, adapters: PyTree) -> PyTree:
        """Returns the parameters of the model with its adapters. Copies nothing; arguments may be shapes."""
        # The recursion follows the tree of adapters, which has only the paths of adapted kernels.
        if "kernel" in base:
            return base | {"kernel": self.kind.adapted(base["kernel"], adapters)}
        return base | {name: self.combine(base[name], subtree) for name, subtree in adapters.items()}


def make_adapters(kind: AdapterKind, kernels: Mapping[str, tuple[int, ...]], table: Mapping[str, str]) -> Adapters:
    """Returns the adapters of a model: it selects the kernels that get an adapter, by kind.targets.

    kernels: {path: shape [L, D, E]} of the kernels that may be adapted. table: {path: name of the tensor in
    checkpoints}. Raises: UserError, if kind.targets matches the name of no kernel.
    """
    # kind.targets is compared with a kernel's name without its layer, such as self_attn.q_proj.
    module_names = {path: table[path].removesuffix(".weight") for path in kernels}
    names_in_layer = {path: module.rpartition("{}.")[2] for path, module in module_names.items()}
    adapted_paths = [path for path in kernels if re.search(kind.targets, names_in_layer[path])]
    if not adapted_paths:
        kernel_names = ", ".join(names_in_layer.values())
        raise UserError(
            f"config.adapters.targets = {kind.targets!r}: the expression matches the name of no kernel: let it match "
            f"some of {kernel_names}"
        )
    # Build the tree of initializers. Only adapted kernels get a path in this tree, because `Adapters.combine` takes all
    # other parameters from the base.
    leaf_inits = dict[str, Any]()
    for path in adapted_paths:
        node = leaf_inits
        for part in path.split("/")[:-1]:
            node = node.setdefault(part, {})
        node |= kind.leaves(*kernels[path])
    adapted_modules = {path.removesuffix("/kernel"): module_names[path] for path in adapted_paths}
    # The vision tower is excluded by the name of its module, because modules in the tower may have the names of the
    # decoder's modules.
    tower_tensor = next((name for path, name in table.items() if path.startswith("visual/layers/")), "")
    tower_module = tower_tensor.removeprefix("model.").partition(".")[0]
    int8_paths = frozenset(kernels if kind.base_dtype else ())
    return Adapters(kind, leaf_inits, adapted_modules, int8_paths, tower_module)


def quantize_int8(kernel: AnyArray) -> QArray:
    """Rounds a kernel [L, D, E] to int8, with one float32 scale for each output [L, 1, E]: its largest |W| / 127."""
    # Imported here, because the import takes a second, and a check of a config does not need it.
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
