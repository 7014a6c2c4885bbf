"""The head over the tokens of a micro-batch: log-probabilities and entropies, from the states before the tokens.

All logits at once would take too much memory, so the head goes over a chunk of tokens at a time, and the backward pass
computes the logits again. Each device goes over its own tokens. It gathers the kernel once before the chunks, and
reduces the kernel's gradient once after them: left to the compiler, both would happen in every chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.algorithms.sampling import Sampling, token_logprobs_and_residuals, token_logprobs_gradient
from jaxrl_llm.machine import sharding
from jaxrl_llm.models.attention import hide_tokens, soft_capped
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Array, PyTree

ROWS = sharding.BATCH
# Number of logits that a device holds at a time, for a small kernel: 128 MiB in float32.
LOGITS_AT_ONCE = 2**25


def tokens_at_once(width: int, vocabulary: int) -> int:
    """The largest number of tokens in a chunk, for a kernel [D, V] on a device.

    Each chunk reads the kernel, and reads and writes its float32 gradient: with a few hundred tokens, that takes longer
    than the products. The logits of D / 2 tokens take half of the memory of that gradient.
    """
    return max(LOGITS_AT_ONCE // vocabulary, width // 2, 1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def logprobs(
    model: Decoder, sampling: Sampling, kernel: Array, states: Array, tokens: Array
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probability and entropy [B, N, T] of tokens [B, N, T], from states [B, N, T, D] and kernel [D, V]."""
    return _forward(model, sampling, kernel, states, tokens)[0]


def _forward(model: Decoder, sampling: Sampling, kernel: Array, states: Array, tokens: Array) -> tuple[Any, PyTree]:
    def on_device(kernel: Array, states: Array, tokens: Array) -> tuple[Any, ...]:
        parts = _chunks(model, kernel, states, tokens)

        def chunk(part: tuple[Array, Array]) -> PyTree:
            logits = _logits(model, part[0], kernel)
            (logprob, entropy), (*_, log_total, _) = token_logprobs_and_residuals(logits, part[1], sampling)
            # A single chunk is small: its logits are kept for the backward pass.
            return (logprob, entropy, log_total), logits if len(parts[0]) == 1 else None

        scored, logits = jax.lax.map(chunk, parts)
        return *(_joined(x, tokens) for x in scored), logits

    kernel = _gathered(model, kernel)
    run = _on_each_device(model, on_device, (P(), ROWS, ROWS), (ROWS, ROWS, ROWS, P(None, *ROWS)))
    logprob, entropy, log_total, logits = run(kernel, states, tokens)
    return (logprob, entropy), (kernel, states, tokens, log_total, entropy, logits)


def _backward(
    model: Decoder, sampling: Sampling, residuals: PyTree, gradients: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    def on_device(kernel: Array, states: Array, tokens: Array, *arrays: Array) -> tuple[Array, Array]:
        *per_token, logits = arrays

        def chunk(kernel_gradient: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
            x, token, log_total, entropy, logprob_gradient, entropy_gradient, logits = part
            logits = _logits(model, x, kernel) if logits is None else logits
            logit_gradients, _ = token_logprobs_gradient(
                sampling, (logits, token, log_total, entropy), (logprob_gradient, entropy_gradient)
            )
            if cap := model.cfg.final_soft_cap:
                # The derivative of cap * tanh(x / cap). At tokens without probability it would be 0 x -inf.
                finite = hide_tokens(logits, model.cfg.hidden_tokens, 0.0)
                logit_gradients = logit_gradients * (1 - jnp.square(finite / cap))
            logit_gradients = logit_gradients.astype(model.cfg.dtype)
            # Sums over chunks, and over devices, are in float32.
            return kernel_gradient + _product(model, x.T, logit_gradients), _product(
                model, logit_gradients, kernel.T
            ).astype(x.dtype)

        zeros = jnp.zeros(kernel.shape, jnp.float32)
        parts = (*_chunks(model, kernel, states, tokens, *per_token), logits)
        kernel_gradient, state_gradients = jax.lax.scan(chunk, zeros, parts)
        return kernel_gradient[None], _joined(state_gradients, tokens)

    *residuals, logits = residuals
    run = _on_each_device(model, on_device, (P(), *(ROWS,) * 6, P(None, *ROWS)), (ROWS, ROWS))
    kernel_gradient, state_gradients = run(*residuals, *gradients, logits)
    return _summed(model, kernel_gradient), state_gradients, None


logprobs.defvjp(_forward, _backward)


def _product(model: Decoder, x: Array, y: Array) -> jax.Array:
    return jnp.matmul(x, y, precision=model.cfg.precision, preferred_element_type=jnp.float32)


def _logits(model: Decoder, states: Array, kernel: Array) -> jax.Array:
    return hide_tokens(soft_capped(_product(model, states, kernel), model.cfg.final_soft_cap), model.cfg.hidden_tokens)


def _chunks(model: Decoder, kernel: Array, *arrays: Array) -> tuple[jax.Array, ...]:
    """Splits arrays [B, N, T, ...] of a device into chunks of tokens [count, size, ...], padded at the end."""
    width, vocabulary = kernel.shape
    if model.mesh is not None and vocabulary % model.mesh.shape["tensor"] == 0:
        vocabulary //= model.mesh.shape["tensor"]
    n = math.prod(arrays[0].shape[:3])
    count = -(-n // tokens_at_once(width, vocabulary))
    size = -(-n // count)

    def split(x: Array) -> jax.Array:
        x = x.reshape(n, *x.shape[3:])
        return jnp.pad(x, [(0, count * size - n)] + [(0, 0)] * (x.ndim - 1)).reshape(count, size, *x.shape[1:])

    return tuple(split(x) for x in arrays)


def _joined(x: Array, like: Array) -> jax.Array:
    """Inverts `_chunks`: [count, size, ...] -> [B, N, T, ...], with the first axes of `like`."""
    return x.reshape(-1, *x.shape[2:])[: like.size].reshape(*like.shape, *x.shape[2:])


def _shared(model: Decoder) -> Mesh | None:
    """The mesh, if several of its devices have rows of the batch."""
    mesh = model.mesh
    return mesh if mesh is not None and sharding.prompt_shards(mesh) > 1 else None


def _on_each_device(model: Decoder, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Runs a function on the rows of each device. A vocabulary that is split over `tensor` is left to the compiler."""
    if (mesh := _shared(model)) is None:
        return run
    axes = {"data", "fsdp"}
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def _gathered(model: Decoder, kernel: Array) -> jax.Array:
    """Gathers a kernel [D, V] over fsdp, in the dtype of the products."""
    kernel = kernel.astype(model.cfg.dtype)
    if (mesh := _shared(model)) is None:
        return kernel
    # The columns stay split over tensor: only fsdp is gathered.
    columns = sharding.spec_for("head/kernel", kernel.shape, mesh)[1]
    return jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, P(None, columns)))


def _summed(model: Decoder, gradients: Array) -> jax.Array:
    """Sums the gradients [devices, D, V] -> [D, V], sharded as the kernel."""
    if (mesh := _shared(model)) is None:
        return gradients[0]
    rows, columns = sharding.spec_for("head/kernel", gradients.shape[1:], mesh)

    def on_device(gradient: Array) -> jax.Array:
        if rows is None:
            return jax.lax.psum(gradient[0], ("data", "fsdp"))
        return jax.lax.psum(jax.lax.psum_scatter(gradient[0], rows, tiled=True), "data")

    specs = P(*ROWS, None, columns), P(rows, columns)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    # The barrier makes XLA reduce in each micro-batch. Else it reduces once an update, and each device keeps the whole
    # sum.
    return jax.lax.optimization_barrier(run(gradients))
