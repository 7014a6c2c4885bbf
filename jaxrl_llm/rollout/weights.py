"""The sampler's copy of the weights: in the compute dtype or int8, gathered over fsdp, with its layers in a list."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import placed
from jaxrl_llm.models import adapters
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Array, PyTree

REMEDY = "raise mesh.tensor: it divides this copy, and mesh.fsdp does not"


def sampling_decoder(model: Decoder, mesh: Mesh) -> Decoder:
    """Returns the decoder that samples with this copy."""
    return Decoder(replace(model.cfg, transposed=mesh.devices.flat[0].platform == "cpu"), mesh)


def copy_shapes(model: Decoder, mesh: Mesh, trainer: Mesh, params: PyTree, *, in_int8: bool) -> PyTree:
    """Returns the copy on `mesh` as shapes with shardings; params: shapes of the trainer's parameters."""
    return Placing(sampling_decoder(model, mesh), mesh, trainer, in_int8=in_int8).shapes(params)


class Placing:
    """Makes the copy of a policy's parameters, for `model`."""

    def __init__(self, model: Decoder, mesh: Mesh, trainer: Mesh | None = None, *, in_int8: bool = False):
        """mesh: mesh of the copy; trainer: mesh of the parameters, None if it is the same. in_int8: whether the layers'
        kernels are int8."""
        self._model, self.moves = model, trainer not in (None, mesh)
        self._ends_at, self._layer_at = _shardings(model, mesh, in_int8=in_int8)
        ends_at, layer_at = _shardings(model, trainer or mesh, in_int8=in_int8)
        self._ends = jax.jit(model.cast_for_compute, out_shardings=ends_at)
        # The number of the layer is an argument: one program for all layers.
        self._layer = jax.jit(partial(_layer, model, in_int8=in_int8), out_shardings=layer_at)

    def __call__(self, params: PyTree) -> PyTree:
        """Returns the copy."""
        # Layer by layer: in one program, the gathered stack of layers would be in memory beside the list.
        layers = [
            self._moved(self._layer(params["layers"], np.int32(i)), self._layer_at)
            for i in range(self._model.cfg.layers)
        ]
        return {**self._moved(self._ends(_ends_of(params)), self._ends_at), "layers": layers}

    def shapes(self, params: PyTree) -> PyTree:
        """Returns the copy as shapes with shardings; `params` may be shapes."""
        layer = jax.tree.map(placed, jax.eval_shape(self._layer, params["layers"], np.int32(0)), self._layer_at)
        ends = jax.tree.map(placed, jax.eval_shape(self._ends, _ends_of(params)), self._ends_at)
        return {**ends, "layers": [layer] * self._model.cfg.layers}

    def programs(self, params: PyTree) -> Iterator[Program]:
        """Yields the programs that make the copy; `params` may be shapes."""
        copy, ends, layers = self.shapes(params), _ends_of(params), params["layers"]
        layer, other = partial(self._layer.trace, layers, np.int32(0)), partial(self._ends.trace, ends)
        # The layers before it are in memory when the last one is made, unless they are on other devices.
        before = [] if self.moves else copy["layers"]
        program = partial(Program, phase="push", remedy=REMEDY)
        times = len(copy["layers"])
        yield program(name="a layer for the sampler", trace=layer, states=layers, beside=before[1:], times=times)
        yield program(name="embedding and head for the sampler", trace=other, states=ends, beside=before)

    def _moved(self, tree: PyTree, at: PyTree) -> PyTree:
        """Returns arrays on the devices of the copy."""
        if not self.moves:
            return tree
        # Waits, so that the trainer's devices hold no more than this of the copy.
        return jax.block_until_ready(jax.tree.map(sharding.copy_to_mesh, tree, at))


def _shardings(model: Decoder, mesh: Mesh, *, in_int8: bool) -> tuple[PyTree, PyTree]:
    """Returns two shardings of a copy: embedding and head, and a layer."""
    shapes = model.shapes
    if in_int8:
        shapes = shapes | {"layers": _on_kernels(shapes["layers"], partial(jax.eval_shape, adapters.quantize_int8))}
    stacked = sharding.shardings(shapes, mesh, leave_out="fsdp")
    ends = {name: at for name, at in stacked.items() if name != "layers"}
    layer = jax.tree.map(lambda at: NamedSharding(mesh, P(*at.spec[1:])), stacked["layers"])
    if model.cfg.transposed:
        layer = _on_kernels(layer, lambda at: NamedSharding(mesh, P(*reversed(at.spec))))
    return ends, layer


def _ends_of(params: PyTree) -> PyTree:
    return {name: leaf for name, leaf in params.items() if name != "layers"}


def _layer(model: Decoder, layers: PyTree, i: Array, *, in_int8: bool) -> PyTree:
    """Returns layer i of a stack, with its adapters merged."""
    layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), layers)
    # Merged in float32, then cast or rounded: the sum of base and adapter is rounded once.
    layer = adapters.merge_adapters(layer)
    if in_int8:
        # `adapters.quantize_int8` is for stacks of layers.
        layer = _on_kernels(layer, lambda kernel: jax.tree.map(lambda x: x[0], adapters.quantize_int8(kernel[None])))
    layer = model.cast_for_compute(layer)
    return _on_kernels(layer, lambda kernel: kernel.T) if model.cfg.transposed else layer


def _on_kernels(layers: PyTree, change: Callable[[Any], Any]) -> PyTree:
    """Changes the kernels of layers, or their integers and scales, but not those of experts.

    The head's is used as it is: its product has many columns.
    """

    def change_kernel(path: Any, leaf: Any) -> Any:
        name = sharding.path_name(path)
        return change(leaf) if re.search(r"kernel(/qvalue|/scale)?$", name) and "experts/" not in name else leaf

    return jax.tree_util.tree_map_with_path(change_kernel, layers)
