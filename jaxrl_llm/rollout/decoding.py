"""The jitted functions of the in-JAX sampler: the prompts' forward pass, and the decode loop.

The decode loop copies the completions of a plan into a smaller batch (`take`), samples a token of each at a time, and
writes back what it has sampled (`write_back`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.algorithms.sampling import Sampling, draw, log_distribution, support
from jaxrl_llm.machine import sharding
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.decoder import Decoder, last_state
from jaxrl_llm.rollout.compaction import CompactionPlan, Slots
from jaxrl_llm.structs import Array, PyTree


@dataclass(frozen=True)
class Decoding:
    """The static values of a batch. The compiled programs depend on them."""

    batch: int  # prompts that have a KV cache at once
    all_prompts: int  # prompts of the call; they take turns
    group: int  # completions of each prompt
    sampling: Sampling
    length: int  # largest number of tokens in a completion
    stop_ids: tuple[int, ...]
    pad_id: int
    mesh: Mesh

    @property
    def devices(self) -> int:
        """Number of devices that share the prompts."""
        return sharding.prompt_shards(self.mesh)

    @property
    def full_size(self) -> tuple[int, int]:
        """Entries of a device and their width, if every completion has a slot."""
        return self.batch // self.devices, self.group


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The state of a batch in decoding."""

    alive: Array  # [B, G] bool
    number: Array  # [B, G] of the completion in the whole batch
    max_tokens: Array  # [B, G] token limit of the completion
    tokens: Array  # [B, G, C] sampled until now
    logprobs: Array  # [B, G, C]
    length: Array  # [B, G] number of sampled tokens
    prompt_mask: Array  # [B, P]
    prefix: list[KeyValue]  # per layer, prompt keys and values [B, K, P, h]
    # Per layer, completion keys and values [B, K, G, S, h]. S is C, or the capacity of a smaller batch.
    cache: list[KeyValue]


class Loop(NamedTuple):
    """The carry of the decode loop, over N entries of W slots."""

    t: Array  # index of the next token, the same for all completions
    token: Array  # [N, W] token t - 1
    alive: Array
    tokens: Array
    logprobs: Array
    length: Array
    cache: list[KeyValue]


def choose(logits: Array, uniform: Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Samples tokens [...] and their log-probabilities from logits [..., V] and uniform numbers [..., 2]."""
    if sampling.temperature > 0:
        return draw(support(logits, sampling), uniform)
    # Greedy: the first of equal logits, in every program and on every device.
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logprobs = log_distribution(logits, sampling)
    return token, jnp.take_along_axis(logprobs, token[..., None], axis=-1)[..., 0]


def _uniform(key: Array, t: Array | int, total: int) -> jax.Array:
    """Uniform numbers [total, 2] for token t. Row m belongs to completion m, whatever slot compaction gives it."""
    return jax.random.uniform(jax.random.fold_in(key, t), (total, 2))


def _ended(token: Array, stop_ids: tuple[int, ...]) -> jax.Array:
    return jnp.any(token[..., None] == jnp.asarray(stop_ids, jnp.int32)[None, None], axis=-1)


def start(
    model: Decoder,
    fixed: Decoding,
    params: PyTree,
    prompts: Array,
    prompt_mask: Array,
    number: Array,
    max_tokens: Array,
    key: Array,
) -> DecodeState:
    """Prefills prompts [B, P] and samples the first token of each completion."""
    batch, group, length, sampling = fixed.batch, fixed.group, fixed.length, fixed.sampling
    hidden, prefix = model.prefill(params, prompts, prompt_mask)
    logits = model.logits(params, last_state(hidden, prompt_mask))
    uniform = jnp.take(_uniform(key, 0, fixed.all_prompts * group), number, axis=0)
    # A group shares its logits.
    each = jax.vmap(partial(choose, sampling=sampling), in_axes=(None, 1), out_axes=1)
    token, logprob = each(logits, uniform)
    tokens = jnp.full((batch, group, length), fixed.pad_id, jnp.int32).at[:, :, 0].set(token)
    logprobs = jnp.zeros((batch, group, length), jnp.float32).at[:, :, 0].set(logprob)
    cfg = model.cfg
    shape = (batch, cfg.kv_heads, group, length, cfg.head_dim)
    cache = [KeyValue(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype)) for _ in range(cfg.layers)]
    return DecodeState(
        alive=~_ended(token, fixed.stop_ids) & (max_tokens > 1),
        number=number,
        max_tokens=max_tokens,
        tokens=tokens,
        logprobs=logprobs,
        length=jnp.ones((batch, group), jnp.int32),
        prompt_mask=prompt_mask,
        prefix=prefix,
        cache=cache,
    )


def run(
    model: Decoder,
    fixed: Decoding,
    slots: Slots,
    params: PyTree,
    state: DecodeState,
    t: Array,
    key: Array,
    plan: CompactionPlan,
) -> tuple[DecodeState, Array]:
    """Decodes the completions of `plan` from token t on, in a smaller batch of shape `slots`.

    It ends when the KV cache is full, all completions have ended, or the living fit into `plan.below` on every device.
    """
    slot_state, total = take(fixed, slots, state, plan), fixed.all_prompts * fixed.group
    entries, width = plan.below
    prompts = fixed.batch // fixed.devices
    serves = plan.prompt[..., None] == jnp.arange(prompts)[None, None]  # [d, n, p]
    # Token t needs the keys of tokens 0 .. t - 1, so a cache of S entries is enough for token S.
    end_token = min(fixed.length, slots.capacity + 1)

    def go_on(loop: Loop) -> Array:
        living = jnp.sum(loop.alive, axis=1).reshape(fixed.devices, -1)
        # By prompt and not by entry: completions of a prompt that are now in two entries may fit into one.
        each = jnp.einsum("dnp,dn->dp", serves.astype(jnp.int32), living)
        crowded = jnp.any(jnp.sum((each + width - 1) // width, axis=1) > entries)
        return (loop.t < end_token) & jnp.any(loop.alive) & crowded

    def step(loop: Loop) -> Loop:
        prompt = slot_state.prefix, slot_state.prompt_mask
        hidden, cache = model.decode(params, loop.token, loop.t - 1, loop.cache, *prompt)
        # Numbers of all completions are drawn, and each takes its own: a token does not depend on compaction.
        uniform = jnp.take(_uniform(key, loop.t, total), slot_state.number, axis=0)
        token, logprob = choose(model.logits(params, hidden), uniform, fixed.sampling)
        at_t = partial(jax.lax.dynamic_update_index_in_dim, index=loop.t, axis=2)
        before = partial(jax.lax.dynamic_index_in_dim, index=loop.t, axis=2, keepdims=False)
        return Loop(
            t=loop.t + 1,
            token=token,
            alive=loop.alive & ~_ended(token, fixed.stop_ids) & (loop.t + 1 < slot_state.max_tokens),
            # A completion that has ended still computes: its row writes back what it read.
            tokens=at_t(loop.tokens, jnp.where(loop.alive, token, before(loop.tokens))),
            logprobs=at_t(loop.logprobs, jnp.where(loop.alive, logprob, 0.0)),
            length=loop.length + loop.alive,
            cache=cache,
        )

    token = jax.lax.dynamic_index_in_dim(slot_state.tokens, t - 1, axis=2, keepdims=False)
    begin = {name: getattr(slot_state, name) for name in ("alive", "tokens", "logprobs", "length", "cache")}
    end = jax.lax.while_loop(go_on, step, Loop(t=t, token=token, **begin))
    loop_fields = {name: getattr(end, name) for name in begin}
    return write_back(fixed, slots, state, replace(slot_state, **loop_fields), plan), end.t


WRITTEN = ("alive", "tokens", "logprobs", "length")  # what the decode loop writes for each completion, with the cache


def take(fixed: Decoding, slots: Slots, state: DecodeState, plan: CompactionPlan) -> DecodeState:
    """Copies what a plan names into a smaller batch of N = d n entries of W slots. The whole batch is not copied."""
    # Attention reads every place of a cache, filled or not, so a short one costs less.
    cache = jax.tree.map(lambda x: x[:, :, :, : slots.capacity], state.cache)
    if slots[:2] == fixed.full_size:
        return replace(state, cache=cache)
    group, last = fixed.group, fixed.batch // fixed.devices * fixed.group - 1
    # An empty slot reads any completion.
    source = jnp.minimum(plan.completion, last)

    def entries_of(x: Array) -> Array:
        return _by_device(fixed, lambda x, prompt: x[prompt], x, plan.prompt)

    def slots_of(x: Array) -> Array:
        return _by_device(fixed, lambda x, at: x[at // group, at % group], x, source)

    def cache_slots_of(x: Array) -> Array:
        return _by_device(fixed, lambda x, at: jnp.moveaxis(x[at // group, :, at % group], 1, 2), x, source)

    heads = NamedSharding(fixed.mesh, sharding.heads_spec(state.cache[0].keys.shape[1], fixed.mesh))
    # Left to itself, the compiler would gather the caches of all devices for the copy.
    layers = jax.tree.map(entries_of, state.prefix), jax.tree.map(cache_slots_of, cache)
    prefix, cache = jax.lax.with_sharding_constraint(layers, heads)
    arrays = {name: slots_of(getattr(state, name)) for name in ("number", "max_tokens", *WRITTEN)}
    arrays["alive"] &= (plan.completion <= last).reshape(arrays["alive"].shape)
    return DecodeState(**arrays, prompt_mask=entries_of(state.prompt_mask), prefix=prefix, cache=cache)


def write_back(
    fixed: Decoding, slots: Slots, state: DecodeState, smaller: DecodeState, plan: CompactionPlan
) -> DecodeState:
    """Writes a smaller batch back to where `take` has it from. Drops the empty slots."""
    if slots[:2] == fixed.full_size:
        write = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, 0, 3)  # noqa: E731
        return replace(smaller, cache=jax.tree.map(write, state.cache, smaller.cache))
    group = fixed.group

    def written_slots(x: Array, new: Array) -> Array:
        def write_slots(x: Array, at: Array, new: Array) -> Array:
            return x.at[at // group, at % group].set(new, mode="drop")

        return _by_device(fixed, write_slots, x, plan.completion, new)

    def written_cache(x: Array, new: Array) -> Array:
        def write_cache(x: Array, at: Array, new: Array) -> Array:
            return x.at[at // group, :, at % group, : slots.capacity].set(jnp.moveaxis(new, 2, 1), mode="drop")

        return _by_device(fixed, write_cache, x, plan.completion, new)

    written = {name: written_slots(getattr(state, name), getattr(smaller, name)) for name in WRITTEN}
    return replace(state, **written, cache=jax.tree.map(written_cache, state.cache, smaller.cache))


def _by_device(fixed: Decoding, function: Callable[..., Array], x: Array, index: Array, *more: Array) -> Array:
    """Applies `function` to each device's part of x and more, and index [d, ...]: so no device needs another's part."""
    parts = [y.reshape(fixed.devices, -1, *y.shape[1:]) for y in (x, *more)]
    outputs = jax.vmap(function)(parts[0], index, *parts[1:])
    return outputs.reshape(-1, *outputs.shape[2:])
