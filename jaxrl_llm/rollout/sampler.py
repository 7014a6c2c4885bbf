"""The in-JAX sampler: prefills each prompt once for its group, then runs jitted decode loops.

The batch is N entries of W slots. An entry has one copy of a prompt's keys and values; a slot has one completion.
The decode loop runs until the KV cache is full, or until the living completions fit into half the slots. Then the host
compacts the batch (`rollout.compaction`), and doubles the cache if it is full. So a few long completions do not cost
the time of the whole batch, attention does not run over an empty cache, and few shapes are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm import sharding
from jaxrl_llm.algorithms.sampling import Sampling, draw, log_distribution, support
from jaxrl_llm.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.decoder import Decoder, last_state
from jaxrl_llm.rollout.compaction import Plan, plan_compaction, smaller_shape
from jaxrl_llm.structs import Array, Prompts, PyTree, Rollouts

FIRST_CACHE = 64  # completion tokens in the first KV cache; a full cache is doubled


@dataclass(frozen=True)
class Decoding:
    """The static values of a batch. The compiled programs depend on them."""

    batch: int  # prompts
    group: int  # completions of each prompt
    sampling: Sampling
    length: int  # largest number of tokens in a completion
    stop_ids: tuple[int, ...]
    pad_id: int
    devices: int  # number of devices that share the prompts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The state of a batch in decoding: N entries of W slots."""

    prompt: Array  # [N] index of the entry's prompt among the prompts of its device
    completion: Array  # [N, W] index of the completion, b * G + g
    alive: Array  # [N, W] bool
    max_tokens: Array  # [N, W] token limit of the completion
    tokens: Array  # [N, W, C] sampled until now
    logprobs: Array  # [N, W, C]
    length: Array  # [N, W] number of sampled tokens
    prompt_mask: Array  # [N, P]
    prefix: list[KeyValue]  # per layer, prompt keys and values [N, K, P, h]
    cache: list[KeyValue]  # per layer, completion keys and values [N, K, W, S, h]


class Loop(NamedTuple):
    """The carry of the decode loop. The other fields of `DecodeState` do not change in the loop."""

    t: Array  # index of the next token, the same for all completions
    token: Array  # [N, W] token t - 1
    alive: Array
    tokens: Array
    logprobs: Array
    length: Array
    cache: list[KeyValue]


class Sampler:
    """The in-JAX engine. The caller gives the key: the same key gives the same completions."""

    max_gap: float | None = None  # None: every step compares sampler and trainer anyway

    def __init__(
        self, model: Decoder, mesh: Mesh, *, max_completion_tokens: int, stop_ids: tuple[int, ...], pad_id: int
    ):
        self._mesh = mesh
        self._devices = mesh.shape["data"] * mesh.shape["fsdp"]
        self._length, self._stops, self._pad = max_completion_tokens, stop_ids, pad_id
        self._params: PyTree = None
        self._version = 0
        weights = sharding.shardings(model.shapes(), mesh, leave_out="fsdp")
        dtype = jnp.dtype(model.cfg.dtype)

        def as_used(params: PyTree) -> PyTree:
            cast = jax.tree_util.tree_map_with_path(partial(_as_used, dtype), params)
            return model.unstack(jax.lax.with_sharding_constraint(cast, weights))

        self._place = jax.jit(as_used)
        rows = NamedSharding(mesh, sharding.BATCH)
        heads = NamedSharding(mesh, sharding.heads_spec(model.cfg.kv_heads, mesh))
        # Left to itself the compiler would keep a whole KV cache on every device.
        parts: dict[str, Any] = {f.name: heads if f.name in ("prefix", "cache") else rows for f in fields(DecodeState)}
        placed = DecodeState(**parts)
        self._start = jax.jit(
            partial(start, model), static_argnums=0, out_shardings=placed, compiler_options=ROUND_AS_WRITTEN
        )
        # The state is donated: no second copy of the KV cache.
        self._run = jax.jit(
            partial(run, model),
            static_argnums=0,
            donate_argnums=2,
            out_shardings=(placed, None),
            compiler_options=ROUND_AS_WRITTEN,
        )
        self._move_layer = jax.jit(partial(move_layer, mesh=mesh, devices=self._devices), static_argnames="capacity")

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        """Casts the weights to the compute dtype and gathers them over fsdp, once per push and not per token."""
        self.release()  # first, so that the old and the new copy are not in memory together
        self._version = version
        self._params = self._place(params)

    def release(self) -> None:
        """Frees the gathered weights: the update of the policy needs the memory."""
        self._params = None

    def close(self) -> None:
        """Does nothing: the sampler has started nothing."""

    def generate(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        max_tokens: np.ndarray | None = None,
    ) -> Rollouts:
        """Samples `group_size` completions of each prompt, on the host; max_tokens [B, G]: limit of each completion."""
        total, most = len(prompts.tokens) * group_size, self._length
        limits = np.full(total, most) if max_tokens is None else np.minimum(max_tokens.reshape(-1), most)
        batch = sharding.shard_batch((prompts.tokens, prompts.mask, limits.reshape(-1, group_size)), self._mesh)
        fixed = Decoding(len(prompts.tokens), group_size, sampling, most, self._stops, self._pad, self._devices)
        state = self._start(fixed, self._params, *batch, key)
        tokens, logprobs = np.full((total, most), self._pad, np.int32), np.zeros((total, most), np.float32)
        length, t = np.ones(total, np.int32), np.int32(1)
        while True:
            state, t = self._run(fixed, self._params, state, t, key)
            slots, t = sharding.to_host((replace(state, prefix=[], cache=[]), t))
            # Compaction drops ended completions, so their tokens are copied out before it.
            taken = slots.completion < total
            for whole, part in ((tokens, slots.tokens), (logprobs, slots.logprobs), (length, slots.length)):
                whole[slots.completion[taken]] = part[taken]
            if not slots.alive.any() or t >= most:
                break
            plan = plan_compaction(slots.alive, slots.prompt, self._devices)
            capacity = state.cache[0].keys.shape[3]
            capacity = min(2 * capacity, most) if t > capacity else capacity
            state = self._compact(slots, state, plan, capacity=capacity)
        shape = (-1, group_size, most)
        mask = (np.arange(most) < length[:, None]).reshape(shape)
        stopped = np.isin(tokens[np.arange(total), length - 1], self._stops).reshape(-1, group_size)
        versions = np.full(mask.shape, self._version, np.int32)
        return Rollouts(tokens.reshape(shape), mask, mask, logprobs.reshape(shape), ~stopped, versions)

    def _compact(self, slots: DecodeState, state: DecodeState, plan: Plan, *, capacity: int) -> DecodeState:
        """Moves the batch as planned, into a cache of `capacity` tokens. slots: the state on the host, without layers.

        The layers move one after the other: only one of them is in memory twice, and all use one program. The rest is
        small and on the host already, where moving it needs no program.
        """
        prefix, cache = state.prefix, state.cache
        for i in range(len(cache)):
            moved = self._move_layer(prefix[i], cache[i], plan.entry, plan.source, capacity=capacity)
            prefix[i], cache[i] = jax.block_until_ready(moved)  # waits, or the host would allocate the next layer now
        entries = {name: plan.of_entries(getattr(slots, name)) for name in ("prompt", "prompt_mask")}
        each = {name: plan.of_slots(getattr(slots, name)) for name in ("max_tokens", "tokens", "logprobs", "length")}
        empty = plan.empty.reshape(-1, plan.empty.shape[-1])
        each["alive"] = plan.of_slots(slots.alive) & ~empty
        # An empty slot gets an index out of range, which `generate` skips.
        each["completion"] = np.where(empty, np.iinfo(np.int32).max, plan.of_slots(slots.completion))
        return DecodeState(**sharding.shard_batch(entries | each, self._mesh), prefix=prefix, cache=cache)


def _as_used(dtype: jnp.dtype, path: Any, leaf: Array) -> Array:
    """Casts kernels and the embedding to `dtype`, the dtype of their matmuls. Norms compute in float32."""
    return leaf if sharding.path_name(path).endswith("scale") else leaf.astype(dtype)


def choose(logits: Array, uniform: Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Samples tokens [...] and their log-probabilities from logits [..., V] and uniform numbers [..., 2]."""
    if sampling.temperature > 0:
        return draw(support(logits, sampling), uniform)
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logprobs = log_distribution(logits, sampling)
    return token, jnp.take_along_axis(logprobs, token[..., None], axis=-1)[..., 0]


def _uniform(key: Array, t: Array | int, total: int) -> jax.Array:
    """Uniform numbers [total, 2] for token t. Row m belongs to completion m, whatever slot compaction gives it."""
    return jax.random.uniform(jax.random.fold_in(key, t), (total, 2))


def _ended(token: Array, stop_ids: tuple[int, ...]) -> jax.Array:
    return jnp.any(token[..., None] == jnp.asarray(stop_ids, jnp.int32)[None, None], axis=-1)


def start(
    model: Decoder, fixed: Decoding, params: PyTree, prompts: Array, prompt_mask: Array, max_tokens: Array, key: Array
) -> DecodeState:
    """Prefills prompts [B, P] and samples the first token of each completion, with N = B and W = G."""
    batch, group, length, sampling = fixed.batch, fixed.group, fixed.length, fixed.sampling
    hidden, prefix = model.prefill(params, prompts, prompt_mask)
    logits = model.logits(params, last_state(hidden, prompt_mask))
    uniform = _uniform(key, 0, batch * group).reshape(batch, group, 2)
    each = jax.vmap(partial(choose, sampling=sampling), in_axes=(None, 1), out_axes=1)  # a group shares its logits
    token, logprob = each(logits, uniform)
    tokens = jnp.full((batch, group, length), fixed.pad_id, jnp.int32).at[:, :, 0].set(token)
    logprobs = jnp.zeros((batch, group, length), jnp.float32).at[:, :, 0].set(logprob)
    cfg = model.cfg
    shape = (batch, cfg.kv_heads, group, min(FIRST_CACHE, length), cfg.head_dim)
    cache = [KeyValue(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype)) for _ in range(cfg.layers)]
    return DecodeState(
        prompt=jnp.arange(batch, dtype=jnp.int32) % (batch // fixed.devices),
        completion=jnp.arange(batch * group, dtype=jnp.int32).reshape(batch, group),
        alive=~_ended(token, fixed.stop_ids) & (max_tokens > 1),
        max_tokens=max_tokens,
        tokens=tokens,
        logprobs=logprobs,
        length=jnp.ones((batch, group), jnp.int32),
        prompt_mask=prompt_mask,
        prefix=prefix,
        cache=cache,
    )


def run(
    model: Decoder, fixed: Decoding, params: PyTree, state: DecodeState, t: Array, key: Array
) -> tuple[DecodeState, Array]:
    """Decodes from token t until the cache is full, all completions have ended, or the next smaller shape is enough."""
    batch, devices = fixed.batch, fixed.devices
    n, w = state.completion.shape
    # Token t needs the keys of tokens 0 .. t - 1, so a cache of S entries is enough for token S.
    most = min(state.tokens.shape[2], state.cache[0].keys.shape[3] + 1)
    entries, width = smaller_shape(n // devices, w)
    serves = (state.prompt[:, None] == jnp.arange(batch // devices)[None]).reshape(devices, n // devices, -1)

    def go_on(loop: Loop) -> Array:
        # Stops early if the living completions fit into the next smaller shape on every device: then the host compacts
        # the batch. The smallest shape never stops early.
        each = jnp.einsum("dnp,dn->dp", serves.astype(jnp.int32), jnp.sum(loop.alive, axis=1).reshape(devices, -1))
        crowded = jnp.any(jnp.sum((each + width - 1) // width, axis=1) > entries)
        return (loop.t < most) & jnp.any(loop.alive) & (crowded | (entries * width == n // devices * w))

    def step(loop: Loop) -> Loop:
        hidden, cache = model.decode(params, loop.token, loop.t - 1, loop.cache, state.prefix, state.prompt_mask)
        uniform = jnp.take(_uniform(key, loop.t, batch * fixed.group), state.completion, axis=0, mode="clip")
        token, logprob = choose(model.logits(params, hidden), uniform, fixed.sampling)
        at_t = partial(jax.lax.dynamic_update_index_in_dim, index=loop.t, axis=2)
        before = partial(jax.lax.dynamic_index_in_dim, index=loop.t, axis=2, keepdims=False)
        return Loop(
            t=loop.t + 1,
            token=token,
            alive=loop.alive & ~_ended(token, fixed.stop_ids) & (loop.t + 1 < state.max_tokens),
            tokens=at_t(loop.tokens, jnp.where(loop.alive, token, before(loop.tokens))),
            logprobs=at_t(loop.logprobs, jnp.where(loop.alive, logprob, 0.0)),
            length=loop.length + loop.alive,
            cache=cache,
        )

    token = jax.lax.dynamic_index_in_dim(state.tokens, t - 1, axis=2, keepdims=False)
    loop = Loop(t, token, state.alive, state.tokens, state.logprobs, state.length, state.cache)
    end = jax.lax.while_loop(go_on, step, loop)
    made = {name: getattr(end, name) for name in ("alive", "tokens", "logprobs", "length", "cache")}
    return replace(state, **made), end.t


def move_layer(
    prefix: KeyValue, cache: KeyValue, entry: Array, source: Array, *, capacity: int, mesh: Mesh, devices: int
) -> tuple[KeyValue, KeyValue]:
    """Moves a layer's prompt keys and values [N, K, P, h] and cache [N, K, W, S, h], each slot within its device."""
    place = NamedSharding(mesh, sharding.heads_spec(cache.keys.shape[1], mesh))
    w = cache.keys.shape[2]

    def of_entries(x: Array) -> Array:
        x = jax.vmap(lambda x, i: x[i])(x.reshape(devices, -1, *x.shape[1:]), entry)
        return jax.lax.with_sharding_constraint(x.reshape(-1, *x.shape[2:]), place)

    def of_slots(x: Array) -> Array:
        x = jax.vmap(lambda x, i: x[i // w, :, i % w])(
            x.reshape(devices, -1, *x.shape[1:]), source
        )  # [d, n', w', K, S, h]
        x = jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 2, 1)
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, capacity - x.shape[3]), (0, 0)])
        return jax.lax.with_sharding_constraint(x, place)

    return jax.tree.map(of_entries, prefix), jax.tree.map(of_slots, cache)
