"""The forward pass over completions: log-probabilities, entropies and values of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.algorithms.balance import ExpertLoad
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import head, microbatches
from jaxrl_llm.learner.microbatches import Microbatch
from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.models.decoder import Decoder, PackedRows, last_state
from jaxrl_llm.models.experts import Routing
from jaxrl_llm.structs import Array, Batch, PyTree

ScoreFn: TypeAlias = Callable[[PyTree, Batch], PyTree]  # (parameters, batch) -> one or more arrays [B, G, C]
# Advice if scoring or an update does not fit the memory.
REMEDY = "lower microbatch, or raise model.row_parts, or set model.remat = 'full'"


def score_packed_rows(
    model: Decoder,
    params: PyTree,
    batch: Batch,
    per_token: Callable[[Array, Array], PyTree],
    *,
    state_after: bool = False,
) -> tuple[PyTree, ExpertLoad | None]:
    """Computes values [B, G, C] of completion tokens in packed rows; 0 on padding. Each prompt runs once per group.

    Also returns the load of experts by the trained tokens, None if the model has no experts. Letters of shapes: B
    prompts, G completions of C tokens each, which are packed into N rows of T tokens; D width of hidden states.
    per_token(states [B, N, T, D], tokens [B, N, T]): returns the values [B, N, T] of the tokens in packed rows.
    state_after: whether `states` are the hidden states after the tokens; otherwise they are those before the tokens.
    If model.cfg.row_parts is above 1, only a part of the rows runs at a time, and runs again in the backward pass.
    """
    prompts, group_size, length = batch.completions.shape
    # index [B, N, T]: for each token of a packed row, its index among the G * C completion tokens of its prompt.
    if batch.packed_index is None:
        one_prompt = jnp.arange(group_size * length).reshape(1, group_size, length)
        index = jnp.broadcast_to(one_prompt, batch.completions.shape)
    else:
        index = batch.packed_index.reshape(prompts, -1, batch.packed_index.shape[-1])
    parts = min(model.cfg.row_parts, index.shape[1])

    def values_of_rows(first: Array, hidden: Array, rows: PackedRows) -> PyTree:
        return per_token(hidden if state_after else _states_before(first, hidden, rows), rows.tokens)

    if parts == 1:
        rows, collect = _packed_rows(batch, index), partial(_sum_load, _to_rows(batch.loss_mask, index))
        prompt_hidden, hidden, load = model.forward(params, batch.prompt, rows, collect)
        first = last_state(prompt_hidden, batch.prompt_mask)
        return _to_completions(values_of_rows(first, hidden, rows), index, batch), load
    prompt_hidden, prompt_cache = model.prefill(params, batch.prompt)
    # The gradients of these arrays are sums over the parts, which must happen in float32.
    first, prompt_cache = jax.tree.map(jnp.float32, (last_state(prompt_hidden, batch.prompt_mask), prompt_cache))

    def score_part(index: Array) -> tuple[PyTree, ExpertLoad | None]:
        """Scores a part of the rows of all prompts. index: index of the tokens in these rows."""
        rows, collect = _packed_rows(batch, index), partial(_sum_load, _to_rows(batch.loss_mask, index))
        cast_cache = jax.tree.map(lambda array: array.astype(model.cfg.dtype), prompt_cache)
        hidden, load = model.extend(params, cast_cache, batch.prompt, rows, collect)
        return values_of_rows(first, hidden, rows), load

    rows_of_part = -(-index.shape[1] // parts)
    index = jnp.pad(index, ((0, 0), (0, parts * rows_of_part - index.shape[1]), (0, 0)), constant_values=-1)
    index_by_part = jnp.swapaxes(index.reshape(prompts, parts, rows_of_part, -1), 0, 1)
    # The parts run one after the other, and again in the backward pass, so that only one of them is in memory.
    scored, loads = jax.lax.map(jax.checkpoint(score_part), index_by_part)
    scored = jax.tree.map(lambda values: jnp.swapaxes(values, 0, 1).reshape(index.shape), scored)
    return _to_completions(scored, index, batch), jax.tree.map(partial(jnp.sum, axis=0), loads)


def _packed_rows(batch: Batch, index: Array) -> PackedRows:
    """Returns the completions of a batch in packed rows, as the model reads them.

    index [B, N, T]: for each token of a row, its index among the completion tokens of its prompt; -1: padding.
    """
    length, width = batch.completions.shape[2], index.shape[2]
    segment_ids = jnp.where(_to_rows(batch.completion_mask, index), index // length + 1, 0)
    rows = PackedRows(_to_rows(batch.completions, index), jnp.where(index < 0, 0, index % length), segment_ids)
    if batch.tree is None:
        return rows
    first_place = jnp.arange(width)[None, None] - rows.positions  # place of each token's completion
    # The tree counts from the first token of its completion, and a packed row from its own first token.
    depths, previous, ends = (_to_rows(x, index) for x in (batch.tree.depths, batch.tree.previous, batch.tree.ends))
    previous, ends = jnp.maximum(first_place + previous, 0), jnp.where(index < 0, width, first_place + ends)
    return rows._replace(positions=depths, previous=previous, ends=ends)


def _to_rows(values: Array, index: Array) -> jax.Array:
    """Moves values [B, G, C] of completion tokens to packed rows [B, N, T]; 0 on padding."""

    def move(values: Array, index: Array) -> jax.Array:
        """Moves the values [G, C] of one prompt to its rows [N, T]."""
        return jnp.where(index < 0, 0, values.reshape(-1)[index])

    return jax.vmap(move)(values, index)


def _sum_load(trained: Array, routing: Routing) -> ExpertLoad:
    """Returns how a layer's router loads its experts, summed over the tokens for which `trained` is True."""
    experts, counted = routing.probabilities.shape[-1], trained.astype(bool).reshape(-1, 1)
    probabilities = jnp.where(counted, routing.probabilities.reshape(-1, experts), 0.0)
    chosen = jnp.where(counted, routing.chosen.reshape(len(counted), -1), experts)
    # A comparison counts the choices, because a scatter is slow on a TPU.
    choices = jnp.sum(chosen[..., None] == jnp.arange(experts)[None, None], axis=(0, 1), dtype=jnp.float32)
    entropy = -jnp.sum(jax.scipy.special.xlogy(probabilities, probabilities))
    tokens = jnp.sum(counted, dtype=jnp.float32)
    return ExpertLoad(tokens, choices, jnp.sum(probabilities, axis=0), jax.lax.stop_gradient(entropy))


def _states_before(first: Array, hidden: Array, rows: PackedRows) -> jax.Array:
    """Returns the hidden state [B, N, T, D] before each token of packed rows, which predicts the token.

    first [B, D]: last state of each prompt, which predicts token 0. hidden [B, N, T, D]: states after the tokens. Only
    this function of the package shifts by one.
    """
    if rows.previous is None:
        shifted = jnp.pad(hidden, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    else:
        # The states pass through float32, because the gradient of a state is a sum over the tokens that follow it.
        shifted = jnp.take_along_axis(hidden.astype(jnp.float32), rows.previous[..., None], axis=2)
    # `first` passes through float32, because its gradient is a sum over the group.
    first = first[:, None, None].astype(jnp.float32)
    return jnp.where((rows.positions == 0)[..., None], first, shifted.astype(jnp.float32)).astype(hidden.dtype)


def _to_completions(values: PyTree, index: Array, batch: Batch) -> PyTree:
    """Moves values per token from packed rows [B, N, T] to completions [B, G, C]; 0 on padding."""
    mask, tokens_of_prompt = batch.completion_mask, batch.completions[0].size

    def move(values: Array, index: Array) -> jax.Array:
        """Moves the values [N, T] of one prompt's rows to its completion tokens [G * C]."""
        # Padding gets an index out of range, which mode="drop" skips.
        place = jnp.where(index < 0, tokens_of_prompt, index)
        return jnp.zeros(tokens_of_prompt).at[place].set(values, mode="drop")

    def move_all(values: Array) -> jax.Array:
        return jnp.where(mask, jax.vmap(move)(values, index).reshape(mask.shape), 0.0)

    return jax.tree.map(move_all, values)


def completion_logprobs(
    model: Decoder, params: PyTree, batch: Batch, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probabilities and entropies [B, G, C] of completion tokens; 0 on padding."""
    return completion_logprobs_and_load(model, params, batch, sampling)[0]


def completion_logprobs_and_load(
    model: Decoder, params: PyTree, batch: Batch, sampling: Sampling
) -> tuple[tuple[jax.Array, jax.Array], ExpertLoad | None]:
    """Returns (log-probabilities, entropies) [B, G, C] of completion tokens, and the load of experts by trained tokens.

    The load is None if the model has no experts.
    """
    kernel = model.head_kernel(params)

    def scores(states: Array, tokens: Array) -> tuple[jax.Array, jax.Array]:
        """Returns log-probabilities and entropies [B, N, T] of tokens in packed rows."""
        scored: Any = head.logprobs(model, sampling, kernel, states, tokens)
        logprob, entropy = scored
        for hidden_token in model.cfg.hidden_tokens:
            # The policy never samples a hidden token, but an environment may write it. Its log-probability of -inf
            # would make a ratio NaN.
            logprob = jnp.where(tokens == hidden_token, 0.0, logprob)
        return logprob, entropy

    return score_packed_rows(model, params, batch, scores)


def completion_values(model: Decoder, params: PyTree, batch: Batch, *, state_after: bool = False) -> jax.Array:
    """Returns the values [B, G, C] of the texts before each completion token; 0 on padding.

    params: {"decoder": parameters of `model`, "readout": {"kernel": [D, 1], "bias": [1]}}. state_after: whether the
    text of a value includes its token.
    """
    readout = params["readout"]

    def values(states: Array, tokens: Array) -> jax.Array:
        flat = states.reshape(-1, states.shape[-1]).astype(jnp.float32)
        # The precision is HIGHEST, because accelerators round the factors of a float32 product to bfloat16 or TF32.
        value = jnp.matmul(flat, readout["kernel"], precision=jax.lax.Precision.HIGHEST) + readout["bias"][None]
        return value.reshape(tokens.shape)

    return score_packed_rows(model, params["decoder"], batch, values, state_after=state_after)[0]


def score_in_microbatches(per_token: Callable[[PyTree, Batch], PyTree], mesh: Mesh, microbatch: int) -> ScoreFn:
    """Returns `per_token`, jitted and run on `microbatch` prompts at a time (0 = all prompts).

    per_token(params, batch): returns one or more arrays [B, G, C].
    """
    place = NamedSharding(mesh, sharding.BATCH)

    # The output shardings are explicit for the reason of `make_credit`: the update reads these arrays too.
    @partial(jax.jit, compiler_options=ROUND_AS_WRITTEN, out_shardings=place)
    def score(params: PyTree, batch: Batch) -> PyTree:
        # `map_reduce` traces a visit twice. As a jitted function, `per_token` is traced only once, and then inlined.
        run = jax.jit(per_token, inline=True)

        def visit(part: Microbatch) -> PyTree:
            return jax.lax.with_sharding_constraint(part.spread(run(params, part.batch)), place)

        return microbatches.map_reduce(batch, visit, microbatch=microbatch, mesh=mesh)

    return score


def make_logprob_fn(model: Decoder, sampling: Sampling, mesh: Mesh, microbatch: int) -> ScoreFn:
    """Returns `score(params, batch)` -> log-probabilities [B, G, C]. It computes no gradients."""

    def logprobs(params: PyTree, batch: Batch) -> jax.Array:
        return completion_logprobs(model, params, batch, sampling)[0]

    return score_in_microbatches(logprobs, mesh, microbatch)
