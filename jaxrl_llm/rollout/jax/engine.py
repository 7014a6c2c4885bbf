"""The in-JAX engine: samples completions and episodes, on the trainer's devices or on devices of its own.

Sampling is a stream of sequences (`rollout.jax.stream`) through a handful of programs (`rollout.jax.programs`), whose
sizes are known before a run starts (`rollout.jax.sizes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.machine import distributed, sharding, transfers
from jaxrl_llm.machine.compilation import Program
from jaxrl_llm.machine.shapes import abstract
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.episodes import ENDED, Episodes
from jaxrl_llm.rollout.in_flight import FirstCompleteGroups, InFlightGroups
from jaxrl_llm.rollout.jax.cache_attention import page_kind
from jaxrl_llm.rollout.jax.compiled import CallPrograms, CompiledAhead, programs_of
from jaxrl_llm.rollout.jax.drafts import DraftHistory
from jaxrl_llm.rollout.jax.layout import Draws
from jaxrl_llm.rollout.jax.open_stream import Arrivals, OpenStream
from jaxrl_llm.rollout.jax.programs import GroupSampling
from jaxrl_llm.rollout.jax.scheduler import Scheduler
from jaxrl_llm.rollout.jax.sizes import StreamSizes, sequence_limit, sizes_of
from jaxrl_llm.rollout.jax.stream import Stream
from jaxrl_llm.rollout.protocol import EpisodeEnvironments
from jaxrl_llm.rollout.weights import WeightCopier, sampling_decoder
from jaxrl_llm.structs import Prompts, PromptSizes, PyTree, Rollouts

REMEDY = "set engine.pages, or lower engine.max_sequences or rollout.max_completion_tokens"  # advice if memory is short


class Sampler:
    """The in-JAX engine. Its completions depend only on weights, prompts and the caller's random key."""

    # A push of weights is not checked, because every step compares the log-probabilities of sampler and trainer.
    max_gap: float | None = None
    server_count = 1  # the sampler itself

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
        trainer_mesh: Mesh | None = None,
        in_int8: bool = False,
        cache_dtype: str = "",
        observation_tokens: int = 0,
        drafts: int = 0,
    ):
        """max_sequences: most completions that hold pages at a time, 0 = all. pages: pages of a device, 0 = as many as
        the completions may need, bounded by `cache_bytes`. cache_bytes: most bytes of a device for the cache, 0 = no
        bound.

        trainer_mesh: mesh of the pushed weights, None if it is `mesh`. in_int8: whether the sampler's copy of the
        weights has int8 layer kernels. cache_dtype: dtype of keys and values, "int8" or "" = dtype of the model.
        observation_tokens: most tokens of an observation, 0 = no call has environments. drafts: most drafts that a
        pass verifies, 0 = none.
        """
        self._mesh, self._cfg, self._max_sequences = mesh, model.cfg, max_sequences
        self._pages, self._cache_bytes, self._drafts = pages, cache_bytes, drafts
        self._page_kind = page_kind(mesh, model.cfg, cache_dtype)._replace(observation=observation_tokens)
        self._max_completion_tokens, self._stop_ids, self._pad_id = max_completion_tokens, stop_ids, pad_id
        self._params: PyTree = None
        self._version = 0
        decoder = sampling_decoder(model, mesh)
        self._copier = WeightCopier(decoder, mesh, trainer_mesh, in_int8=in_int8)
        # Device for arrays outside of the mesh, such as random keys; None = JAX's default device.
        self._device = mesh.local_devices[0] if self._copier.copies_to_other_devices else None
        self._programs, self._compiled_ahead = programs_of(decoder, mesh), CompiledAhead()
        self._call_counts: Counter[Hashable] = Counter()  # key: sampling and sizes, which decide the programs of a call
        # {sizes of a call: the same with the largest cache that such a call has had so far}
        self._grown_sizes: dict[StreamSizes, StreamSizes] = {}
        self._history = DraftHistory()

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        """Casts the weights to the compute dtype and gathers them over fsdp, once per push and not per token."""
        # Drop the old copy first, so that both copies are never in memory together.
        self._params = None
        self._version = version
        self._params = self._copier(params)

    def release(self) -> None:
        """Drops the copy of the weights if the policy's update needs its memory, on the same devices."""
        if not self._device:
            self._params = None

    def close(self) -> None:
        """Ends the compilation of programs that no call has needed."""
        self._compiled_ahead.close()

    def sample(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        environments: EpisodeEnvironments | None = None,
        max_tokens: np.ndarray | None = None,
        report_ended: Callable[[int], None] = lambda count: None,
    ) -> Rollouts:
        """Samples `group_size` completions or episodes of each prompt.

        environments: environments of the episodes, None for completions of a single turn. max_tokens [B, G]: limits of
        completions of a single turn, None = the run's limit for all. report_ended(count): is called with the number of
        newly ended completions.
        """
        limits = np.full((len(prompts.tokens), group_size), self._max_completion_tokens)
        if max_tokens is not None:
            limits = np.minimum(max_tokens, self._max_completion_tokens)
        episodes = Episodes.empty(limits.reshape(-1), self._max_completion_tokens, self._pad_id)
        group_sampling = GroupSampling(group_size, sampling, self._mesh)
        self._stream(prompts, key, group_sampling, episodes, environments=environments, report_ended=report_ended)
        return episodes.rollouts(group_size, np.full(episodes.tokens.shape, self._version, np.int32))

    def sample_first(
        self,
        in_flight: InFlightGroups,
        key: jax.Array,
        *,
        sampling: Sampling,
        wanted_groups: int,
        required_groups: list[int],
    ) -> FirstCompleteGroups:
        """Continues groups until `wanted_groups` of them are complete. Returns all groups, and which are complete.

        in_flight: groups that may have started in an earlier call, with older weights. required_groups: groups that
        must be among the complete ones.
        """
        group_size, episodes = in_flight.has_ended.shape[1], Episodes.from_in_flight(in_flight)
        group_sampling = GroupSampling(group_size, sampling, self._mesh)
        stream = self._stream(
            in_flight.prompts,
            key,
            group_sampling,
            episodes,
            environments=in_flight.environments,
            wanted_groups=wanted_groups,
            required_groups=required_groups,
        )
        sampled_earlier = np.arange(self._max_completion_tokens) < episodes.earlier_lengths[:, None]
        earlier_versions = in_flight.rollouts.versions.reshape(sampled_earlier.shape)
        versions = np.where(sampled_earlier, earlier_versions, np.int32(self._version))
        has_ended = (episodes.states == ENDED).reshape(-1, group_size)
        is_turn_start = episodes.is_turn_start.reshape(in_flight.is_turn_start.shape)
        in_flight = in_flight._replace(
            rollouts=episodes.rollouts(group_size, versions), has_ended=has_ended, is_turn_start=is_turn_start
        )
        return FirstCompleteGroups(in_flight, stream.first_groups(), stream.computed_tokens, stream.slot_steps)

    def _stream(
        self,
        prompts: Prompts,
        key: jax.Array,
        group_sampling: GroupSampling,
        episodes: Episodes,
        *,
        environments: EpisodeEnvironments | None = None,
        wanted_groups: int = 0,
        required_groups: Sequence[int] = (),
        report_ended: Callable[[int], None] = lambda count: None,
    ) -> Stream:
        """Samples the completions into `episodes`, and returns the finished stream."""
        count, processes, group_size = len(prompts.tokens), distributed.count(), group_sampling.group_size
        widest_sizes = self._sizes(count * processes, group_size, prompts.sizes, wanted_groups * processes)
        prompts = self._narrowed(prompts)
        first_sizes = self._sizes(count * processes, group_size, prompts.sizes, wanted_groups * processes)
        sizes = self._grown_sizes.get(first_sizes, first_sizes)
        # The numbers count over all processes, so a completion's random numbers do not depend on its process.
        first_number = distributed.part(count * processes).start * group_size
        checked_tokens = np.zeros(self._cfg.vocab_size, bool)
        if environments:
            # Completions may use decode programs of several sizes, but episodes need a single size (`StreamSizes`).
            assert sizes.observation, "an engine for episodes needs observation_tokens"
            checked_tokens = environments.possible_turn_ends(self._cfg.vocab_size)
        checked_tokens[list(self._stop_ids)] = True
        with jax.default_device(self._device):
            # The widest sizes too, so that a run whose first long prompt comes late learns early if it does not fit.
            for future_sizes in dict.fromkeys((sizes, widest_sizes)):
                self._compile_remaining(group_sampling, future_sizes, continues_groups=wanted_groups > 0)
            stream = Stream(
                programs=CallPrograms(
                    programs=self._programs,
                    compiled_ahead=self._compiled_ahead,
                    sampling=group_sampling,
                    sizes=sizes,
                    params=self._params,
                    key=key,
                    checked_tokens=checked_tokens,
                ),
                schedulers=[Scheduler(sizes) for _ in range(sharding.prompt_shards(self._mesh) // processes)],
                prompts=prompts,
                episodes=episodes,
                draws=Draws(np.arange(len(episodes.lengths), dtype=np.int32) + np.int32(first_number)),
                stop_ids=self._stop_ids,
                pad_id=self._pad_id,
                environments=environments,
                wanted_groups=wanted_groups,
                required_groups=[*required_groups],
                report_ended=report_ended,
                history=self._history,
            )
            stream.run()
        if sizes.drafts:
            self._history.add(prompts, episodes, group_size)
        self._grown_sizes[first_sizes] = stream.sizes
        return stream

    def open_stream(
        self, arrivals: Arrivals, key: jax.Array, *, rows: int, prompt_width: int, sampling: Sampling
    ) -> OpenStream:
        """Returns a stream for sequences that arrive at any time, with the weights of the last push.

        Its tokens and log-probabilities equal those of `sample` with the same key, completion number and program sizes.
        rows: sequences at a time. prompt_width: most tokens of a prompt. sampling: top_k and top_p of all sequences;
        its temperature must be 1, because each sequence has its own.
        """
        assert sampling.temperature == 1 and distributed.count() == 1
        sizes = self._sizes(rows, 1, PromptSizes(prompt_width), 0)
        # A cache that grows would stop all sequences while its programs are compiled again.
        sizes = replace(sizes, refills=True, is_open=True, allocated_pages=sizes.pages)
        checked_tokens = np.zeros(self._cfg.vocab_size, bool)
        checked_tokens[list(self._stop_ids)] = True
        tokens, mask = np.full((rows, prompt_width), self._pad_id, np.int32), np.zeros((rows, prompt_width), bool)
        return OpenStream(
            programs=CallPrograms(
                programs=self._programs,
                compiled_ahead=self._compiled_ahead,
                sampling=GroupSampling(1, sampling, self._mesh),
                sizes=sizes,
                params=self._params,
                key=key,
                checked_tokens=checked_tokens,
            ),
            schedulers=[Scheduler(sizes) for _ in range(sharding.prompt_shards(self._mesh))],
            prompts=Prompts(tokens, mask, [], np.arange(rows)),
            episodes=Episodes.empty(
                np.full(rows, self._max_completion_tokens), self._max_completion_tokens, self._pad_id
            ),
            draws=Draws(np.zeros(rows, np.int32), np.ones(rows, np.float32), np.zeros(rows, np.int32)),
            stop_ids=self._stop_ids,
            pad_id=self._pad_id,
            arrivals=arrivals,
            version=self._version,
            device=self._device,
        )

    def programs(
        self,
        params: PyTree,
        prompts: int,
        prompt_sizes: PromptSizes,
        group_size: int,
        sampling: Sampling,
        *,
        wanted_groups: int = 0,
    ) -> Iterator[Program]:
        """Yields each program that calls of these sizes may run, the largest of a phase first, to compile or plan it.

        params: pushed parameters, or their shapes, of which the programs read the engine's copy. wanted_groups: groups
        with which `sample_first` ends; 0 = calls of `sample`.
        """
        yield from self._copier.programs(params)
        group_sampling = GroupSampling(group_size, sampling, self._mesh)
        sizes = self._sizes(prompts, group_size, prompt_sizes, wanted_groups)
        weights = self._copier.shapes(params)
        traced = self._programs.traced(group_sampling, sizes, weights, continues_groups=wanted_groups > 0)
        for phase, name, trace in traced:
            yield Program(phase, name, trace, REMEDY, ())

    def _compile_remaining(self, sampling: GroupSampling, sizes: StreamSizes, *, continues_groups: bool) -> None:
        """Compiles in the background, from the second call of these sizes on, the programs that the first did not need.

        So hardly any later step waits for the compiler. continues_groups: whether the call continues completions of an
        earlier call.
        """
        call = sampling, sizes, continues_groups
        self._call_counts[call] += 1
        if self._call_counts[call] == 2:
            traced = self._programs.traced(sampling, sizes, abstract(self._params), continues_groups=continues_groups)
            programs = (Program(phase, name, trace, REMEDY, ()) for phase, name, trace in traced)
            self._compiled_ahead.start(((sampling, sizes, x.name), partial(self._compile, x)) for x in programs)

    def _compile(self, program: Program) -> None:
        with jax.default_device(self._device):  # which each thread sets for itself
            program.compile()

    def _narrowed(self, prompts: Prompts) -> Prompts:
        """Returns the prompts cut to the smallest of their sizes that holds the prompts of all processes."""
        if not prompts.smaller:
            return prompts
        number = prompts.prompt.count_sizes(prompts.smaller).min()
        # The prompt that the fewest sizes hold decides, and the minimum is the negative maximum.
        return prompts.narrowed(-int(transfers.max_over_processes(np.array([-number], np.int32), self._mesh)[0]))

    def _sizes(self, prompts: int, group_size: int, prompt_sizes: PromptSizes, wanted_groups: int) -> StreamSizes:
        """Returns the sizes of a call. wanted_groups: complete groups with which the call ends, 0 = all groups."""
        sizes = sizes_of(
            prompts,
            group_size,
            prompt_sizes.width,
            self._max_completion_tokens,
            max_sequences=sequence_limit(self._max_sequences, wanted_groups * group_size),
            pages=self._pages,
            cache_bytes=self._cache_bytes,
            kind=self._page_kind,
        )
        # Right drafts would decide which groups are complete first, and so which groups a step has.
        return replace(sizes, images=prompt_sizes.images, drafts=0 if wanted_groups else self._drafts)
