"""Counts how often a step calls each program of the in-JAX engine, by running its stream with drawn lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import NormalDist

import jax
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine.meshes import mesh_over
from jaxrl_llm.rollout.episodes import ENDED, Episodes
from jaxrl_llm.rollout.in_flight import InFlightGroups
from jaxrl_llm.rollout.jax.compiled import decoding_name, feeding_name, prompts_name
from jaxrl_llm.rollout.jax.layout import Draws
from jaxrl_llm.rollout.jax.programs import Cache, NewPrompts, ObservationChunks, RoundRows, Sampled
from jaxrl_llm.rollout.jax.scheduler import Scheduler
from jaxrl_llm.rollout.jax.sizes import ROUND_TOKENS, Slots, StreamSizes
from jaxrl_llm.rollout.jax.stream import Stream
from jaxrl_llm.structs import AnyArray, Prompts

# Standard deviation of the logarithm of a completion's length: the longest of 100 has six times the median length.
SPREAD = 0.8
# Number of simulated steps with partial rollouts. The last of them continues completions of all lengths, as a run does.
STEPS = 5
OTHER, STOP = 0, 1  # ids of the simulated tokens: OTHER continues a completion, STOP ends it


def drawn_lengths(count: int, mean: float, limit: int, seed: int = 0) -> np.ndarray:
    """Returns lengths [count] of a log-normal distribution, cut at `limit`, whose mean is `mean` after the cut."""
    # Quantiles in the middle of equal parts are used in a random order, because their mean has no noise.
    quantiles = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    deviations = np.random.default_rng(seed).permutation(quantiles)

    def cut_lengths(log_median: float) -> np.ndarray:
        return np.exp(log_median + SPREAD * deviations).clip(1, limit)

    # Bisection finds the median, because the cut at `limit` leaves no formula for the mean.
    low_log_median, high_log_median = -10.0, np.log(limit) + 10.0
    for _ in range(60):
        middle = (low_log_median + high_log_median) / 2
        if cut_lengths(middle).mean() < mean:
            low_log_median = middle
        else:
            high_log_median = middle
    return cut_lengths(high_log_median).round().astype(np.int32)


def check_mean(mean: float, limit: int) -> None:
    """Raises: UserError, if no lengths have this mean."""
    if not 1 <= mean <= limit:
        raise UserError(f"--lengths {mean:g} must be between 1 and config.rollout.max_completion_tokens = {limit}")


@dataclass
class Usage:
    """How much a step uses a program of the in-JAX engine."""

    calls: int = 0
    turns: int = 0  # turns of the loop over tokens, in all calls
    tokens: int = 0  # sampled tokens on all devices
    pages: int = 0  # pages that a device reads in all turns; in each turn, the largest number of any device


class CountedCalls:
    """Counts the calls of a stream (`stream.StreamPrograms`), and runs no program. lengths: [N] of the completions."""

    def __init__(self, sizes: StreamSizes, lengths: np.ndarray):
        self.sizes, self.mesh = sizes, mesh_over(jax.devices()[:1], data=1, fsdp=1, tensor=1)
        self.usage: defaultdict[str, Usage] = defaultdict(Usage)
        self._lengths = lengths

    def prefill(self, cache: Cache | None, prompts: NewPrompts) -> tuple[Cache, AnyArray, AnyArray]:
        """Returns the first tokens [d, n, G] of groups."""
        cache_places, first_numbers = np.asarray(prompts.cache_place), np.asarray(prompts.completion_number)
        usage = self.usage[prompts_name(cache_places.shape[1], self.sizes, first=cache is None)]
        usage.calls += 1
        # A prompt whose place is out of range is padding, for which nothing is sampled.
        usage.tokens += self.sizes.group_size * int(np.sum(cache_places < self.sizes.prompts))
        lengths = self._lengths[first_numbers[..., None] + np.arange(self.sizes.group_size)]
        return Cache([], []), np.where(lengths == 1, STOP, OTHER), np.zeros(lengths.shape, np.float32)

    def grow(self, cache: Cache, pages: int) -> Cache:
        """Counts nothing, because a cache grows once in a run."""
        return cache

    def feed(self, cache: Cache, chunks: ObservationChunks) -> Cache:
        """Counts a call that feeds tokens which an earlier step of partial rollouts has sampled."""
        self.usage[feeding_name(*chunks.tokens.shape[1:])].calls += 1
        return cache

    def decode(self, cache: Cache, rows: RoundRows, running_threshold: int) -> tuple[Cache, Sampled]:
        """Returns the tokens of a round, as `programs.decode` would with a model that samples these lengths."""
        # A sequence of `lengths` tokens samples until its drawn length or its limit. Each turn samples one token.
        lengths, limits = np.asarray(rows.length), np.asarray(rows.limit)  # [d, S]
        final_lengths = self._lengths[np.asarray(rows.completion_number)]
        remaining_tokens = np.where(lengths < limits, np.minimum(limits, final_lengths) - lengths, 0)
        turn_numbers = np.arange(ROUND_TOKENS)
        # The round continues while a device has more running sequences than the threshold.
        is_running = remaining_tokens[..., None] > turn_numbers  # [d, S, turns]
        turns = int(np.sum(np.any(is_running.sum(axis=1) > running_threshold, axis=0)))
        new_tokens = np.minimum(remaining_tokens, turns)
        usage = self.usage[decoding_name(Slots(lengths.shape[1], np.asarray(rows.prompt_places).shape[1]))]
        usage.calls += 1
        usage.turns += turns
        usage.tokens += int(new_tokens.sum())
        usage.pages += self._pages(lengths, new_tokens, turns)
        tokens = np.where(lengths[..., None] + turn_numbers == final_lengths[..., None] - 1, STOP, OTHER)
        # Each pass counts one token, as if no draft was right, because the plan knows no completions.
        return cache, Sampled(tokens, np.zeros(tokens.shape, np.float32), new_tokens, new_tokens)

    def _pages(self, lengths: np.ndarray, new_tokens: np.ndarray, turns: int) -> int:
        """Returns the pages that a device reads in the turns of a decode round.

        lengths: tokens of the sequences [d, S] at the start. new_tokens: number of tokens that each sequence samples.
        """
        # The pages of rows that have ended in this round are read too.
        tokens_read = np.minimum(lengths[..., None] + np.arange(turns), (lengths + new_tokens)[..., None])
        pages = -(-tokens_read // self.sizes.page)
        # If the kernel is missing, attention reads as many pages for each row as the longest row has.
        if not self.sizes.has_kernel:
            pages = np.broadcast_to(pages.max(axis=1, keepdims=True), pages.shape)
        return int(pages.sum(axis=1).max(axis=0).sum())


class Endings:
    """Environments that end each episode after one turn, because answers of tools are unknown."""

    def __init__(self, turn_tokens: int):
        self.turn_tokens = turn_tokens

    def stops(self, episode: int) -> tuple[str, ...]:
        """Returns no strings."""
        return ()

    def possible_turn_ends(self, vocabulary_size: int) -> np.ndarray:
        """Returns False for all tokens."""
        return np.zeros(vocabulary_size, bool)

    def find_turn_ends(self, episodes: Sequence[int], turns: Sequence[list[int]]) -> list[int]:
        """Returns 0 for all turns, because a stop token or the limit ends them."""
        return [0] * len(turns)

    def answer(self, episode: int, turn: list[int]) -> Future[list[int] | None]:
        """Ends the episode."""
        ended: Future[list[int] | None] = Future()
        ended.set_result(None)
        return ended


def expected_usage(
    sizes: StreamSizes, lengths: np.ndarray, devices: int, *, partial: int = 0, max_age: int = 0
) -> dict[str, Usage]:
    """Returns {program: usage} of a step whose completions have these lengths [N].

    partial, max_age: fields of the config section `rollout`, for partial rollouts.
    """
    if partial:
        return _usage_of_partial_rollouts(sizes, lengths, devices, partial, max_age)
    calls = CountedCalls(sizes, lengths)
    texts = Episodes.empty(np.full(len(lengths), sizes.completion_length), sizes.completion_length, OTHER)
    environments = Endings(sizes.completion_length) if sizes.observation else None
    _stream(calls, devices, _prompts(0, len(lengths) // sizes.group_size, sizes), texts, environments).run()
    return dict(calls.usage)


def _usage_of_partial_rollouts(
    sizes: StreamSizes, lengths: np.ndarray, devices: int, partial: int, max_age: int
) -> dict[str, Usage]:
    """Simulates STEPS steps with partial rollouts, and returns the usage of the last step.

    The first step is not typical, because it continues no completion of an earlier step.
    """
    lengths = lengths.reshape(-1, sizes.group_size)
    count, calls = len(lengths), CountedCalls(sizes, lengths)

    def new_groups(step: int) -> InFlightGroups:
        return InFlightGroups.empty(_prompts(step, count, sizes), sizes.group_size, sizes.completion_length, OTHER)

    in_flight = new_groups(0)
    for step in range(1, STEPS):
        # A step works on `count + partial` groups: unfinished groups first, then new ones. Other groups wait.
        in_flight, waiting = in_flight.concatenate(new_groups(step)).split([*range(count + partial)])
        texts = Episodes.from_in_flight(in_flight)
        calls = CountedCalls(sizes, lengths[in_flight.prompts.numbers % count].reshape(-1))
        due_groups = in_flight.due_groups(max_age)
        stream = _stream(calls, devices, in_flight.prompts, texts, wanted_groups=count, required_groups=due_groups)
        stream.run()
        # The groups that are complete first are trained on and leave. The next step continues all others.
        ended = (texts.states == ENDED).reshape(-1, sizes.group_size)
        rollouts = texts.rollouts(sizes.group_size, np.zeros(texts.tokens.shape, np.int32))
        in_flight = in_flight._replace(rollouts=rollouts, has_ended=ended)
        _, in_flight = in_flight.split(stream.first_groups())
        in_flight = in_flight.one_step_later().concatenate(waiting)
    return dict(calls.usage)


def _stream(
    calls: CountedCalls,
    devices: int,
    prompts: Prompts,
    texts: Episodes,
    environments: Endings | None = None,
    wanted_groups: int = 0,
    required_groups: Sequence[int] = (),
) -> Stream:
    """Returns a stream whose programs only count their calls, with as many tokens as `texts` has."""
    schedulers = [Scheduler(calls.sizes) for _ in range(devices)]
    return Stream(
        programs=calls,
        schedulers=schedulers,
        prompts=prompts,
        episodes=texts,
        draws=Draws(np.arange(len(texts.lengths), dtype=np.int32)),
        stop_ids=(STOP,),
        pad_id=OTHER,
        environments=environments,
        wanted_groups=wanted_groups,
        required_groups=[*required_groups],
    )


def _prompts(step: int, count: int, sizes: StreamSizes) -> Prompts:
    """Returns `count` prompts of zeros, which have the numbers that the prompts of this step would have."""
    tokens = np.zeros((count, sizes.prompt_width), np.int32)
    return Prompts(tokens, np.ones(tokens.shape, bool), [{}] * count, np.arange(count, dtype=np.int32) + step * count)
