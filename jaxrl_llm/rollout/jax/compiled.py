"""The compiled programs of the engine, and how a call uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.machine import keys, sharding
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.machine.shapes import placed
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.jax import programs
from jaxrl_llm.rollout.jax.cache_attention import CacheIndices
from jaxrl_llm.rollout.jax.programs import Cache, FedChunks, GroupSampling, NewPrompts, RoundRows, Sampled
from jaxrl_llm.rollout.jax.sizes import ROUND, Slots, StreamSizes
from jaxrl_llm.structs import AnyArray, Images, PyTree


class Programs:
    """The jitted programs of an engine."""

    def __init__(self, model: Decoder, mesh: Mesh):
        self.model, self.mesh = model, mesh
        self.rows = rows = NamedSharding(mesh, sharding.BATCH)
        self.heads = heads = NamedSharding(mesh, sharding.heads_spec(model.cfg.kv_heads, mesh))
        compiled = partial(jax.jit, compiler_options=ROUND_AS_WRITTEN)
        # Left to itself the compiler would keep all pages on every device.
        begun = heads, rows, rows
        self.begin = compiled(partial(programs.begin, model), static_argnums=(0, 1), out_shardings=begun)
        # The cache is donated: there is never a second copy.
        samples = partial(compiled, static_argnums=0, donate_argnums=2)
        self.prefill = samples(partial(programs.prefill, model), out_shardings=begun)
        self.decode = samples(partial(programs.decode, model), out_shardings=(heads, rows))
        self.feed = compiled(partial(programs.feed, model, mesh), donate_argnums=1, out_shardings=heads)

    def traced(
        self, sampling: GroupSampling, sizes: StreamSizes, weights: PyTree, *, goes_on: bool
    ) -> Iterator[tuple[str, str, Callable[[], jax.stages.Traced]]]:
        """Yields phase and name of each program of these sizes, and what traces it; weights: shapes are enough.

        goes_on: completions that an earlier call has begun are fed into the pages.
        """
        d, model = sharding.prompt_shards(self.mesh), self.model

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((d, *shape), np.int32, sharding=self.rows)

        def bools(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((d, *shape), bool, sharding=self.rows)

        key = jax.eval_shape(lambda: keys.key(0))
        cache = placed(jax.eval_shape(partial(programs.empty_cache, model, self.mesh, sizes)), self.heads)

        def reading(count: int, pages: int, prompts: int, group: int = sizes.group) -> CacheIndices:
            return CacheIndices(
                table=ints(count, sizes.longest),
                owner=ints(pages),
                start=ints(pages),
                prompt_mask=bools(prompts, sizes.width),
                members=ints(prompts, group),
                member=ints(count),
                end=ints(prompts) if sizes.images else None,
            )

        def prompts(n: int) -> NewPrompts:
            images = Images.shapes((d, n), sizes.width, sizes.images) if sizes.images else None
            tokens, mask = ints(n, sizes.width), bools(n, sizes.width)
            return NewPrompts(tokens, mask, ints(n), ints(n), placed(images, self.rows))

        first, later = prompts(sizes.begins), prompts(sizes.refill)
        name = prompts_name(sizes.begins, sizes, first=True)
        yield "prompts", name, partial(self.begin.trace, sampling, sizes, weights, first, key)
        if sizes.refills or sizes.begins < sizes.at_first:
            trace = partial(self.prefill.trace, sampling, weights, cache, later, key)
            yield "prompts", prompts_name(sizes.refill, sizes, first=False), trace
        for width in sizes.chunks(goes_on=goes_on):
            n = sizes.feeds
            read = reading(n, n * sizes.longest, n, 1)
            chunks = FedChunks(ints(n, width), ints(n), ints(n), ints(n), read)
            yield "prompts", feeding_name(n, width), partial(self.feed.trace, weights, cache, chunks)
        for slots in sizes.slots:
            each = ints(slots.count)
            rows = RoundRows(
                token=each,
                length=each,
                limit=each,
                number=each,
                known=ints(slots.count, ROUND),
                reading=reading(*slots),
                prompt=ints(slots.prompts),
                page=ints(slots.pages),
            )
            ends, below = jax.ShapeDtypeStruct((model.cfg.vocab_size,), bool), jax.ShapeDtypeStruct((), np.int32)
            yield (
                "decoding",
                decoding_name(slots),
                partial(self.decode.trace, sampling, weights, cache, rows, ends, below, key),
            )


def prompts_name(count: int, sizes: StreamSizes, *, first: bool) -> str:
    """Returns the name of the program for so many prompts of a device, those that begin first or later."""
    return f"{'prompts' if first else 'later prompts'}, {count} x {sizes.width} a device"


def feeding_name(count: int, width: int) -> str:
    """Returns the name of the program for chunks of observations of so many sequences of a device."""
    return f"observations, {count} x {width} a device"


def decoding_name(slots: Slots) -> str:
    """Returns the name of the decode program of this size."""
    return f"decoding, {slots.count} slots, {slots.pages} pages a device"


@dataclass
class CallPrograms:
    """The programs with the weights and the key of one call. All processes must use them in the same order."""

    programs: Programs
    sampling: GroupSampling
    sizes: StreamSizes
    params: PyTree
    key: jax.Array
    ends: np.ndarray  # [V] bool, tokens after which the host looks

    @property
    def mesh(self) -> Mesh:
        return self.programs.mesh

    def prefill(self, cache: Cache | None, prompts: NewPrompts) -> tuple[Cache, AnyArray, AnyArray]:
        """See `programs.prefill`; None: there is no cache yet."""
        if cache is None:
            return self.programs.begin(self.sampling, self.sizes, self.params, prompts, self.key)
        return self.programs.prefill(self.sampling, self.params, cache, prompts, self.key)

    def feed(self, cache: Cache, chunks: FedChunks) -> Cache:
        """See `programs.feed`."""
        return self.programs.feed(self.params, cache, chunks)

    def decode(self, cache: Cache, rows: RoundRows, below: int) -> tuple[Cache, Sampled]:
        """See `programs.decode`."""
        # np.int32, as a plan traces it: a Python int is weakly typed, and so another program.
        return self.programs.decode(self.sampling, self.params, cache, rows, self.ends, np.int32(below), self.key)
