"""The engine's programs as jitted functions, and as one call of the engine uses them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.machine import keys, sharding
from jaxrl_llm.machine.compilation import COMPILER, ROUND_AS_WRITTEN
from jaxrl_llm.machine.shapes import placed
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.jax import programs
from jaxrl_llm.rollout.jax.cache_attention import CacheIndices
from jaxrl_llm.rollout.jax.programs import Cache, GroupSampling, NewPrompts, ObservationChunks, RoundRows, Sampled
from jaxrl_llm.rollout.jax.sizes import ROUND_TOKENS, Slots, StreamSizes
from jaxrl_llm.structs import AnyArray, Images, PyTree


@lru_cache(maxsize=4)
def programs_of(model: Decoder, mesh: Mesh) -> Programs:
    """Returns the programs of a model on a mesh. A second run in this process does not trace them again."""
    return Programs(model, mesh)


class Programs:
    """The jitted programs of an engine, for all calls and sizes."""

    def __init__(self, model: Decoder, mesh: Mesh):
        self.model, self.mesh = model, mesh
        self.rows = rows = NamedSharding(mesh, sharding.BATCH)
        self.heads = heads = NamedSharding(mesh, sharding.heads_spec(model.cfg.kv_heads, mesh))
        compiled = partial(jax.jit, compiler_options=ROUND_AS_WRITTEN)
        # The output shardings are explicit, because the compiler would otherwise keep all pages on every device.
        prefill_shardings = heads, rows, rows
        self.prefill_first = compiled(
            partial(programs.prefill_first, model), static_argnums=(0, 1), out_shardings=prefill_shardings
        )
        # The cache is donated, so that the devices never hold a second copy.
        samples = partial(compiled, static_argnums=0, donate_argnums=2)
        self.prefill = samples(partial(programs.prefill, model), out_shardings=prefill_shardings)
        self.decode = samples(partial(programs.decode, model), out_shardings=(heads, rows))
        self.decode_drafts = samples(partial(programs.decode_drafts, model), out_shardings=(heads, rows))
        self.empty_cache = compiled(partial(programs.empty_cache, model, mesh), static_argnums=0, out_shardings=heads)
        self.grow = compiled(programs.grow, static_argnums=0, out_shardings=heads)
        self.feed = compiled(partial(programs.feed, model, mesh), donate_argnums=1, out_shardings=heads)

    def traced(
        self, sampling: GroupSampling, sizes: StreamSizes, weights: PyTree, *, continues_groups: bool
    ) -> Iterator[tuple[str, str, Callable[[], jax.stages.Traced]]]:
        """Yields (phase, name, function that traces the program) of each program for calls of these sizes.

        weights: the sampler's weights, or their shapes. continues_groups: whether calls continue completions of
        earlier calls, whose tokens they write into pages.
        """
        devices, model = sharding.prompt_shards(self.mesh), self.model

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((devices, *shape), np.int32, sharding=self.rows)

        def bools(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((devices, *shape), bool, sharding=self.rows)

        key = jax.eval_shape(lambda: keys.key(0))
        cache = placed(jax.eval_shape(partial(programs.empty_cache, model, self.mesh, sizes)), self.heads)

        def indices(count: int, prompts: int, group: int = sizes.group_size) -> CacheIndices:
            return CacheIndices(
                page_table=ints(count, sizes.max_sequence_pages),
                prompt_mask=bools(prompts, sizes.prompt_width),
                prompt_members=ints(prompts, group),
                member_index=ints(count),
                prompt_end=ints(prompts) if sizes.images else None,
            )

        def prompts(count: int) -> NewPrompts:
            images = Images.shapes((devices, count), sizes.prompt_width, sizes.images) if sizes.images else None
            return NewPrompts(
                tokens=ints(count, sizes.prompt_width),
                mask=bools(count, sizes.prompt_width),
                cache_place=ints(count),
                completion_number=ints(count),
                images=placed(images, self.rows),
            )

        first_prompts, later_prompts = prompts(sizes.first_prefill_prompts), prompts(sizes.later_prefill_prompts)
        name = prompts_name(sizes.first_prefill_prompts, sizes, first=True)
        yield "prompts", name, partial(self.prefill_first.trace, sampling, sizes, weights, first_prompts, key)
        if sizes.refills or sizes.first_prefill_prompts < sizes.initial_prompts:
            trace = partial(self.prefill.trace, sampling, weights, cache, later_prompts, key)
            yield "prompts", prompts_name(sizes.later_prefill_prompts, sizes, first=False), trace
        for width in sizes.chunk_tokens(continues_groups=continues_groups):
            count = sizes.fed_sequences
            chunks = ObservationChunks(
                tokens=ints(count, width),
                start=ints(count),
                count=ints(count),
                prompt_place=ints(count),
                indices=indices(count, count, 1),
            )
            yield "prompts", feeding_name(count, width), partial(self.feed.trace, weights, cache, chunks)
        for slots in sizes.slots:
            per_sequence = ints(slots.count)
            rows = RoundRows(
                last_token=per_sequence,
                length=per_sequence,
                limit=per_sequence,
                completion_number=per_sequence,
                known_tokens=ints(slots.count, ROUND_TOKENS),
                indices=indices(*slots),
                prompt_places=ints(slots.prompts),
                drafts=ints(slots.count, ROUND_TOKENS + drafted) if (drafted := sizes.drafted(slots)) else None,
            )
            checked_tokens = jax.ShapeDtypeStruct((model.cfg.vocab_size,), bool)
            threshold = jax.ShapeDtypeStruct((), np.int32)
            decode = self.decode if rows.drafts is None else self.decode_drafts
            trace = partial(decode.trace, sampling, weights, cache, rows, checked_tokens, threshold, key)
            yield "decoding", decoding_name(slots), trace


def prompts_name(count: int, sizes: StreamSizes, *, first: bool) -> str:
    """Returns the name of a prefill program for `count` prompts of a device. first: whether it starts a call."""
    return f"{'prompts' if first else 'later prompts'}, {count} x {sizes.prompt_width} a device"


def feeding_name(count: int, width: int) -> str:
    """Returns the name of the program that writes observation chunks of `width` tokens for `count` sequences."""
    return f"observations, {count} x {width} a device"


def decoding_name(slots: Slots) -> str:
    """Returns the name of the decode program for these slots."""
    return f"decoding, {slots.count} slots a device"


class CompiledAhead:
    """The programs that a background thread compiles before a call needs them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=COMPILER)
        self._jobs: dict[Hashable, Future[Any]] = {}  # compilations that no call has needed so far
        self._needed: set[Hashable] = set()  # programs that a call has needed, and therefore compiled

    def start(self, programs: Iterable[tuple[Hashable, Callable[[], Any]]]) -> None:
        """Starts to compile the programs that no call has needed so far.

        programs: pairs of a program's key, and of the function that compiles the program.
        """
        for key, compile_program in programs:
            if key not in self._needed and key not in self._jobs:
                self._jobs[key] = self._thread.submit(compile_program)

    def wait(self, key: Hashable) -> None:
        """Waits for a program that the thread compiles now. A program that has to wait is left to the caller.

        Raises: UserError, if this program or an earlier one does not fit the memory of a device.
        """
        self._needed.add(key)
        job = self._jobs.pop(key, None)
        if job and not job.cancel():
            job.result()
        # `result` raises the error of a finished compilation.
        for finished_job in [job for job in self._jobs.values() if job.done()]:
            finished_job.result()

    def close(self) -> None:
        """Cancels waiting compilations, and does not wait for a running one: after SIGTERM a run has only seconds."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass
class CallPrograms:
    """The programs with the weights and the key of one call. All processes must call them in the same order."""

    programs: Programs
    compiled_ahead: CompiledAhead
    sampling: GroupSampling
    sizes: StreamSizes
    params: PyTree
    key: jax.Array
    checked_tokens: np.ndarray  # [V] bool, tokens that the host must check, because they may end a turn

    @property
    def mesh(self) -> Mesh:
        return self.programs.mesh

    def empty_cache(self) -> Cache:
        """Returns a cache without prompts, for a stream whose prompts arrive later."""
        return self.programs.empty_cache(self.sizes)

    def prefill(self, cache: Cache | None, prompts: NewPrompts) -> tuple[Cache, AnyArray, AnyArray]:
        """Runs prompts and samples the first tokens of their groups. cache: None for the first prompts of the call."""
        self._wait(prompts_name(prompts.tokens.shape[1], self.sizes, first=cache is None))
        if cache is None:
            return self.programs.prefill_first(self.sampling, self.sizes, self.params, prompts, self.key)
        return self.programs.prefill(self.sampling, self.params, cache, prompts, self.key)

    def grow(self, cache: Cache, pages: int) -> Cache:
        """Gives the cache this many pages on each device."""
        return self.programs.grow(pages, cache)

    def feed(self, cache: Cache, chunks: ObservationChunks) -> Cache:
        """Writes chunks of observations into the pages of their sequences."""
        self._wait(feeding_name(*chunks.tokens.shape[1:]))
        return self.programs.feed(self.params, cache, chunks)

    def decode(self, cache: Cache, rows: RoundRows, running_threshold: int) -> tuple[Cache, Sampled]:
        """Decodes a round. running_threshold: number of running sequences per device at which the round ends."""
        self._wait(decoding_name(Slots(rows.length.shape[1], rows.prompt_places.shape[1])))
        # The threshold is np.int32 as in `Programs.traced`. A weakly typed Python int would need another program.
        decode = self.programs.decode if rows.drafts is None else self.programs.decode_drafts
        return decode(
            self.sampling, self.params, cache, rows, self.checked_tokens, np.int32(running_threshold), self.key
        )

    def _wait(self, name: str) -> None:
        self.compiled_ahead.wait((self.sampling, self.sizes, name))
