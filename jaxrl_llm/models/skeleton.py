"""Flax modules as pure functions: their parameters come as an argument of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
from flax import nnx

from jaxrl_llm.structs import PyTree

M = TypeVar("M", bound=nnx.Module)


class Skeleton(Generic[M]):
    """The structure of a module, without arrays."""

    def __init__(self, make: Callable[[], M]):
        self._definition, self._state = nnx.split(nnx.eval_shape(make))

    def __call__(self, params: PyTree) -> M:
        """Returns the module with these parameters."""
        # A copy, because `replace_by_pure_dict` writes in place.
        state = jax.tree.map(lambda x: x, self._state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._definition, state)

    @property
    def empty(self) -> M:
        """The module with shapes instead of arrays."""
        return nnx.merge(self._definition, self._state)


def parameters(module: nnx.Module) -> PyTree:
    """Returns the parameters of a module as a tree of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def recomputed(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """Returns a layer whose backward pass computes again what `DecoderConfig.remat` says."""
    if remat == "none":
        return layer
    # "No batch dims": products with kernels are kept; those of attention, whose size grows with the square of the
    # length, are not.
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(layer, policy=dots if remat == "dots" else None)
