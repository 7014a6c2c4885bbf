"""Log-probabilities and entropies of the tokens of a micro-batch, from the hidden states before the tokens.

The logits of all tokens would take too much memory. So the head runs on one chunk of tokens at a time, and the backward
pass computes the logits again. Each device runs its own tokens. It gathers the kernel once before the chunks and
reduces the kernel's gradient once after them, because the compiler alone would do both in every chunk.
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

ROWS_SPEC = sharding.BATCH  # sharding of arrays [B, ...], whose rows are split over the devices
# Logits that a device holds at a time if the kernel is small. In float32 they take 128 MiB.
LOGITS_AT_ONCE = 2**25


def tokens_at_once(width: int, vocabulary: int) -> int:
    """Returns the most tokens of a chunk, for a kernel [D, V] on a device. width: D; vocabulary: V.

    Each chunk reads the kernel, and reads and writes the kernel's float32 gradient. With a few hundred tokens this
    takes longer than the products, so chunks have at least D / 2 tokens. Their logits take half of that gradient's
    memory.
    """
    return max(LOGITS_AT_ONCE // vocabulary, width // 2, 1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def logprobs(
    model: Decoder, sampling: Sampling, kernel: Array, states: Array, tokens: Array
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probability and entropy [B, N, T] of tokens [B, N, T]: B prompts, N rows of T tokens each.

    states: hidden states before the tokens [B, N, T, D]. kernel: kernel of the model's head [D, V].
    """
    return _forward(model, sampling, kernel, states, tokens)[0]


def _forward(model: Decoder, sampling: Sampling, kernel: Array, states: Array, tokens: Array) -> tuple[Any, PyTree]:
    """Returns the result of `logprobs`, and the arrays that the backward pass needs."""

    def on_device(kernel: Array, states: Array, tokens: Array) -> tuple[Any, ...]:
        """Runs the head on the tokens of one device, chunk by chunk."""
        chunks = _chunks(model, kernel, states, tokens)
        chunk_count = len(chunks[0])

        def score_chunk(chunk: tuple[Array, Array]) -> PyTree:
            chunk_states, chunk_tokens = chunk
            logits = _logits(model, chunk_states, kernel)
            (logprob, entropy), (*_, log_total, _) = token_logprobs_and_residuals(logits, chunk_tokens, sampling)
            # The logits of a single chunk are few, so the backward pass uses them again.
            return (logprob, entropy, log_total), logits if chunk_count == 1 else None

        scored, logits = jax.lax.map(score_chunk, chunks)
        return *(_join_chunks(x, tokens) for x in scored), logits

    kernel = _gather_kernel(model, kernel)
    run = _on_each_device(
        model, on_device, (P(), ROWS_SPEC, ROWS_SPEC), (ROWS_SPEC, ROWS_SPEC, ROWS_SPEC, P(None, *ROWS_SPEC))
    )
    logprob, entropy, log_total, logits = run(kernel, states, tokens)
    return (logprob, entropy), (kernel, states, tokens, log_total, entropy, logits)


def _backward(
    model: Decoder, sampling: Sampling, residuals: PyTree, gradients: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    """Returns the gradients of the loss in the head's kernel and in the states; tokens have no gradient.

    residuals: second result of `_forward`. gradients: gradients of the loss in log-probabilities and entropies.
    """

    def on_device(kernel: Array, states: Array, tokens: Array, *arrays: Array) -> tuple[Array, Array]:
        """Computes the gradients from the tokens of one device, chunk by chunk."""
        *per_token, logits = arrays

        def add_chunk(kernel_gradient: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
            """Returns the sum of kernel gradients with that of this chunk, and the gradients of the chunk's states."""
            chunk_states, token, log_total, entropy, logprob_gradient, entropy_gradient, logits = chunk
            logits = _logits(model, chunk_states, kernel) if logits is None else logits
            logit_gradients, _ = token_logprobs_gradient(
                sampling, (logits, token, log_total, entropy), (logprob_gradient, entropy_gradient)
            )
            if cap := model.cfg.final_soft_cap:
                # The factor is the derivative of cap * tanh(x / cap). Logits of -inf are set to 0, because the product
                # with them would be NaN.
                finite = hide_tokens(logits, model.cfg.hidden_tokens, 0.0)
                logit_gradients = logit_gradients * (1 - jnp.square(finite / cap))
            logit_gradients = logit_gradients.astype(model.cfg.dtype)
            # The kernel's gradient is summed over chunks and devices in float32, because it has many summands.
            kernel_gradient = kernel_gradient + _product(model, chunk_states.T, logit_gradients)
            state_gradients = _product(model, logit_gradients, kernel.T).astype(chunk_states.dtype)
            return kernel_gradient, state_gradients

        zeros = jnp.zeros(kernel.shape, jnp.float32)
        chunks = (*_chunks(model, kernel, states, tokens, *per_token), logits)
        kernel_gradient, state_gradients = jax.lax.scan(add_chunk, zeros, chunks)
        return kernel_gradient[None], _join_chunks(state_gradients, tokens)

    *residuals, logits = residuals
    run = _on_each_device(model, on_device, (P(), *(ROWS_SPEC,) * 6, P(None, *ROWS_SPEC)), (ROWS_SPEC, ROWS_SPEC))
    kernel_gradient, state_gradients = run(*residuals, *gradients, logits)
    return _sum_gradients(model, kernel_gradient), state_gradients, None


logprobs.defvjp(_forward, _backward)


def _product(model: Decoder, x: Array, y: Array) -> jax.Array:
    """Returns a matrix product with the model's precision, in float32."""
    return jnp.matmul(x, y, precision=model.cfg.precision, preferred_element_type=jnp.float32)


def _logits(model: Decoder, states: Array, kernel: Array) -> jax.Array:
    """Returns the logits [..., V] of states [..., D]; -inf for tokens that the model never samples."""
    return hide_tokens(soft_capped(_product(model, states, kernel), model.cfg.final_soft_cap), model.cfg.hidden_tokens)


def _chunks(model: Decoder, kernel: Array, *arrays: Array) -> tuple[jax.Array, ...]:
    """Splits arrays [B, N, T, ...] of a device into chunks of tokens [chunks, tokens of a chunk, ...].

    The first three axes are prompts, rows and tokens. The last chunk is padded.
    """
    width, vocabulary = kernel.shape
    if model.mesh is not None and vocabulary % model.mesh.shape["tensor"] == 0:
        vocabulary //= model.mesh.shape["tensor"]
    token_count = math.prod(arrays[0].shape[:3])
    chunk_count = -(-token_count // tokens_at_once(width, vocabulary))  # rounded up
    chunk_size = -(-token_count // chunk_count)
    padding = chunk_count * chunk_size - token_count

    def split(array: Array) -> jax.Array:
        by_token = array.reshape(token_count, *array.shape[3:])
        padded = jnp.pad(by_token, [(0, padding)] + [(0, 0)] * (by_token.ndim - 1))
        return padded.reshape(chunk_count, chunk_size, *by_token.shape[1:])

    return tuple(split(array) for array in arrays)


def _join_chunks(chunks: Array, tokens: Array) -> jax.Array:
    """Joins chunks [chunks, tokens of a chunk, ...] of `_chunks` to one array [B, N, T, ...], without the padding.

    tokens: array whose shape is [B, N, T], for prompts, rows and tokens.
    """
    by_token = chunks.reshape(-1, *chunks.shape[2:])[: tokens.size]
    return by_token.reshape(*tokens.shape, *chunks.shape[2:])


def _batch_mesh(model: Decoder) -> Mesh | None:
    """Returns the model's mesh if several of its devices have rows of the batch, otherwise None."""
    mesh = model.mesh
    return mesh if mesh is not None and sharding.prompt_shards(mesh) > 1 else None


def _on_each_device(model: Decoder, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns a function that applies `run` on each device to the rows of this device.

    A vocabulary that is split over the mesh axis `tensor` is left to the compiler. in_specs, out_specs: shardings of
    the arguments and results.
    """
    if (mesh := _batch_mesh(model)) is None:
        return run
    axes = {"data", "fsdp"}
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def _gather_kernel(model: Decoder, kernel: Array) -> jax.Array:
    """Gathers the head's kernel [D, V] from the devices of the mesh axis fsdp, in the dtype of the products."""
    kernel = kernel.astype(model.cfg.dtype)
    if (mesh := _batch_mesh(model)) is None:
        return kernel
    # The kernel is gathered over fsdp only; its columns stay split over tensor.
    columns = sharding.spec_for("head/kernel", kernel.shape, mesh)[1]
    return jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, P(None, columns)))


def _sum_gradients(model: Decoder, gradients: Array) -> jax.Array:
    """Sums the kernel gradients of all devices [devices, D, V] to [D, V], sharded as the kernel."""
    if (mesh := _batch_mesh(model)) is None:
        return gradients[0]
    rows, columns = sharding.spec_for("head/kernel", gradients.shape[1:], mesh)

    def on_device(gradient: Array) -> jax.Array:
        if rows is None:
            return jax.lax.psum(gradient[0], ("data", "fsdp"))
        return jax.lax.psum(jax.lax.psum_scatter(gradient[0], rows, tiled=True), "data")

    specs = P(*ROWS_SPEC, None, columns), P(rows, columns)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    # The barrier makes XLA reduce in each micro-batch. Otherwise XLA reduces once per update, and each device holds the
    # sum of all rows until then.
    return jax.lax.optimization_barrier(run(gradients))
