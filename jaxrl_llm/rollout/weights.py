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

from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import placed
from jaxrl_llm.models import adapters
from jaxrl_llm.models.decoder import Decoder, decoder_of
from jaxrl_llm.structs import Array, PyTree

# Advice if the copy does not fit the memory.
REMEDY = "raise mesh.tensor, which divides the sampler's copy of the weights (mesh.fsdp does not)"


def sampling_decoder(model: Decoder, mesh: Mesh) -> Decoder:
    """Returns the decoder that computes with the sampler's copy. On a CPU, the copy's kernels are transposed."""
    return decoder_of(replace(model.cfg, transposed=mesh.devices.flat[0].platform == "cpu"), mesh)


def copy_shapes(model: Decoder, mesh: Mesh, trainer_mesh: Mesh, params: PyTree, *, in_int8: bool) -> PyTree:
    """Returns the shapes and shardings of the sampler's copy on `mesh`. params: shapes of the trainer's parameters."""
    return WeightCopier(sampling_decoder(model, mesh), mesh, trainer_mesh, in_int8=in_int8).shapes(params)


class WeightCopier:
    """Copies the policy's parameters for the sampler, layer by layer."""

    def __init__(self, model: Decoder, mesh: Mesh, trainer_mesh: Mesh | None = None, *, in_int8: bool = False):
        """mesh: mesh of the copy. trainer_mesh: mesh of the parameters, None if it is `mesh`. in_int8: whether the copy
        has int8 layer kernels."""
        self._model, self.copies_to_other_devices = model, trainer_mesh not in (None, mesh)
        self._outer_shardings, self._layer_shardings = _shardings(model, mesh, in_int8=in_int8)
        outer_shardings, layer_shardings = _shardings(model, trainer_mesh or mesh, in_int8=in_int8)
        self._copy_outer = jax.jit(model.cast_for_compute, out_shardings=outer_shardings)
        # The layer's number is an argument, so that one program serves all layers.
        self._copy_layer = jax.jit(partial(_layer, model, in_int8=in_int8), out_shardings=layer_shardings)

    def __call__(self, params: PyTree) -> PyTree:
        """Returns the copy of `params`."""
        # A single program would need memory for the gathered stack of layers and for the list of layers together.
        layers = [
            self._move(self._copy_layer(params["layers"], np.int32(number)), self._layer_shardings)
            for number in range(self._model.cfg.layers)
        ]
        outer = self._move(self._copy_outer(_without_layers(params)), self._outer_shardings)
        return {**outer, "layers": layers}

    def shapes(self, params: PyTree) -> PyTree:
        """Returns the shapes and shardings of the copy. params: parameters or their shapes."""
        layer = jax.eval_shape(self._copy_layer, params["layers"], np.int32(0))
        layer = jax.tree.map(placed, layer, self._layer_shardings)
        outer = jax.tree.map(placed, jax.eval_shape(self._copy_outer, _without_layers(params)), self._outer_shardings)
        return {**outer, "layers": [layer] * self._model.cfg.layers}

    def programs(self, params: PyTree) -> Iterator[Program]:
        """Yields the programs that make the copy. params: parameters or their shapes."""
        copy, outer, layers = self.shapes(params), _without_layers(params), params["layers"]
        # Copying the last layer needs memory while all other copies exist, unless the copies are on other devices.
        earlier_layers = [] if self.copies_to_other_devices else copy["layers"]
        program = partial(Program, phase="push", remedy=REMEDY)
        yield program(
            name="a layer for the sampler",
            trace=partial(self._copy_layer.trace, layers, np.int32(0)),
            states=layers,
            other_memory=earlier_layers[1:],
            repetitions=len(copy["layers"]),
        )
        yield program(
            name="embedding and head for the sampler",
            trace=partial(self._copy_outer.trace, outer),
            states=outer,
            other_memory=earlier_layers,
        )

    def _move(self, tree: PyTree, shardings: PyTree) -> PyTree:
        """Moves arrays to the devices of the copy, if these are not the trainer's devices."""
        if not self.copies_to_other_devices:
            return tree
        # Wait for the move, so that the trainer's devices hold only one part of the copy at a time.
        return jax.block_until_ready(jax.tree.map(transfers.copy_to_mesh, tree, shardings))


def _shardings(model: Decoder, mesh: Mesh, *, in_int8: bool) -> tuple[PyTree, PyTree]:
    """Returns the shardings of a copy's embedding and head, and the shardings of one of its layers."""
    shapes = model.shapes
    if in_int8:
        shapes = shapes | {"layers": _map_kernels(shapes["layers"], partial(jax.eval_shape, adapters.quantize_int8))}
    stacked = sharding.shardings(shapes, mesh, replicated_axis="fsdp")
    outer = {name: place for name, place in stacked.items() if name != "layers"}
    layer = jax.tree.map(lambda place: NamedSharding(mesh, P(*place.spec[1:])), stacked["layers"])
    if model.cfg.transposed:
        layer = _map_kernels(layer, lambda place: NamedSharding(mesh, P(*reversed(place.spec))))
    return outer, layer


def _without_layers(params: PyTree) -> PyTree:
    """Returns the parameters of embedding, head and vision tower."""
    return {name: leaf for name, leaf in params.items() if name != "layers"}


def _layer(model: Decoder, layers: PyTree, number: Array, *, in_int8: bool) -> PyTree:
    """Returns one layer of the trainer's stack in the form that the sampler needs, with its adapters merged.

    number: index of the layer. in_int8: whether its kernels become int8.
    """

    def select(stacked: Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(stacked, number, keepdims=False)

    layer = jax.tree.map(select, layers)
    # The adapters are merged in float32 before the cast, so that the sum of base and adapter is rounded only once.
    layer = adapters.merge_adapters(layer)
    if in_int8:

        def quantize(kernel: Array) -> Any:
            # `adapters.quantize_int8` takes a stack of layers, so the layer gets a leading axis of size 1.
            return jax.tree.map(lambda stacked: stacked[0], adapters.quantize_int8(kernel[None]))

        layer = _map_kernels(layer, quantize)
    layer = model.cast_for_compute(layer)
    return _map_kernels(layer, lambda kernel: kernel.T) if model.cfg.transposed else layer


def _map_kernels(layers: PyTree, change: Callable[[Any], Any]) -> PyTree:
    """Applies `change` to the kernels of layers, or to their integers and scales, except for kernels of experts.

    The head's kernel stays as it is, because its product has many columns and gains nothing.
    """

    def change_kernel(path: Any, leaf: Any) -> Any:
        name = sharding.path_name(path)
        return change(leaf) if re.search(r"kernel(/qvalue|/scale)?$", name) and "experts/" not in name else leaf

    return jax.tree_util.tree_map_with_path(change_kernel, layers)
