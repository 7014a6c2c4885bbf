"""A mixture of experts in place of an MLP: a router sends each token to the experts that it chooses.

It is exact: a token reaches all experts that it chooses, no matter how many other tokens choose them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_llm.models.grouped import grouped_matmul
from jaxrl_llm.sharding import BATCH
from jaxrl_llm.structs import Array

if TYPE_CHECKING:  # it imports this module
    from jaxrl_llm.models.blocks import DecoderConfig


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer. The width of each is `DecoderConfig.mlp_width`."""

    experts: int
    chosen: int  # experts that a token chooses
    normalized: bool  # the weights of the chosen experts add up to 1


class Routing(NamedTuple):
    """What the router of a layer decides for each token."""

    probabilities: Array  # [..., experts] float32
    chosen: Array  # [..., chosen] int32, numbers of experts


class Kernel(nnx.Module):
    """The kernel of a linear map, or of several."""

    def __init__(self, *shape: int, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))


class Experts(nnx.Module):
    """Router and experts; each expert is a SwiGLU MLP.

    On a mesh, the experts are split over `tensor`. Each device runs its own experts on the tokens that it has.
    """

    def __init__(self, cfg: DecoderConfig, mixture: Mixture, mesh: Mesh | None, rngs: nnx.Rngs):
        self.cfg, self.mixture, self.mesh = cfg, mixture, mesh
        self.router = Kernel(cfg.width, mixture.experts, rngs=rngs)
        self.gate, self.up = (Kernel(mixture.experts, cfg.width, cfg.mlp_width, rngs=rngs) for _ in range(2))
        self.down = Kernel(mixture.experts, cfg.mlp_width, cfg.width, rngs=rngs)

    def __call__(self, x: Array) -> tuple[jax.Array, Routing]:
        """x [B, N, T, D] -> the sum of the chosen experts' outputs, each times its weight, and the routing."""
        # In float32: rounding would change which experts are chosen.
        flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        logits = jnp.matmul(flat, self.router.kernel[...], precision=jax.lax.Precision.HIGHEST)
        probabilities = jax.nn.softmax(logits).reshape(*x.shape[:-1], -1)
        weights, chosen = jax.lax.top_k(probabilities, self.mixture.chosen)
        if self.mixture.normalized:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return self._mix(x, chosen, weights), Routing(probabilities, chosen)

    def _mix(self, x: Array, chosen: Array, weights: Array) -> jax.Array:
        kernels = [part.kernel[...].astype(self.cfg.dtype) for part in (self.gate, self.up, self.down)]
        run = partial(_mixed, precision=self.cfg.precision)
        if self.mesh is None:
            return run(x, chosen, weights, *kernels)
        split = "tensor" if self.mixture.experts % self.mesh.shape["tensor"] == 0 else None

        def on_device(*arrays: Array) -> jax.Array:
            first = jax.lax.axis_index(split) * len(arrays[3]) if split else 0
            return run(*arrays, first=first)[None]

        specs = (BATCH, BATCH, BATCH, P(split), P(split), P(split))
        mapped = jax.shard_map(
            on_device, mesh=self.mesh, in_specs=specs, out_specs=P(split, *BATCH), check_vma=False
        )
        return jnp.sum(mapped(x, chosen, weights, *kernels), axis=0)


def _mixed(
    x: Array, chosen: Array, weights: Array, gate: Array, up: Array, down: Array, *, first: Any = 0, precision: Any
) -> jax.Array:
    """The outputs of experts `first` and following, whose kernels are given, for all tokens that choose them."""
    experts, each = len(gate), chosen.shape[-1]
    expert = chosen.reshape(-1) - first
    own = (expert >= 0) & (expert < experts)
    expert = jnp.where(own, expert, experts)  # the others come last
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.sum(expert[None] == jnp.arange(experts)[:, None], axis=1, dtype=jnp.int32)
    product = partial(grouped_matmul, sizes=sizes, precision=precision)
    rows = _permuted(jnp.repeat(x.reshape(-1, x.shape[-1]), each, axis=0), order)
    out = product(jax.nn.silu(product(rows, gate)) * product(rows, up), down)
    out = _permuted(out, jnp.argsort(order)).reshape(-1, each, x.shape[-1])
    weights = jnp.where(own, weights.reshape(-1), 0.0).reshape(-1, each, 1)
    return jnp.sum(out.astype(jnp.float32) * weights, axis=1).astype(x.dtype).reshape(x.shape)


def _permuted(rows: Array, order: Array) -> jax.Array:
    return rows.at[order].get(unique_indices=True)  # so its gradient is a permutation too, not a sum
