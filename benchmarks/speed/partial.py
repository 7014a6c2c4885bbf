"""Age, order and loss of groups in partial rollouts: the engine's real scheduling of drawn lengths, without a model.

    python -m benchmarks.speed.partial

Each row has means over the steps after the first STEADY ones, unless its column says otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import grain
import jax
import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.machine.meshes import mesh_over
from jaxrl_llm.rollout.episodes import ENDED, Episodes
from jaxrl_llm.rollout.in_flight import FirstCompleteGroups, InFlightGroups
from jaxrl_llm.rollout.jax.layout import Draws
from jaxrl_llm.rollout.jax.scheduler import Scheduler
from jaxrl_llm.rollout.jax.sizes import sequence_limit, sizes_of
from jaxrl_llm.rollout.jax.stream import Stream
from jaxrl_llm.rollout.samples import CompletionTask, Samples, SampleSource, SamplingPlan
from jaxrl_llm.structs import Prompts
from jaxrl_llm.tools.plan.expected import OTHER, STOP, CountedCalls

STEADY = 4  # first steps, which continue few groups
# {name of a distribution: standard deviation of the logarithm of a length, share of its variance between prompts}
SPREADS = {"moderate": (0.8, 0.5), "wide": (1.2, 0.8)}
PROMPT = 4  # tokens


class DrawnEngine:
    """A stream engine whose completions have drawn lengths. It schedules as the real one, and runs no program."""

    def __init__(self, lengths: np.ndarray, limit: int, devices: int = 1, max_sequences: int = 0):
        """lengths: [N, G] of the completions of each prompt. limit: rollout.max_completion_tokens. max_sequences: most
        completions that hold pages at a time, 0 = those of a batch.
        """
        self._lengths, self._limit, self._devices, self._max_sequences = lengths, limit, devices, max_sequences
        self.version = 0  # version of the weights
        self.turns: list[int] = []  # tokens that a slot of the decode programs computed, for each call

    def sample_first(
        self,
        in_flight: InFlightGroups,
        key: jax.Array,
        *,
        sampling: Sampling,
        wanted_groups: int,
        required_groups: list[int],
    ) -> FirstCompleteGroups:
        """Continues groups until the wanted ones are complete, as `Sampler.sample_first` does."""
        count, group_size = in_flight.has_ended.shape
        max_sequences = sequence_limit(self._max_sequences, wanted_groups * group_size)
        sizes = sizes_of(count, group_size, PROMPT, self._limit, max_sequences=max_sequences)
        episodes = Episodes.from_in_flight(in_flight)
        calls = CountedCalls(sizes, self._lengths[in_flight.prompts.numbers % len(self._lengths)].reshape(-1))
        stream = Stream(
            programs=calls,
            schedulers=[Scheduler(sizes) for _ in range(self._devices)],
            prompts=in_flight.prompts,
            episodes=episodes,
            draws=Draws(np.arange(len(episodes.lengths), dtype=np.int32)),
            stop_ids=(STOP,),
            pad_id=OTHER,
            wanted_groups=wanted_groups,
            required_groups=required_groups,
        )
        stream.run()
        self.turns.append(sum(usage.turns for usage in calls.usage.values()))
        is_new = np.arange(self._limit) >= episodes.earlier_lengths[:, None]
        versions = np.where(is_new, self.version, in_flight.rollouts.versions.reshape(is_new.shape))
        in_flight = in_flight._replace(
            rollouts=episodes.rollouts(group_size, versions),
            has_ended=(episodes.states == ENDED).reshape(count, group_size),
        )
        return FirstCompleteGroups(in_flight, stream.first_groups(), stream.computed_tokens, stream.slot_steps)


def prompts_of(numbers: np.ndarray) -> Prompts:
    """Returns prompts of zeros with these numbers."""
    tokens = np.zeros((len(numbers), PROMPT), np.int32)
    return Prompts(tokens, np.ones(tokens.shape, bool), [{}] * len(numbers), np.asarray(numbers, np.int32))


def make_source(
    engine: DrawnEngine, batch: int, group_size: int, limit: int, *, partial: int, max_age: int
) -> SampleSource:
    """Returns the real source of samples, with prompts numbered from 0 on, and without grading."""

    def batches() -> Iterator[Prompts]:
        first = 0
        while True:
            yield prompts_of(np.arange(first, first + batch))
            first += batch

    tokenizer, ungraded = SimpleNamespace(pad_token_id=OTHER), SimpleNamespace(start=lambda completions: None)
    return SampleSource(
        sampling_plan=SamplingPlan(group_size, Sampling(), partial=partial, max_age=max_age),
        engine=cast(Any, engine),
        prompts=cast(grain.DatasetIterator, batches()),
        collate=prompts_of,
        task=CompletionTask(tokenizer, cast(Any, ungraded)),
        mesh=mesh_over(jax.devices()[:1], data=1, fsdp=1, tensor=1),
        max_completion_tokens=limit,
    )


def sampled_steps(source: SampleSource, steps: int) -> Iterator[Samples]:
    """Yields the samples of the steps. The weights of step s have version s - 1."""
    for step in range(1, steps + 1):
        cast(Any, source.engine).version = step - 1
        yield source.sample(jax.random.key(0))


def drawn_group_lengths(
    groups: int, group_size: int, mean: float, limit: int, spread: tuple[float, float]
) -> np.ndarray:
    """Returns log-normal lengths [groups, G], cut at `limit`. spread: value of SPREADS."""
    sigma, share = spread
    random = np.random.default_rng(0)
    between, within = random.normal(size=(groups, 1)), random.normal(size=(groups, group_size))
    deviations = sigma * (np.sqrt(share) * between + np.sqrt(1 - share) * within)
    # The mean of a log-normal distribution is the median times exp(sigma^2 / 2).
    return np.clip(mean * np.exp(deviations - sigma**2 / 2), 1, limit).round().astype(np.int32)


class Row(NamedTuple):
    """What a run of partial rollouts does to its groups."""

    turns: float  # decode steps of a training step
    age: float  # mean of the trained groups, in steps
    oldest: float  # largest age
    lag: float  # mean age of the trained tokens, in steps
    first_lengths: list[int]  # mean length of the completions of the first steps
    lost_groups: int  # groups with tokens in flight at the end
    lost_length: float  # their mean length, once they are complete


def measure(lengths: np.ndarray, limit: int, batch: int, steps: int, *, partial: int, max_age: int) -> Row:
    """Simulates a run. lengths: [N, G] of the completions of each prompt."""
    engine = DrawnEngine(lengths, limit)
    source = make_source(engine, batch, lengths.shape[1], limit, partial=partial, max_age=max_age)
    first_lengths, lags, ages, oldest = list[int](), list[float](), list[float](), 0.0
    for step, samples in enumerate(sampled_steps(source, steps), 1):
        rollouts = samples.rollouts
        first_lengths += [round(rollouts.completion_mask.sum(axis=-1).mean())] if step <= STEADY else []
        lags.append((step - 1 - rollouts.versions)[rollouts.loss_mask].mean())
        ages.append(samples.metrics["rollout/age"])
        oldest = max(oldest, samples.metrics["rollout/age_max"])
    assert source.in_flight
    lost_rows = source.in_flight.prompts.numbers[source.in_flight.has_begun] % len(lengths)
    turns, age, lag = (float(np.mean(x[STEADY:])) for x in (engine.turns, ages, lags))
    return Row(turns, age, oldest, lag, first_lengths, len(lost_rows), float(lengths[lost_rows].mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--limit", type=int, default=4096, help="largest length of a completion")
    parser.add_argument("--mean", type=float, default=600, help="mean length before the limit cuts")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    batch = args.batch
    cases = [(batch, age) for age in (0, 4, 2, 1)] + [(batch // 2, 4), (batch // 4, 4), (batch // 8, 4)]
    for name, spread in SPREADS.items():
        groups = batch * (args.steps + 1)
        lengths = drawn_group_lengths(groups, args.group_size, args.mean, args.limit, spread)
        whole = lengths[: batch * args.steps].reshape(args.steps, -1)
        print(f"{name}: mean length {lengths.mean():.0f}; {whole.max(axis=1).mean():.0f} decode steps without partial")
        print("partial, max_age: decode steps; age, largest; lag; first lengths; groups that are lost, their length")
        for partial, max_age in cases:
            row = measure(lengths, args.limit, batch, args.steps, partial=partial, max_age=max_age)
            print(
                f"{partial:3}, {max_age}: {row.turns:5.0f}; {row.age:.2f}, {row.oldest:.0f}; {row.lag:.2f}; "
                f"{row.first_lengths}; {row.lost_groups}, {row.lost_length:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
