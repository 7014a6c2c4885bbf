"""Scoring and updating: the only code under jax.grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm import sharding
from jaxrl_llm.kl import k3
from jaxrl_llm.losses import LossFn, Metrics, aggregation_weights
from jaxrl_llm.models.decoder import Decoder, last_state
from jaxrl_llm.sampling import Sampling, token_logprobs
from jaxrl_llm.structs import Array, Batch, PyTree, TrainState

Objective: TypeAlias = Callable[[PyTree, Batch, Array], tuple[Array, Metrics]]

LOGITS_AT_ONCE = 2**25  # elements of the largest logits array that a device holds: 128 MiB in float32


def completion_logprobs(
    model: Decoder, params: PyTree, batch: Batch, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy [B, G, C] of every completion token, 0 on padding.

    The one place of the shift by one: token t is predicted by the hidden state before
    it, token 0 by the prompt's last. A prompt is run once for its group. Logits are made
    for a few tokens at a time, and again in the backward pass.
    """
    b, g, c = batch.completions.shape
    slots = jnp.arange(g * c).reshape(1, g, c) if batch.slots is None else batch.slots
    slots = jnp.broadcast_to(slots, (b, *slots.shape[1:]))
    in_lanes = jax.vmap(lambda x, at: jnp.where(at < 0, 0, x.reshape(-1)[at]))
    tokens = in_lanes(batch.completions, slots)
    members = jnp.where(in_lanes(batch.completion_mask, slots), slots // c + 1, 0)
    positions = jnp.where(slots < 0, 0, slots % c)
    prompt_hidden, hidden = model.forward(params, batch.prompts, batch.prompt_mask, tokens, positions, members)
    before = jnp.pad(hidden, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    first = last_state(prompt_hidden, batch.prompt_mask)[:, None, None]
    states = jnp.where((positions == 0)[..., None], first, before)

    def head(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return token_logprobs(model.logits(params, part[0]), part[1], sampling)

    devices = 1 if model.mesh is None else model.mesh.shape["data"] * model.mesh.shape["fsdp"]
    size = min(max(LOGITS_AT_ONCE * devices // (b * slots.shape[1] * model.cfg.vocab_size), 1), slots.shape[2])
    count = -(-slots.shape[2] // size)
    parts = [_chunks(x, count, size) for x in (states, tokens)]
    if count > 1:  # a single chunk may as well be kept for the backward pass
        head = jax.checkpoint(head, policy=jax.checkpoint_policies.save_only_these_names("log_total", "entropy"))
    in_order = jax.vmap(lambda x, at: jnp.zeros(g * c).at[jnp.where(at < 0, g * c, at)].set(x, mode="drop"))
    joined = (_joined(x, slots.shape[2]) for x in jax.lax.map(head, tuple(parts)))
    logprobs, entropy = (in_order(x, slots).reshape(b, g, c) for x in joined)
    return jnp.where(batch.completion_mask, logprobs, 0.0), jnp.where(batch.completion_mask, entropy, 0.0)


def _chunks(x: Array, count: int, size: int) -> jax.Array:
    """[B, G, C, ...] -> [count, B, G, size, ...], padded at the end."""
    pad = [(0, 0)] * x.ndim
    pad[2] = (0, count * size - x.shape[2])
    x = jnp.pad(x, pad)
    return jnp.moveaxis(x.reshape(*x.shape[:2], count, size, *x.shape[3:]), 2, 0)


def _joined(x: Array, length: int) -> jax.Array:
    """The inverse of `_chunks` for per-token arrays: [count, B, G, size] -> [B, G, length]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1)[:, :, :length]


def _split(tree: PyTree, parts: int) -> PyTree:
    """[B, ...] -> [parts, B / parts, ...], strided so that every device keeps its own rows."""
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), tree)


def _parts(prompts: int, microbatch: int) -> int:
    return prompts // microbatch if microbatch else 1


def make_score(model: Decoder, sampling: Sampling, mesh: Mesh, microbatch: int) -> Callable[[PyTree, Batch], jax.Array]:
    """`score(params, batch) -> logprobs [B, G, C]`, jitted, without gradients."""

    @jax.jit
    def score(params: PyTree, batch: Batch) -> jax.Array:
        parts = _split(batch, _parts(batch.prompts.shape[0], microbatch))
        logprobs = jax.lax.map(lambda part: completion_logprobs(model, params, part, sampling)[0], parts)
        joined = jnp.swapaxes(logprobs, 0, 1).reshape(batch.completions.shape)
        return jax.lax.with_sharding_constraint(joined, NamedSharding(mesh, sharding.BATCH))

    return score


def policy_objective(
    model: Decoder,
    loss_fn: LossFn,
    sampling: Sampling,
    kl: Callable[[Array, Array], Array] | None = None,
    kl_coef: optax.Schedule = lambda step: 0.0,
) -> Objective:
    """`objective(params, batch, step)` -> per-token loss and metrics: loss_fn + kl_coef(step) * kl.

    kl is an estimator of `jaxrl_llm.kl`, or None where the loss has no such term.
    """

    def objective(params: PyTree, batch: Batch, step: Array) -> tuple[Array, Metrics]:
        logprobs, entropy = completion_logprobs(model, params, batch, sampling)
        loss, metrics = loss_fn(logprobs, batch)
        metrics |= {"loss/policy": loss, "entropy": entropy}
        if batch.sampler_logprobs is not None:
            gap = jnp.where(batch.loss_mask, jnp.abs(logprobs - batch.sampler_logprobs), 0.0)
            metrics |= {"sampler/gap_mean": gap, "sampler/gap_max": gap}
        if batch.ref_logprobs is not None:
            metrics |= {"kl/ref": k3(logprobs, batch.ref_logprobs)}
        if kl is not None:
            term = kl_coef(step) * kl(logprobs, batch.ref_logprobs)
            loss = loss + term
            metrics |= {"loss/kl": term}
        return loss, metrics

    return objective


def make_update_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    state_shardings: TrainState,
    *,
    microbatch: int,
    aggregate: Callable[[Array], Array],
) -> Callable[[TrainState, Batch, Array], tuple[TrainState, Metrics]]:
    """`update_step(state, batch, rows) -> state, metrics`: one optimiser step on batch[rows].

    Jitted over the mesh, the state donated, micro-batches of `microbatch` prompts (0: all
    at once) scanned: any value gives the same gradient to rounding. aggregate maps the loss
    mask to weights, as `aggregation_weights` does. Metrics are means over the trained tokens
    of the whole update; those named *_max are maxima.
    """

    def update_step(state: TrainState, batch: Batch, rows: Array) -> tuple[TrainState, Metrics]:
        place = NamedSharding(mesh, sharding.BATCH)
        batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[rows], place), batch)
        weights = aggregate(batch.loss_mask)
        shares = aggregation_weights(batch.loss_mask, mode="token_mean")

        def loss(params: PyTree, part: Batch, weights: Array, shares: Array) -> tuple[Array, Metrics]:
            per_token, metrics = objective(params, part, state.step)
            total = jnp.sum(jnp.where(part.loss_mask, per_token * weights, 0.0))
            return total, {name: reduce(name, x, shares) for name, x in metrics.items()} | {"loss/total": total}

        def accumulate(grads: PyTree, part: tuple[Batch, Array, Array]) -> tuple[PyTree, Metrics]:
            more, metrics = jax.grad(loss, has_aux=True)(state.params, *part)
            return jax.tree.map(jnp.add, grads, more), metrics

        count = _parts(rows.shape[0], microbatch)
        if count == 1:
            grads, metrics = jax.grad(loss, has_aux=True)(state.params, batch, weights, shares)
        else:
            zeros = jax.tree.map(jnp.zeros_like, state.params)
            grads, parts = jax.lax.scan(accumulate, zeros, _split((batch, weights, shares), count))
            metrics = {k: jnp.max(v) if k.endswith("_max") else jnp.sum(v) for k, v in parts.items()}

        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"grad_norm": optax.global_norm(grads), "update_norm": optax.global_norm(updates)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(update_step, donate_argnums=0, out_shardings=(state_shardings, None))


def reduce(name: str, values: Array, shares: Array) -> jax.Array:
    """A per-token metric [B, G, C] as this part's term of the mean, or its maximum, over trained tokens."""
    if name.endswith("_max"):
        return jnp.max(jnp.where(shares > 0, values, -jnp.inf))
    return jnp.sum(jnp.where(shares > 0, values * shares, 0.0))


def init_state(params: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh) -> tuple[TrainState, TrainState]:
    """A TrainState at step 0, the optimiser's part made already sharded, and the shardings of the whole."""
    shapes = jax.eval_shape(lambda p: TrainState(jnp.int32(0), p, optimizer.init(p)), params)
    placed = sharding.shardings(shapes, mesh)
    opt_state = jax.jit(optimizer.init, out_shardings=placed.opt_state)(params)
    step = jax.device_put(jnp.int32(0), placed.step)
    return TrainState(step, params, opt_state), placed
