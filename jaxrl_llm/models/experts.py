"""A mixture of experts in place of an MLP: a router chooses some experts for each token.

No token is dropped: each reaches all experts that the router chooses, however many tokens an expert gets.
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
    """The experts that a layer's router chooses for each token, and its probabilities."""

    probabilities: Array  # [tokens ..., experts] float32, the router's softmax
    chosen: Array  # [tokens ..., chosen] int32, numbers of the chosen experts


class Kernel(nnx.Module):
    """The kernel [D, E] of a linear map, or the kernels [experts, D, E] of several experts."""

    def __init__(self, *shape: int, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))


class Experts(nnx.Module):
    """The router and the experts of a layer; each expert is a gated MLP.

    On a mesh, experts are sharded over `tensor`, and each device runs its own experts on its own tokens.
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
        """Returns the weighted sum of the chosen experts' outputs, and the routing.

        x, and the sum: [B, N, T, D], for prompts, their rows of completions, tokens of a row, and the model's width.
        """
        linear_maps = (self.gate_up, self.down) if self.mixture.fused else (self.gate, self.up, self.down)
        router, kernels = self.router.kernel[...], [part.kernel[...] for part in linear_maps]
        # The cast comes before kernels are sent between devices, because it halves the bytes. `_cast_with_gradient`
        # passes the gradient to the float32 kernel.
        cast_kernels = [jax.lax.stop_gradient(kernel).astype(self.cfg.dtype) for kernel in kernels]
        if self.mesh is None:
            return self._run_own_experts(x, router, *map(_cast_with_gradient, cast_kernels, kernels))
        expert_axis = "tensor" if self.mixture.experts % self.mesh.shape["tensor"] == 0 else None

        def on_device(
            x: Array, router: Array, cast_kernels: Sequence[Array], kernels: Sequence[Array]
        ) -> tuple[jax.Array, Routing]:
            """Runs the experts of one device on its tokens."""
            own_experts = len(cast_kernels[0])
            first_expert = jax.lax.axis_index(expert_axis) * own_experts if expert_axis else 0
            device_kernels = map(_cast_with_gradient, cast_kernels, kernels)
            outputs, routing = self._run_own_experts(x, router, *device_kernels, first_expert=first_expert)
            return outputs[None], routing

        # shard_map is needed, because the compiler alone would gather the tokens of all devices to sort them.
        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(BATCH, P(), P(expert_axis), P(expert_axis)),
            out_specs=(P(expert_axis, *BATCH), BATCH),
            check_vma=False,
        )
        outputs, routing = mapped(x, router, cast_kernels, kernels)
        return jnp.sum(outputs, axis=0), routing

    def _run_own_experts(
        self, x: Array, router: Array, *kernels: Array, first_expert: Array | int = 0
    ) -> tuple[jax.Array, Routing]:
        """Returns the outputs of this device's experts for x [B, N, T, D], and the routing.

        kernels: kernels of this device's experts. first_expert: number of the first of these experts. Experts of other
        devices add 0 to the output.
        """
        tokens, choices, own_experts = x.reshape(-1, x.shape[-1]), self.mixture.chosen, len(kernels[0])
        routing, weights = self._route(tokens, router)
        # Entry i of the next arrays describes one choice: a token and one of its chosen experts.
        expert_index = routing.chosen.reshape(-1) - first_expert
        on_this_device = (expert_index >= 0) & (expert_index < own_experts)
        # Experts of other devices get the index after the last own expert, so that their choices are sorted to the end.
        expert_index = jnp.where(on_this_device, expert_index, own_experts)
        # Sort the choices by expert, so that the tokens of each expert are consecutive rows of one grouped product. The
        # sort is stable, so that the gradient of a kernel sums its tokens in the order of the batch.
        by_expert = jnp.argsort(expert_index, stable=True)
        group_sizes = jnp.sum(expert_index[None] == jnp.arange(own_experts)[:, None], axis=1, dtype=jnp.int32)
        sorted_tokens = _permute_rows(jnp.repeat(tokens, choices, axis=0), by_expert)
        product = partial(grouped_matmul, sizes=group_sizes, precision=self.cfg.precision)
        # Each expert computes down(activation(gate(x)) * up(x)).
        *inner_kernels, down_kernel = kernels
        if self.mixture.fused:
            gate, up = jnp.split(product(sorted_tokens, *inner_kernels), 2, axis=-1)
        else:
            gate, up = (product(sorted_tokens, kernel) for kernel in inner_kernels)
        outputs = product(self.activation(gate) * up, down_kernel)
        # Undo the sort, and sum the outputs of each token's experts by the router's weights.
        outputs = _permute_rows(outputs, jnp.argsort(by_expert)).reshape(-1, choices, x.shape[-1])
        weights = jnp.where(on_this_device.reshape(weights.shape), weights, 0.0)[..., None]
        # The sum is float32, because bfloat16 would round at each term.
        summed = jnp.sum(outputs.astype(jnp.float32) * weights, axis=1).astype(x.dtype)
        routing = jax.tree.map(lambda array: array.reshape(*x.shape[:-1], -1), routing)
        return summed.reshape(x.shape), routing

    def _route(self, tokens: Array, router: Array) -> tuple[Routing, jax.Array]:
        """Chooses the experts of tokens. Returns the routing, and the weights [tokens, chosen] of the chosen experts.

        tokens: hidden states [tokens, D]. router: kernel of the router [D, experts].
        """
        # The logits are float32, because rounding would change the choice of experts.
        logits = jnp.matmul(tokens.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
        probabilities = jax.nn.softmax(logits)
        # The softmax covers all experts, as in Qwen. Mixtral's softmax over the chosen experts equals this softmax with
        # normalized weights.
        weights, chosen = jax.lax.top_k(probabilities, self.mixture.chosen)
        if self.mixture.normalized:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(probabilities, chosen), weights


@jax.custom_vjp
def _cast_with_gradient(cast_kernel: Array, kernel: Array) -> Array:
    """Returns `cast_kernel`, and passes its gradient to the float32 `kernel`.

    Devices exchange the smaller cast kernel, but sum gradients in float32: a sum over data and fsdp in bfloat16 would
    round.
    """
    return cast_kernel


def _cast_forward(cast_kernel: Array, kernel: Array) -> tuple[Array, Array]:
    # Save an empty array with the kernel's dtype, because saving the kernel itself would gather it on each device.
    return cast_kernel, jnp.zeros(0, kernel.dtype)


def _cast_backward(empty_kernel: Array, gradient: Array) -> tuple[None, jax.Array]:
    return None, gradient.astype(empty_kernel.dtype)


_cast_with_gradient.defvjp(_cast_forward, _cast_backward)


def _permute_rows(rows: Array, order: Array) -> jax.Array:
    """Returns the rows in another order. order: for each new row, its index among the old rows."""
    # unique_indices makes the gradient a permutation too, and not a slower scatter-add.
    return rows.at[order].get(unique_indices=True)
