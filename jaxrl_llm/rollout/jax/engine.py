"""The in-JAX engine: samples completions and episodes with the weights of the trainer, on its devices or on others.

Sampling is a stream of sequences (`rollout.jax.stream`) through a handful of programs (`rollout.jax.programs`), whose
sizes are known beforehand (`rollout.jax.sizes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import abstract
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.episodes import ENDED, Episodes
from jaxrl_llm.rollout.in_flight import FirstComplete, InFlightGroups
from jaxrl_llm.rollout.jax.cache_attention import page_kind
from jaxrl_llm.rollout.jax.compiled import CallPrograms, Programs
from jaxrl_llm.rollout.jax.programs import GroupSampling
from jaxrl_llm.rollout.jax.scheduler import Scheduler
from jaxrl_llm.rollout.jax.sizes import StreamSizes, sequence_limit, sizes_of
from jaxrl_llm.rollout.jax.stream import Stream
from jaxrl_llm.rollout.protocol import Environments
from jaxrl_llm.rollout.weights import Placing, sampling_decoder
from jaxrl_llm.structs import ImageSizes, Prompts, PyTree, Rollouts

REMEDY = "set engine.pages, or lower engine.max_sequences or rollout.max_completion_tokens"  # if memory is short


class Sampler:
    """The in-JAX engine. The caller gives the key: the same key gives the same completions."""

    # None: every step compares sampler and trainer anyway.
    max_gap: float | None = None
    servers = 1

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        max_completion_tokens: int,
        stop_ids: tuple[int, ...],
        pad_id: int,
        max_sequences: int = 0,
        pages: int = 0,
        cache_bytes: int = 0,
        trainer: Mesh | None = None,
        in_int8: bool = False,
        cache_dtype: str = "",
        observation_tokens: int = 0,
    ):
        """max_sequences: completions that hold pages at once, 0 = all. pages: number of pages of a device, 0 = as many
        as the completions may need, and at most as many as `cache_bytes` of a device hold (0 = no such bound).

        trainer: mesh of the pushed weights, None if it is `mesh`. in_int8: whether the copy's layer kernels are int8.
        cache_dtype: dtype of keys and values, "int8" or "" = dtype of the model. observation_tokens: largest number of
        tokens of an observation, 0 = no call has environments.
        """
        self._mesh, self._cfg, self._max_sequences = mesh, model.cfg, max_sequences
        self._pages, self._cache_bytes = pages, cache_bytes
        self._kind = page_kind(mesh, model.cfg, cache_dtype)._replace(observation=observation_tokens)
        self._length, self._stops, self._pad = max_completion_tokens, stop_ids, pad_id
        self._params: PyTree = None
        self._version = 0
        decoder = sampling_decoder(model, mesh)
        self._place = Placing(decoder, mesh, trainer, in_int8=in_int8)
        # A device for what a call computes without a mesh; None: JAX's own choice.
        self._device = mesh.local_devices[0] if self._place.moves else None
        self._programs = Programs(decoder, mesh)
        self._calls: Counter[Hashable] = Counter()  # by what their programs depend on

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        """Casts the weights to the compute dtype and gathers them over fsdp, once per push and not per token."""
        # First, so that the old and the new copy are not in memory together.
        self._params = None
        self._version = version
        self._params = self._place(params)

    def release(self) -> None:
        """Frees the gathered weights where the update of the policy needs the memory."""
        if not self._device:
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
        ended: Callable[[int], None] = lambda count: None,
    ) -> Rollouts:
        """Samples `group_size` completions of each prompt, or episodes, on the host. See `protocol.Engine`."""
        limits = np.full((len(prompts.tokens), group_size), self._length)
        if max_tokens is not None:
            limits = np.minimum(max_tokens, self._length)
        texts = Episodes.empty(limits.reshape(-1), self._length, self._pad)
        fixed = GroupSampling(group_size, sampling, self._mesh)
        self._stream(prompts, key, fixed, texts, environments=environments, ended=ended)
        return texts.rollouts(group_size, np.full(texts.tokens.shape, self._version, np.int32))

    def sample_first(
        self, in_flight: InFlightGroups, key: jax.Array, *, sampling: Sampling, enough: int
    ) -> FirstComplete:
        """Samples until `enough` groups are complete. See `in_flight.StreamEngine`."""
        group, texts = in_flight.ended.shape[1], Episodes.going_on(in_flight)
        fixed = GroupSampling(group, sampling, self._mesh)
        stream = self._stream(in_flight.prompts, key, fixed, texts, environments=in_flight.environments, enough=enough)
        earlier = np.arange(self._length) < texts.earlier[:, None]
        versions = np.where(earlier, in_flight.rollouts.versions.reshape(earlier.shape), np.int32(self._version))
        ended = (texts.state == ENDED).reshape(-1, group)
        begins = texts.begins.reshape(in_flight.begins.shape)
        in_flight = in_flight._replace(rollouts=texts.rollouts(group, versions), ended=ended, begins=begins)
        return FirstComplete(in_flight, stream.complete[:enough], 1 - stream.computed / max(stream.places, 1))

    def _stream(
        self,
        prompts: Prompts,
        key: jax.Array,
        fixed: GroupSampling,
        texts: Episodes,
        *,
        environments: Environments | None = None,
        enough: int = 0,
        ended: Callable[[int], None] = lambda count: None,
    ) -> Stream:
        """Samples completions, and returns the stream that has ended."""
        count, processes = len(prompts.tokens), distributed.count()
        width = prompts.tokens.shape[1]
        images = prompts.images.sizes if prompts.images else None
        sizes = self._sizes(count * processes, fixed.group, width, enough * processes, images)
        ends = np.zeros(self._cfg.vocab_size, bool)
        if environments:
            # Sizes of completions depend on how many compute together, and so on the time of tools.
            assert sizes.observation, "an engine for episodes needs observation_tokens"
            ends = environments.may_end(self._cfg.vocab_size)
        ends[list(self._stops)] = True
        with jax.default_device(self._device):
            self._compile_rest(fixed, sizes, goes_on=enough > 0)
            stream = Stream(
                calls=CallPrograms(
                    programs=self._programs, sampling=fixed, sizes=sizes, params=self._params, key=key, ends=ends
                ),
                schedulers=[Scheduler(sizes) for _ in range(sharding.prompt_shards(self._mesh) // processes)],
                prompts=prompts,
                texts=texts,
                # By its number a completion draws the same random numbers in any process.
                first=distributed.part(count * processes).start * fixed.group,
                stop_ids=self._stops,
                pad_id=self._pad,
                environments=environments,
                enough=enough,
                ended=ended,
            )
            stream.run()
        return stream

    def programs(
        self,
        params: PyTree,
        prompts: int,
        width: int,
        group: int,
        sampling: Sampling,
        *,
        enough: int = 0,
        image_sizes: ImageSizes | None = None,
    ) -> Iterator[Program]:
        """Yields each program for batches of these sizes, the largest of a phase first. params: arrays or shapes.

        enough: groups with which `sample_first` ends, 0 = `sample`. image_sizes: sizes of the prompts' images,
        None if prompts have no images.
        """
        yield from self._place.programs(params)
        group_sampling, sizes = (
            GroupSampling(group, sampling, self._mesh),
            self._sizes(prompts, group, width, enough, image_sizes),
        )
        traced = self._programs.traced(group_sampling, sizes, self._place.shapes(params), goes_on=enough > 0)
        for phase, name, trace in traced:
            yield Program(phase, name, trace, REMEDY, ())

    def _compile_rest(self, sampling: GroupSampling, sizes: StreamSizes, *, goes_on: bool) -> None:
        """Compiles at the second call all its programs that the first did not need: no later step stops for one."""
        call = sampling, sizes, goes_on
        self._calls[call] += 1
        if self._calls[call] == 2:
            traced = self._programs.traced(sampling, sizes, abstract(self._params), goes_on=goes_on)
            for phase, name, trace in traced:
                Program(phase, name, trace, REMEDY, ()).compile()

    def _sizes(self, prompts: int, group: int, width: int, enough: int, images: ImageSizes | None) -> StreamSizes:
        """Returns the sizes of a call; enough: complete groups with which it ends, 0: all."""
        bounds: dict[str, Any] = dict(pages=self._pages, cache_bytes=self._cache_bytes, kind=self._kind)
        most = sequence_limit(self._max_sequences, enough * group)
        sizes = sizes_of(prompts, group, width, self._length, max_sequences=most, **bounds)
        return replace(sizes, images=images)
