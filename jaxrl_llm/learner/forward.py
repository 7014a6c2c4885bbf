"""The forward pass over completions: log-probabilities, entropies and values of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm import sharding
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.learner import head
from jaxrl_llm.models.decoder import Decoder, last_state
from jaxrl_llm.structs import Array, Batch, PyTree

ScoreFn: TypeAlias = Callable[[PyTree, Batch], PyTree]


KNOBS = "microbatch, or set model.remat = 'full'"  # config fields with which scoring and updates need less memory


def completion_states(model: Decoder, params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes, in packed rows, the state before each token [B, N, T, D], the tokens and their index [B, N, T].

    Only this function shifts by one: the hidden state before token t predicts it. For token 0, this is the last state
    of the prompt. Each prompt runs once for its group.
    """
    b, g, c = batch.completions.shape
    index = jnp.arange(g * c).reshape(1, g, c) if batch.packed_index is None else batch.packed_index
    index = jnp.broadcast_to(index, (b, *index.shape[1:]))
    in_rows = jax.vmap(lambda x, at: jnp.where(at < 0, 0, x.reshape(-1)[at]))
    tokens = in_rows(batch.completions, index)
    segment_ids = jnp.where(in_rows(batch.completion_mask, index), index // c + 1, 0)
    positions = jnp.where(index < 0, 0, index % c)
    prompt_hidden, hidden = model.forward(params, batch.prompts, batch.prompt_mask, tokens, positions, segment_ids)
    before = jnp.pad(hidden, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    first = last_state(prompt_hidden, batch.prompt_mask)[:, None, None]
    # Through float32, because the gradient of `first` is a sum over the group.
    states = jnp.where((positions == 0)[..., None], first.astype(jnp.float32), before.astype(jnp.float32))
    return states.astype(hidden.dtype), tokens, index


def _in_order(x: Array, index: Array, batch: Batch) -> jax.Array:
    """Moves per-token values from rows [B, N, T] to completions [B, G, C]; 0 on padding."""
    size = batch.completions[0].size
    # Padding gets an index out of range, which mode="drop" skips.
    place = jax.vmap(lambda x, at: jnp.zeros(size).at[jnp.where(at < 0, size, at)].set(x, mode="drop"))
    return jnp.where(batch.completion_mask, place(x, index).reshape(batch.completions.shape), 0.0)


def completion_logprobs(
    model: Decoder, params: PyTree, batch: Batch, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probability and entropy [B, G, C] of each completion token; 0 on padding."""
    states, tokens, index = completion_states(model, params, batch)
    scored = head.logprobs(model, sampling, model.head_kernel(params), states, tokens)
    return jax.tree.map(lambda x: _in_order(x, index, batch), scored)


def completion_values(model: Decoder, params: PyTree, batch: Batch) -> jax.Array:
    """Returns the critic's value [B, G, C] of the text before each completion token; 0 on padding.

    params: {"decoder": parameters of `model`, "readout": {"kernel": [D, 1], "bias": [1]}}.
    """
    states, _, index = completion_states(model, params["decoder"], batch)
    readout = params["readout"]
    flat = states.reshape(-1, states.shape[-1]).astype(jnp.float32)
    # By default, accelerators round the factors of a float32 product to bfloat16 or TF32.
    values = jnp.matmul(flat, readout["kernel"], precision=jax.lax.Precision.HIGHEST) + readout["bias"][None]
    return _in_order(values.reshape(index.shape), index, batch)


def in_microbatches(per_token: Callable[[PyTree, Batch], PyTree], mesh: Mesh, microbatch: int) -> ScoreFn:
    """Returns a jitted `per_token` that takes `microbatch` prompts at a time (0: all at once).

    `per_token(params, batch)` returns one or more arrays [B, G, C].
    """

    @partial(jax.jit, compiler_options=ROUND_AS_WRITTEN)
    def score(params: PyTree, batch: Batch) -> PyTree:
        parts = split_batch(batch, count_parts(batch.prompts.shape[0], microbatch))
        scored = jax.lax.map(lambda part: per_token(params, part), parts)
        joined = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(batch.completions.shape), scored)
        return jax.lax.with_sharding_constraint(joined, NamedSharding(mesh, sharding.BATCH))

    return score


def make_logprob_fn(model: Decoder, sampling: Sampling, mesh: Mesh, microbatch: int) -> ScoreFn:
    """Returns `score(params, batch)` -> log-probabilities [B, G, C], without gradients."""
    return in_microbatches(lambda params, x: completion_logprobs(model, params, x, sampling)[0], mesh, microbatch)


def split_batch(tree: PyTree, parts: int) -> PyTree:
    """Splits [B, ...] into [parts, B / parts, ...] with a stride, so that each device keeps its own rows."""
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), tree)


def count_parts(prompts: int, microbatch: int) -> int:
    return prompts // microbatch if microbatch else 1
