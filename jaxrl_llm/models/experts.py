"""A mixture of experts in place of an MLP: a router sends each token to the experts that it chooses.

It is exact: a token reaches all experts that it chooses, no matter how many other tokens choose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl_llm.machine.sharding import BATCH
from jaxrl_llm.models.config import DecoderConfig, Mixture
from jaxrl_llm.models.grouped import grouped_matmul
from jaxrl_llm.structs import Array


class Routing(NamedTuple):
    """What the router of a layer decides for each token."""

    probabilities: Array  # [..., experts] float32
    chosen: Array  # [..., chosen] int32, numbers of experts


class Kernel(nnx.Module):
    """The kernel of a linear map, or of several."""

    def __init__(self, *shape: int, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))


class Experts(nnx.Module):
    """Router and experts; each expert is a gated MLP.

    On a mesh, the experts are split over `tensor`. Each device runs its own experts on the tokens that it has.
    """

    def __init__(
        self,
        cfg: DecoderConfig,
        mixture: Mixture,
        activation: Callable[[Array], Array],
        mesh: Mesh | None,
        *,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.mixture, self.activation, self.mesh = cfg, mixture, activation, mesh
        self.router = Kernel(cfg.width, mixture.experts, rngs=rngs)
        if mixture.fused:
            self.gate_up = Kernel(mixture.experts, cfg.width, 2 * cfg.mlp_width, rngs=rngs)
        else:
            self.gate, self.up = (Kernel(mixture.experts, cfg.width, cfg.mlp_width, rngs=rngs) for _ in range(2))
        self.down = Kernel(mixture.experts, cfg.mlp_width, cfg.width, rngs=rngs)

    def __call__(self, x: Array) -> tuple[jax.Array, Routing]:
        """x [B, N, T, D] -> the sum of the chosen experts' outputs, each times its weight, and the routing."""
        parts = (self.gate_up, self.down) if self.mixture.fused else (self.gate, self.up, self.down)
        router, kernels = self.router.kernel[...], [part.kernel[...] for part in parts]
        # Cast before the kernels are sent between devices: half the bytes. `_learned` gives the gradient to the float32
        # kernel.
        cast = [jax.lax.stop_gradient(kernel).astype(self.cfg.dtype) for kernel in kernels]
        if self.mesh is None:
            return self._on_device(x, router, *map(_learned, cast, kernels))
        split = "tensor" if self.mixture.experts % self.mesh.shape["tensor"] == 0 else None

        def on_device(
            x: Array, router: Array, cast: Sequence[Array], kernels: Sequence[Array]
        ) -> tuple[jax.Array, Routing]:
            first = jax.lax.axis_index(split) * len(cast[0]) if split else 0
            y, routing = self._on_device(x, router, *map(_learned, cast, kernels), first=first)
            return y[None], routing

        # Left to itself, the compiler gathers the tokens of all devices, to sort them and to find the largest values.
        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(BATCH, P(), P(split), P(split)),
            out_specs=(P(split, *BATCH), BATCH),
            check_vma=False,
        )
        y, routing = mapped(x, router, cast, kernels)
        return jnp.sum(y, axis=0), routing

    def _on_device(self, x: Array, router: Array, *kernels: Array, first: Array | int = 0) -> tuple[jax.Array, Routing]:
        """Returns the outputs of this device's experts, numbers `first` and those after it, and the routing.

        An expert of another device adds 0 to the sum.
        """
        flat, chosen_each, count = x.reshape(-1, x.shape[-1]), self.mixture.chosen, len(kernels[0])
        routing, weights = self._route(flat, router)
        expert = routing.chosen.reshape(-1) - first
        on_this_device = (expert >= 0) & (expert < count)
        # The experts of other devices come last.
        expert = jnp.where(on_this_device, expert, count)
        # Stable: a kernel's gradient sums its tokens in the order of the batch.
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.sum(expert[None] == jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)
        rows = _permuted(jnp.repeat(flat, chosen_each, axis=0), order)
        product = partial(grouped_matmul, sizes=sizes, precision=self.cfg.precision)
        *inner, down = kernels
        if self.mixture.fused:
            gate, up = jnp.split(product(rows, *inner), 2, axis=-1)
            inside = self.activation(gate) * up
        else:
            inside = self.activation(product(rows, inner[0])) * product(rows, inner[1])
        out = product(inside, down)
        out = _permuted(out, jnp.argsort(order)).reshape(-1, chosen_each, x.shape[-1])
        weights = jnp.where(on_this_device.reshape(weights.shape), weights, 0.0)[..., None]
        # The sum is float32, because the few rounded outputs must not be rounded again at each term.
        y = jnp.sum(out.astype(jnp.float32) * weights, axis=1).astype(x.dtype)
        return y.reshape(x.shape), jax.tree.map(lambda r: r.reshape(*x.shape[:-1], -1), routing)

    def _route(self, x: Array, router: Array) -> tuple[Routing, jax.Array]:
        """x [M, D] -> routing of M tokens, and the weights [M, chosen] of the experts that they choose."""
        # The logits are float32, because rounding would change which experts are chosen.
        logits = jnp.matmul(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
        probabilities = jax.nn.softmax(logits)
        # The experts are chosen after the softmax over all experts, as in Qwen. Mixtral's softmax over the chosen
        # experts is this one, normalized.
        weights, chosen = jax.lax.top_k(probabilities, self.mixture.chosen)
        if self.mixture.normalized:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(probabilities, chosen), weights


@jax.custom_vjp
def _learned(cast: Array, kernel: Array) -> Array:
    """Returns a kernel in the dtype of its products, and gives its gradient to `kernel`, in the dtype of that.

    Devices send the cast kernel, and sum gradients in float32: a sum over data and fsdp in bfloat16 would round.
    """
    return cast


def _learned_forward(cast: Array, kernel: Array) -> tuple[Array, Array]:
    # The dtype alone: the kernel itself must not be gathered.
    return cast, jnp.zeros(0, kernel.dtype)


def _learned_backward(like: Array, gradient: Array) -> tuple[None, jax.Array]:
    return None, gradient.astype(like.dtype)


_learned.defvjp(_learned_forward, _learned_backward)


def _permuted(rows: Array, order: Array) -> jax.Array:
    # unique_indices make the gradient a permutation too, and not a sum.
    return rows.at[order].get(unique_indices=True)
