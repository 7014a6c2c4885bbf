"""The in-JAX sampler: prefills each prompt once for its group, then runs jitted decode loops.

A batch has B prompts with G completions each. Its keys and values stay where they are. When few completions are left,
a decode loop copies these into a smaller batch (`rollout.compaction`), runs there, and writes back what it has
sampled. So a few long completions do not cost the time of the whole batch, and every shape is one program. The shapes
in use come from the run's book (`jaxrl_llm.machine.shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN, Program, compile_checked, compiling
from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.machine.shapes import MOST, RATES, SAMPLING, Book, Shape, abstract, placed
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout import decoding
from jaxrl_llm.rollout.compaction import (
    CompactionPlan,
    DecodeShapes,
    Slots,
    plan_compaction,
    prompts_at_once,
    slot_shapes,
)
from jaxrl_llm.rollout.decoding import DecodeState, Decoding
from jaxrl_llm.rollout.episodes import EpisodeSampler, Traced
from jaxrl_llm.rollout.protocol import Environments
from jaxrl_llm.rollout.weights import Placing, sampling_decoder
from jaxrl_llm.structs import Prompts, PyTree, Rollouts

REMEDY = "lower engine.max_sequences or rollout.max_completion_tokens"  # if memory is short


class Sampler:
    """The in-JAX engine. The caller gives the key: the same key gives the same completions."""

    # None: every step compares sampler and trainer anyway.
    max_gap: float | None = None

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
        self._mesh, self._cfg, self._max_sequences = mesh, model.cfg, max_sequences
        self._book, self._learns = book or Book(), book is not None
        self._length, self._stops, self._pad = max_completion_tokens, stop_ids, pad_id
        self._params: PyTree = None
        self._weights, self._active = model.size(), model.size(active=True)
        self._version = 0
        decoder = sampling_decoder(model, mesh)
        self._place = Placing(decoder, mesh)
        self._episodes = EpisodeSampler(decoder, mesh)
        rows = NamedSharding(mesh, sharding.BATCH)
        heads = NamedSharding(mesh, sharding.heads_spec(model.cfg.kv_heads, mesh))
        # Left to itself the compiler would keep a whole KV cache on every device.
        parts: dict[str, Any] = {f.name: heads if f.name in ("prefix", "cache") else rows for f in fields(DecodeState)}
        self._placed = DecodeState(**parts)
        self._start = jax.jit(
            partial(decoding.start, decoder),
            static_argnums=0,
            out_shardings=self._placed,
            compiler_options=ROUND_AS_WRITTEN,
        )
        # The state is donated: no second copy of the KV cache.
        self._run = jax.jit(
            partial(decoding.run, decoder),
            static_argnums=(0, 1),
            donate_argnums=3,
            out_shardings=(self._placed, None),
            compiler_options=ROUND_AS_WRITTEN,
        )

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        """Casts the weights to the compute dtype and gathers them over fsdp, once per push and not per token."""
        # First, so that the old and the new copy are not in memory together.
        self.release()
        self._version = version
        self._params = self._place(params)

    def release(self) -> None:
        """Frees the gathered weights: the update of the policy needs the memory."""
        self._params = None

    def close(self) -> None:
        """Does nothing: the sampler has started nothing."""

    def sample(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        environments: Environments | None = None,
        max_tokens: np.ndarray | None = None,
    ) -> Rollouts:
        """Samples `group_size` completions of each prompt, or episodes, on the host. See `protocol.Engine`."""
        if environments:
            return self._sample_episodes(prompts, key, group_size, sampling, environments)
        shape = len(prompts.tokens), group_size
        limits = np.full(shape, self._length) if max_tokens is None else np.minimum(max_tokens, self._length)
        return self._sample_turn(prompts, key, sampling, limits)

    def _sample_turn(self, prompts: Prompts, key: jax.Array, sampling: Sampling, limits: np.ndarray) -> Rollouts:
        fixed, number, parts = self._split(prompts, limits.shape[1], sampling)
        turns = [self._decode(fixed, key, prompts.tokens[at], prompts.mask[at], number[at], limits[at]) for at in parts]
        tokens, logprobs, lengths = (np.concatenate(x) for x in zip(*turns, strict=True))
        mask = np.arange(self._length) < lengths[..., None]
        last = np.take_along_axis(tokens, lengths[..., None] - 1, axis=-1)[..., 0]
        versions = np.full(mask.shape, self._version, np.int32)
        return Rollouts(tokens, mask, mask, logprobs, ~np.isin(last, self._stops), versions)

    def _sample_episodes(
        self, prompts: Prompts, key: jax.Array, group_size: int, sampling: Sampling, environments: Environments
    ) -> Rollouts:
        fixed, number, parts = self._split(prompts, group_size, sampling)
        rollouts = []
        for at in parts:
            arrays = (prompts.tokens[at], prompts.mask[at]), number[at]
            episodes = self._episodes.sample(fixed, self._params, key, *arrays, environments, at.start * group_size)
            versions = np.full(episodes.tokens.shape, self._version, np.int32)
            rollouts.append(episodes.rollouts(group_size, versions))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *rollouts)

    def _split(self, prompts: Prompts, group_size: int, sampling: Sampling) -> tuple[Decoding, np.ndarray, list[slice]]:
        """Returns the numbers [B, G] of this process's completions, and the prompts that take turns."""
        local_prompts = len(prompts.tokens)
        count = local_prompts * distributed.count()
        # By this number a completion draws the same random numbers in any process and in any turn.
        number = np.arange(count * group_size, dtype=np.int32).reshape(count, group_size)[distributed.part(count)]
        fixed = self._decoding(count, group_size, sampling)
        at_once = fixed.batch // distributed.count()
        return fixed, number, [slice(first, first + at_once) for first in range(0, local_prompts, at_once)]

    def _decoding(self, prompts: int, group: int, sampling: Sampling) -> Decoding:
        devices = sharding.prompt_shards(self._mesh)
        at_once = prompts_at_once(prompts, group, devices, self._max_sequences)
        return Decoding(at_once, prompts, group, sampling, self._length, self._stops, self._pad, self._mesh)

    def _decode(self, fixed: Decoding, key: jax.Array, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """Decodes prompts [B, P] with mask, numbers [B, G] and limits [B, G] -> tokens, logprobs [B, G, C], lengths."""
        shapes, name = self._shapes(fixed, arrays[0].shape[1])
        if shapes.ladder:
            shapes.ladder.begin(*shapes.first())
        state, t = self._start(fixed, self._params, *sharding.shard_batch(arrays, self._mesh), key), 1
        compile = self._compiler(fixed, *abstract((self._params, state, key)))
        while (alive := sharding.whole_to_host(state.alive)).any() and t < fixed.length:
            # The host looks at the completions only here, between two loops.
            slots, below = shapes.choose(alive, t)
            self._book.ready(name, slots, compile)
            if shapes.ladder:
                # The first call uses several.
                self._book.compile_ahead(name, compile)
            plan = plan_compaction(alive, slots, below, fixed.devices)
            # np.int32, as `_trace` has it: a Python int is weakly typed, and so another program.
            state, now = self._run(fixed, slots, self._params, state, np.int32(t), key, plan)
            WATCHDOG.moved()
            t = int(now)
        tokens, logprobs, length = sharding.to_host((state.tokens, state.logprobs, state.length))
        if shapes.ladder:
            # The lengths of all processes: each must order the same shapes.
            shapes.ladder.settle(shapes.cost(sharding.whole_to_host(state.length)))
            self._book.compile_ahead(name, compile)
        return tokens, logprobs, length

    def programs(
        self, params: PyTree, prompts: int, width: int, group: int, sampling: Sampling, *, episodes: bool
    ) -> Iterator[Program]:
        """Yields each program for batches of these sizes, the decode loops last; params: shapes are enough.

        episodes: with environments, of several turns.
        """
        fixed, weights = self._decoding(prompts, group, sampling), self._place.shapes(params)
        yield from self._place.programs(params)
        programs = self._episodes.programs if episodes else self._one_turn_programs
        for phase, name, trace in programs(fixed, weights, width):
            yield Program(phase, name, trace, REMEDY, ())

    def _one_turn_programs(self, fixed: Decoding, weights: PyTree, width: int) -> Iterator[Traced]:
        shapes, _ = self._shapes(fixed, width)
        rows = NamedSharding(self._mesh, sharding.BATCH)
        numbers = (fixed.batch, fixed.group), np.int32
        sizes = ((fixed.batch, width), np.int32), ((fixed.batch, width), bool), numbers, numbers
        batch = [jax.ShapeDtypeStruct(*size, sharding=rows) for size in sizes]
        key = jax.eval_shape(lambda: jax.random.key(0))
        starting = self._start.trace(fixed, weights, *batch, key)
        state = starting.out_info
        at = {f.name: placed(getattr(state, f.name), getattr(self._placed, f.name)) for f in fields(DecodeState)}
        yield "prompts", f"prompts, {fixed.batch} x {width}", lambda: starting
        for slots in shapes.possible:
            name = f"decoding, {slots.entries} x {slots.width} a device, {slots.capacity} tokens"
            yield "decoding", name, partial(self._trace, fixed, weights, DecodeState(**at), key, slots)

    def resident(self, params: PyTree) -> PyTree:
        """Returns the sampler's copy of the weights as shapes with shardings: a plan counts it beside the policy."""
        return self._place.shapes(params)

    def _shapes(self, fixed: Decoding, width: int) -> tuple[DecodeShapes, str]:
        """Returns the shapes of a batch with prompts of this width, and their name in the book."""
        cfg, rates = self._cfg, RATES[self._mesh.devices.flat[0].platform]
        prompts, group = fixed.full_size
        weights, active = (x / self._mesh.shape["tensor"] for x in (self._weights, self._active))
        # Keys and values of a token on a device.
        cached_numbers = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim / self._mesh.shape["tensor"]
        size = jnp.dtype(cfg.dtype).itemsize

        def seconds(slots: Slots) -> float:
            read = cached_numbers * (slots.count * slots.capacity + slots.entries * width)
            work = 2 * active * slots.count / rates.flops
            # Weights and caches are read, and products computed, one after the other: the sum ranks shapes well enough.
            return weights * size / rates.bandwidth + read * size / rates.cache + work

        possible = slot_shapes(prompts, group, fixed.length)
        name = f"{SAMPLING} {fixed.all_prompts} x {group}, {width} + {fixed.length} tokens, {fixed.sampling}"
        ladder = None
        if self._learns and fixed.sampling.temperature > 0:
            # Greedy: an evaluation, or a baseline.
            ladder = self._book.ladder(name, possible, price=rates.compile, limit=MOST[SAMPLING])
        shapes = DecodeShapes(possible, seconds, devices=fixed.devices, price=rates.compile, ladder=ladder)
        return shapes, name

    def _compiler(
        self, fixed: Decoding, params: PyTree, state: DecodeState, key: PyTree
    ) -> Callable[[Shape], jax.stages.Compiled]:
        """Returns `compile(shape)`, which compiles the decode loop of a shape. Of the arguments, shapes are enough."""

        def compile(shape: Shape) -> jax.stages.Compiled:
            with compiling(f"the decode loop, {shape[0]} x {shape[1]} completions"):
                traced = self._trace(fixed, params, state, key, Slots(*shape))
                return compile_checked(traced.lower(), "the decode loop", REMEDY)

        return compile

    def _trace(
        self, fixed: Decoding, params: PyTree, state: DecodeState, key: PyTree, slots: Slots
    ) -> jax.stages.Traced:
        ints = lambda *size: jax.ShapeDtypeStruct(size, np.int32)  # noqa: E731
        plan = CompactionPlan(ints(fixed.devices, slots.entries), ints(fixed.devices, *slots[:2]), ints(2))
        return self._run.trace(fixed, slots, params, state, ints(), key, plan)
