"""The in-JAX sampler: prefills each prompt once for its group, then runs jitted decode loops.

A batch has B prompts with G completions each. Its keys and values stay where they are. When few completions are left,
a decode loop copies these into a smaller batch (`rollout.compaction`), runs there, and writes back what it has
sampled. So a few long completions do not cost the time of the whole batch, and every shape is one program. The shapes
in use come from the run's book (`jaxrl_llm.shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm import sharding
from jaxrl_llm.algorithms.sampling import Sampling, draw, log_distribution, support
from jaxrl_llm.compilation import ROUND_AS_WRITTEN, compile_checked
from jaxrl_llm.models.attention import KeyValue
from jaxrl_llm.models.decoder import Decoder, last_state
from jaxrl_llm.rollout.compaction import DecodeShapes, Plan, Slots, plan_compaction, prompts_at_once, slot_shapes
from jaxrl_llm.shapes import MOST, RATES, SAMPLING, Book, Shape, abstract, placed
from jaxrl_llm.structs import Array, Prompts, PyTree, Rollouts

KNOBS = "engine.max_sequences or rollout.max_completion_tokens"  # less of one needs less memory


@dataclass(frozen=True)
class Decoding:
    """The static values of a batch. The compiled programs depend on them."""

    batch: int  # prompts that have a KV cache at once
    whole_batch: int  # prompts of the call; they take turns
    group: int  # completions of each prompt
    sampling: Sampling
    length: int  # largest number of tokens in a completion
    stop_ids: tuple[int, ...]
    pad_id: int
    mesh: Mesh

    @property
    def devices(self) -> int:
        """Number of devices that share the prompts."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    @property
    def whole(self) -> tuple[int, int]:
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
    cache: list[
        KeyValue
    ]  # per layer, completion keys and values [B, K, G, S, h]; S = C, in a smaller batch its capacity


class Loop(NamedTuple):
    """The carry of the decode loop, over N entries of W slots."""

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
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        max_completion_tokens: int,
        stop_ids: tuple[int, ...],
        pad_id: int,
        max_sequences: int = 0,
        book: Book | None = None,
    ):
        """max_sequences: completions that have a KV cache at once, the others wait; 0: all. book: of the run."""
        self._mesh, self._cfg, self._most = mesh, model.cfg, max_sequences
        self._book, self._learns = book or Book(), book is not None
        self._length, self._stops, self._pad = max_completion_tokens, stop_ids, pad_id
        self._params: PyTree = None
        self._weights = sum(x.size for x in jax.tree.leaves(model.shapes()))
        self._version = 0
        weights = sharding.shardings(model.shapes(), mesh, leave_out="fsdp")
        dtype = jnp.dtype(model.cfg.dtype)

        def as_used(params: PyTree) -> PyTree:
            cast = jax.tree_util.tree_map_with_path(partial(_as_used, dtype), params)
            return model.unstack(jax.lax.with_sharding_constraint(cast, weights))

        self._unstacked = unstacked = dict(weights)
        unstacked["layers"] = [
            jax.tree.map(lambda at: NamedSharding(mesh, P(*at.spec[1:])), weights["layers"])
        ] * model.cfg.layers
        self._place = jax.jit(as_used, out_shardings=unstacked)
        rows = NamedSharding(mesh, sharding.BATCH)
        heads = NamedSharding(mesh, sharding.heads_spec(model.cfg.kv_heads, mesh))
        # Left to itself the compiler would keep a whole KV cache on every device.
        parts: dict[str, Any] = {f.name: heads if f.name in ("prefix", "cache") else rows for f in fields(DecodeState)}
        self._placed = DecodeState(**parts)
        self._start = jax.jit(
            partial(start, model), static_argnums=0, out_shardings=self._placed, compiler_options=ROUND_AS_WRITTEN
        )
        # The state is donated: no second copy of the KV cache.
        self._run = jax.jit(
            partial(run, model),
            static_argnums=(0, 1),
            donate_argnums=3,
            out_shardings=(self._placed, None),
            compiler_options=ROUND_AS_WRITTEN,
        )

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
        count, most = len(prompts.tokens), self._length
        limits = np.full((count, group_size), most) if max_tokens is None else np.minimum(max_tokens, most)
        number = np.arange(count * group_size, dtype=np.int32).reshape(count, group_size)
        fixed = self._decoding(count, group_size, sampling)
        turns = []
        for first in range(0, count, fixed.batch):
            at = slice(first, first + fixed.batch)
            arrays = prompts.tokens[at], prompts.mask[at], number[at], limits[at]
            turns.append(self._decode(fixed, key, *arrays))
        tokens, logprobs, length = (np.concatenate(x) for x in zip(*turns, strict=True))
        mask = np.arange(most) < length[..., None]
        last = np.take_along_axis(tokens, length[..., None] - 1, axis=-1)[..., 0]
        versions = np.full(mask.shape, self._version, np.int32)
        return Rollouts(tokens, mask, mask, logprobs, ~np.isin(last, self._stops), versions)

    def _decoding(self, prompts: int, group: int, sampling: Sampling) -> Decoding:
        devices = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
        at_once = prompts_at_once(prompts, group, devices, self._most)
        return Decoding(at_once, prompts, group, sampling, self._length, self._stops, self._pad, self._mesh)

    def _decode(self, fixed: Decoding, key: jax.Array, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """Decodes prompts [B, P] with mask, numbers [B, G] and limits [B, G] -> tokens, logprobs [B, G, C], lengths."""
        shapes, name = self._shapes(fixed, arrays[0].shape[1])
        if shapes.ladder:
            shapes.ladder.begin()
        state, t = self._start(fixed, self._params, *sharding.shard_batch(arrays, self._mesh), key), 1
        compile = self._compiler(fixed, *abstract((self._params, state, key)))
        while (alive := np.asarray(state.alive)).any() and t < fixed.length:
            slots, below = shapes.choose(alive, t)
            self._book.ready(name, slots, compile)
            plan = plan_compaction(alive, slots, below, fixed.devices)
            state, now = self._run(fixed, slots, self._params, state, np.int32(t), key, plan)
            t = int(now)
        tokens, logprobs, length = sharding.to_host((state.tokens, state.logprobs, state.length))
        if shapes.ladder:
            shapes.ladder.settle(shapes.cost(length))
            self._book.compile_ahead(name, compile)
        return tokens, logprobs, length

    def programs(
        self, params: PyTree, prompts: int, width: int, group: int, sampling: Sampling
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields (name, compile) of each program for batches of these sizes; params: shapes are enough."""
        fixed = self._decoding(prompts, group, sampling)
        shapes, _ = self._shapes(fixed, width)
        prompts = fixed.batch
        rows = NamedSharding(self._mesh, sharding.BATCH)
        sizes = ((prompts, width), np.int32), ((prompts, width), bool), *[((prompts, group), np.int32)] * 2
        batch = [jax.ShapeDtypeStruct(*size, sharding=rows) for size in sizes]
        key = jax.eval_shape(lambda: jax.random.key(0))
        placing = self._place.lower(params)
        weights = jax.tree.map(placed, placing.out_info, self._unstacked)
        starting = self._start.lower(fixed, weights, *batch, key)
        state = starting.out_info
        at = {f.name: placed(getattr(state, f.name), getattr(self._placed, f.name)) for f in fields(DecodeState)}
        yield "weights of the sampler", lambda: compile_checked(placing, "the sampler's copy of the weights", KNOBS)
        yield f"prompts, {prompts} x {width}", lambda: compile_checked(starting, "the prompts' forward pass", KNOBS)
        compile = self._compiler(fixed, weights, DecodeState(**at), key)
        for slots in shapes.possible:
            name = f"decoding, {slots.entries} x {slots.width} a device, {slots.capacity} tokens"
            yield name, partial(compile, slots)

    def _shapes(self, fixed: Decoding, width: int) -> tuple[DecodeShapes, str]:
        """Returns the shapes of a batch with prompts of this width, and their name in the book."""
        cfg, rates = self._cfg, RATES[self._mesh.devices.flat[0].platform]
        prompts, group = fixed.whole
        weights = self._weights / self._mesh.shape["tensor"]
        kept = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim / self._mesh.shape["tensor"]  # numbers for each token
        size = jnp.dtype(cfg.dtype).itemsize

        def seconds(slots: Slots) -> float:
            read = kept * (slots.count * slots.capacity + slots.entries * width)
            work = 2 * weights * slots.count / rates.flops
            return weights * size / rates.bandwidth + read * size / rates.cache + work

        possible = slot_shapes(prompts, group, fixed.length)
        name = f"{SAMPLING} {fixed.whole_batch} x {group}, {width} + {fixed.length} tokens, {fixed.sampling}"
        ladder = None
        if self._learns and fixed.sampling.temperature > 0:  # greedy: an evaluation, or a baseline
            ladder = self._book.ladder(name, possible, price=rates.compile, most=MOST[SAMPLING])
        return DecodeShapes(possible, seconds, fixed.devices, ladder), name

    def _compiler(
        self, fixed: Decoding, params: PyTree, state: DecodeState, key: PyTree
    ) -> Callable[[Shape], jax.stages.Compiled]:
        """Returns `compile(shape)`, which compiles the decode loop of a shape. Of the arguments, shapes are enough."""

        def compile(shape: Shape) -> jax.stages.Compiled:
            slots = Slots(*shape)
            ints = lambda *size: jax.ShapeDtypeStruct(size, np.int32)  # noqa: E731
            plan = Plan(ints(fixed.devices, slots.entries), ints(fixed.devices, *slots[:2]), ints(2))
            lowered = self._run.lower(fixed, slots, params, state, ints(), key, plan)
            return compile_checked(lowered, "the decode loop", KNOBS)

        return compile


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
    uniform = jnp.take(_uniform(key, 0, fixed.whole_batch * group), number, axis=0)
    each = jax.vmap(partial(choose, sampling=sampling), in_axes=(None, 1), out_axes=1)  # a group shares its logits
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
    model: Decoder, fixed: Decoding, slots: Slots, params: PyTree, state: DecodeState, t: Array, key: Array, plan: Plan
) -> tuple[DecodeState, Array]:
    """Decodes the completions of `plan` from token t on, in a smaller batch of shape `slots`.

    It ends when the KV cache is full, all completions have ended, or the living fit into `plan.below` on every device.
    """
    of, total = take(fixed, slots, state, plan), fixed.whole_batch * fixed.group
    entries, width = plan.below
    prompts = fixed.batch // fixed.devices
    serves = plan.prompt[..., None] == jnp.arange(prompts)[None, None]  # [d, n, p]
    # Token t needs the keys of tokens 0 .. t - 1, so a cache of S entries is enough for token S.
    most = min(fixed.length, slots.capacity + 1)

    def go_on(loop: Loop) -> Array:
        living = jnp.sum(loop.alive, axis=1).reshape(fixed.devices, -1)
        each = jnp.einsum("dnp,dn->dp", serves.astype(jnp.int32), living)
        crowded = jnp.any(jnp.sum((each + width - 1) // width, axis=1) > entries)
        return (loop.t < most) & jnp.any(loop.alive) & crowded

    def step(loop: Loop) -> Loop:
        hidden, cache = model.decode(params, loop.token, loop.t - 1, loop.cache, of.prefix, of.prompt_mask)
        uniform = jnp.take(_uniform(key, loop.t, total), of.number, axis=0)
        token, logprob = choose(model.logits(params, hidden), uniform, fixed.sampling)
        at_t = partial(jax.lax.dynamic_update_index_in_dim, index=loop.t, axis=2)
        before = partial(jax.lax.dynamic_index_in_dim, index=loop.t, axis=2, keepdims=False)
        return Loop(
            t=loop.t + 1,
            token=token,
            alive=loop.alive & ~_ended(token, fixed.stop_ids) & (loop.t + 1 < of.max_tokens),
            tokens=at_t(loop.tokens, jnp.where(loop.alive, token, before(loop.tokens))),
            logprobs=at_t(loop.logprobs, jnp.where(loop.alive, logprob, 0.0)),
            length=loop.length + loop.alive,
            cache=cache,
        )

    token = jax.lax.dynamic_index_in_dim(of.tokens, t - 1, axis=2, keepdims=False)
    end = jax.lax.while_loop(go_on, step, Loop(t, token, of.alive, of.tokens, of.logprobs, of.length, of.cache))
    made = {name: getattr(end, name) for name in ("alive", "tokens", "logprobs", "length", "cache")}
    return put(fixed, slots, state, replace(of, **made), plan), end.t


WRITTEN = ("alive", "tokens", "logprobs", "length")  # what the decode loop writes for each completion, with the cache


def take(fixed: Decoding, slots: Slots, state: DecodeState, plan: Plan) -> DecodeState:
    """Copies what a plan names into a smaller batch of N = d n entries of W slots. The whole batch is not copied."""
    cache = jax.tree.map(lambda x: x[:, :, :, : slots.capacity], state.cache)
    if slots[:2] == fixed.whole:
        return replace(state, cache=cache)
    group, last = fixed.group, fixed.batch // fixed.devices * fixed.group - 1
    source = jnp.minimum(plan.completion, last)  # an empty slot reads any completion

    def of_entries(x: Array) -> Array:
        return _by_device(fixed, lambda x, prompt: x[prompt], x, plan.prompt)

    def of_slots(x: Array) -> Array:
        return _by_device(fixed, lambda x, at: x[at // group, at % group], x, source)

    def of_cache(x: Array) -> Array:
        return _by_device(fixed, lambda x, at: jnp.moveaxis(x[at // group, :, at % group], 1, 2), x, source)

    heads = NamedSharding(fixed.mesh, sharding.heads_spec(state.cache[0].keys.shape[1], fixed.mesh))
    layers = jax.tree.map(of_entries, state.prefix), jax.tree.map(of_cache, cache)
    prefix, cache = jax.lax.with_sharding_constraint(layers, heads)
    taken = {name: of_slots(getattr(state, name)) for name in ("number", "max_tokens", *WRITTEN)}
    taken["alive"] &= (plan.completion <= last).reshape(taken["alive"].shape)
    return DecodeState(**taken, prompt_mask=of_entries(state.prompt_mask), prefix=prefix, cache=cache)


def put(fixed: Decoding, slots: Slots, state: DecodeState, taken: DecodeState, plan: Plan) -> DecodeState:
    """Writes a smaller batch back to where `take` has it from. Drops the empty slots."""
    if slots[:2] == fixed.whole:
        whole = jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, 0, 3), state.cache, taken.cache)
        return replace(taken, cache=whole)
    group = fixed.group

    def of_slots(x: Array, new: Array) -> Array:
        def one(x: Array, at: Array, new: Array) -> Array:
            return x.at[at // group, at % group].set(new, mode="drop")

        return _by_device(fixed, one, x, plan.completion, new)

    def of_cache(x: Array, new: Array) -> Array:
        def one(x: Array, at: Array, new: Array) -> Array:
            return x.at[at // group, :, at % group, : slots.capacity].set(jnp.moveaxis(new, 2, 1), mode="drop")

        return _by_device(fixed, one, x, plan.completion, new)

    written = {name: of_slots(getattr(state, name), getattr(taken, name)) for name in WRITTEN}
    return replace(state, **written, cache=jax.tree.map(of_cache, state.cache, taken.cache))


def _by_device(fixed: Decoding, function: Callable[..., Array], x: Array, index: Array, *more: Array) -> Array:
    """Applies `function` to each device's part of x and more, and index [d, ...]: so no device needs another's part."""
    parts = [y.reshape(fixed.devices, -1, *y.shape[1:]) for y in (x, *more)]
    made = jax.vmap(function)(parts[0], index, *parts[1:])
    return made.reshape(-1, *made.shape[2:])
