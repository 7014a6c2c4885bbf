"""Flax modules as pure functions of their parameters, and the choice of what a backward pass recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
from flax import nnx

from jaxrl_llm.structs import PyTree

Module = TypeVar("Module", bound=nnx.Module)


class Skeleton(Generic[Module]):
    """The structure of a Flax module without its arrays: called with parameters, it returns the module."""

    def __init__(self, make: Callable[[], Module]):
        self._definition, self._state = nnx.split(nnx.eval_shape(make))

    def __call__(self, params: PyTree) -> Module:
        """Returns the module with these parameters."""
        # Copy the state, because `replace_by_pure_dict` writes in place.
        state = jax.tree.map(lambda x: x, self._state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._definition, state)

    @property
    def empty(self) -> Module:
        """The module with shapes instead of arrays."""
        return nnx.merge(self._definition, self._state)


def parameter_tree(module: nnx.Module) -> PyTree:
    """Returns the parameters of a module as a tree of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def rematerialized(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """Returns `layer` with rematerialization in its backward pass. remat: value of `DecoderConfig.remat`."""
    if remat == "none":
        return layer
    # This policy keeps the products with kernels, which have no batch dimension. It recomputes the attention scores,
    # whose size grows with the square of the length.
    dots_policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(layer, policy=dots_policy if remat == "dots" else None)
