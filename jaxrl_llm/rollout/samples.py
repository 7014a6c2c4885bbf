"""The completions of a step and their rewards; DAPO's dynamic sampling (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.rollout.environments import EnvironmentBatch, EnvironmentPool
from jaxrl_llm.rollout.grading import Completions, GradedCompletions, RewardFn
from jaxrl_llm.rollout.in_flight import FirstComplete, InFlightGroups, StreamEngine
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.structs import Array, Batch, Collate, Prompts, Rewards, Rollouts

SAMPLING = "sampling"  # channel of the thread that samples


@dataclass(frozen=True)
class Samples:
    """Prompts and their completions, on the host."""

    prompts: Prompts
    rollouts: Rollouts
    wait_for_grades: Callable[[], GradedCompletions]  # waits for the reward functions; the device can score meanwhile
    greedy: Samples | None = None  # greedy completions of the same prompts, with G = 1
    masks_truncated: bool = False  # True: truncated completions are not trained on
    metrics: dict[str, Any] = field(default_factory=dict)  # of the sampling
    position: dict[str, Any] = field(default_factory=dict)  # of the actor's data and shapes after these prompts
    in_flight: InFlightGroups | None = None  # the groups that go on after these
    replaced_rows: list[int] = field(default_factory=list)  # numbers of rows whose groups had no signal and gave way
    replacements: list[GroupReplacement] = field(default_factory=list)  # of `refill`, until they are `settled`

    @property
    def no_signal(self) -> np.ndarray:
        """True for groups [B] that teach nothing.

        All completions have the same reward, none has one, or the token limit cut all and the run does not train on
        such ones.
        """
        total = self.wait_for_grades().rewards.total
        differ = np.fmax.reduce(total, axis=1) > np.fmin.reduce(total, axis=1)  # both ignore NaN
        return ~(differ & self.trained.any(axis=(1, 2)))

    @property
    def trained(self) -> np.ndarray:
        """True for tokens [B, G, C] that are trained on."""
        return self.rollouts.loss_mask & ~(self.rollouts.truncated & self.masks_truncated)[..., None]

    def tokens(self) -> int:
        """Returns the number of sampled tokens."""
        return int(self.rollouts.completion_mask.sum())

    def rewards(self) -> Rewards:
        """Waits for the reward functions and returns the rewards."""
        rewards = self.wait_for_grades().rewards
        if not self.greedy:
            return rewards
        greedy, lengths = self.greedy.wait_for_grades().rewards.total, self.greedy.rollouts.completion_mask.sum(axis=-1)
        return replace(rewards, greedy=greedy, greedy_lengths=lengths)


class GroupReplacement(NamedTuple):
    """Groups `sources` of a fresh batch replace groups `at`: their numbers in the batches of all processes."""

    at: np.ndarray
    fresh: Samples
    sources: np.ndarray


def measured_alike(rollouts: Rollouts, channel: str) -> Rollouts:
    """Returns rollouts with the metrics that the environments of any process measured; 0 where one did not.

    So rewards get the columns that they get in one process, and checkpoints the same arrays. channel: name of the
    sequence of calls, as for `exchange`.
    """
    names = distributed.exchange([*rollouts.episodes], channel)
    return rollouts.measured(sorted({*chain(*names)}))


def per_episode(rollouts: Rollouts) -> list[list[dict[str, float]]]:
    """Returns what environments measured, B x G. Without the time, so that a reward is the same in a resumed run."""
    named = {name: values.tolist() for name, values in rollouts.episodes.items() if name != "seconds"}
    b, g = rollouts.truncated.shape
    return [[{name: values[i][j] for name, values in named.items()} for j in range(g)] for i in range(b)]


@dataclass(frozen=True)
class CompletionTask:
    """The environments that completions talk to, and the reward functions that judge their text."""

    tokenizer: Any
    score: RewardFn
    environments: EnvironmentPool | None = None  # None: a completion is one turn

    def sample(
        self,
        engine: Engine,
        prompts: Prompts,
        key: Array,
        group_size: int,
        sampling: Sampling,
        channel: str,
        ended: Callable[[int], None] = lambda count: None,
    ) -> Rollouts:
        """Samples completions of one turn, or episodes if there are environments.

        channel: argument of `measured_alike`; ended: argument of `Engine.sample`.
        """
        batch = self.environments.begin(prompts.rows, group_size) if self.environments else None
        rollouts = engine.sample(
            prompts, key, group_size=group_size, sampling=sampling, environments=batch, ended=ended
        )
        return _with_measured(rollouts, batch, channel) if batch else rollouts

    def begin(self, prompts: Prompts, group_size: int, length: int) -> InFlightGroups:
        """Returns groups that begin, with room for `length` tokens in each completion."""
        return self.opened(InFlightGroups.begin(prompts, group_size, length, self.tokenizer.pad_token_id))

    def opened(self, in_flight: InFlightGroups) -> InFlightGroups:
        """Returns groups with the environments of their episodes. Those of a resumed run are played again."""
        if in_flight.environments or not self.environments:
            return in_flight
        rollouts, turns = in_flight.rollouts, in_flight.past_turns()
        batch = self.environments.begin(in_flight.prompts.rows, in_flight.ended.shape[1])
        batch.replay(turns, rollouts.episodes, rollouts.truncated)
        return in_flight._replace(environments=batch)

    def sample_first(
        self, engine: StreamEngine, in_flight: InFlightGroups, key: Array, sampling: Sampling, enough: int, channel: str
    ) -> FirstComplete:
        """Samples until `enough` groups are complete. channel: argument of `measured_alike`."""
        first = engine.sample_first(in_flight, key, sampling=sampling, enough=enough)
        if not (batch := in_flight.environments):
            return first
        rollouts = _with_measured(first.in_flight.rollouts, batch, channel)
        # All episodes get all metrics, as they have after a resume.
        batch.recall(rollouts.episodes, rollouts.truncated)
        return first._replace(in_flight=first.in_flight._replace(rollouts=rollouts))

    def grade(self, prompts: Prompts, rollouts: Rollouts) -> GradedCompletions:
        """Returns texts and rewards, once the reward functions have judged."""
        return self.score(*self.completions(prompts, rollouts))

    def completions(self, prompts: Prompts, rollouts: Rollouts) -> Completions:
        """Decodes completions for the reward functions, with the columns of `tasks` if there are environments."""
        tokens, mask = rollouts.completions, rollouts.completion_mask
        texts, ids = data.decode(self.tokenizer, tokens, mask)
        if not self.environments:
            return Completions(prompts.rows, texts, ids)
        turns = data.decode_turns(self.tokenizer, tokens, mask, rollouts.loss_mask)
        groups = zip(rollouts.loss_mask, mask, strict=True)
        loss_masks = [[row[real].tolist() for row, real in zip(*group, strict=True)] for group in groups]
        columns = {"turns": turns, "episode": per_episode(rollouts), "loss_mask": loss_masks}
        return Completions(prompts.rows, texts, ids, columns)


def _with_measured(rollouts: Rollouts, batch: EnvironmentBatch, channel: str) -> Rollouts:
    """Returns episodes with what their environments measured."""
    truncated = rollouts.truncated | batch.truncated
    return measured_alike(replace(rollouts, truncated=truncated, episodes=batch.metrics()), channel)


class SampledGroups(NamedTuple):
    """The groups of one call of the engine."""

    prompts: int
    enough: int = 0  # complete ones, with which the call ends (`in_flight.StreamEngine`); 0: all


class SamplingPlan(NamedTuple):
    """What a step samples for each of its prompts."""

    group_size: int  # completions
    sampling: Sampling
    resample_rounds: int = 0  # of fresh prompts, at most, for groups without a signal
    greedy: bool = False  # also the greedy completion
    masks_truncated: bool = False  # completions that the limit cut are not trained on
    partial: bool = False  # the first groups that are complete are a batch, the others go on for the next one


@dataclass
class SampleSource:
    """Samples completions for the next prompts and starts the reward functions."""

    sampling_plan: SamplingPlan
    engine: Engine
    prompts: grain.DatasetIterator
    collate: Collate
    task: CompletionTask
    mesh: Mesh
    max_completion_tokens: int
    in_flight: InFlightGroups | None = None  # the groups that go on, of partial rollouts

    def sample(self, key: Array) -> Samples:
        """Samples the next prompts. The main thread calls `apply_replacements` for the groups that were replaced."""
        plan, metrics = self.sampling_plan, {}
        if plan.partial:
            return self._with_greedy(self._first_complete(key), key)

        def draw(key: Array) -> Samples:
            return self._draw(next(self.prompts), key, plan.group_size, plan.sampling)

        samples = draw(key)
        if plan.resample_rounds:
            metrics = {"groups/no_signal_sampled": distributed.gather(samples.no_signal, SAMPLING).mean()}

            def draw_again(attempt: int) -> Samples:
                return draw(jax.random.fold_in(key, np.uint32(attempt)))

            samples, metrics["groups/replaced"] = refill(samples, draw_again, self.collate, plan.resample_rounds)
        # The greedy companions are sampled after `refill`, which may replace prompts.
        return self._with_greedy(replace(samples, metrics=metrics), key)

    def apply_replacements(self, samples: Samples) -> Samples:
        """Returns samples whose replaced groups are in their places. The main thread calls it, in all processes."""
        return apply_replacements(samples, self.task.tokenizer, self.mesh)

    def to_checkpoint(self, samples: Samples) -> dict[str, Any]:
        """Returns the arrays that a checkpoint keeps of a batch that no update has used yet, on the devices."""
        greedy = {"greedy": samples.greedy.rollouts} if samples.greedy else {}
        arrays = {"numbers": samples.prompts.numbers, "rollouts": samples.rollouts} | greedy
        return sharding.shard_batch(arrays, self.mesh)

    def from_checkpoint(self, arrays: dict[str, Any], metrics: dict[str, Any], replaced_rows: list[int]) -> Samples:
        """Rebuilds the batch of `to_checkpoint` and grades it again. A checkpoint holds dataclasses as dicts."""
        # A checkpoint has no texts and no rewards: both follow from the rows and the tokens.
        arrays = sharding.to_host(arrays)
        prompts = self.collate(arrays["numbers"])
        rollouts, *greedy = (Rollouts(**arrays[name]) for name in ("rollouts", "greedy") if name in arrays)
        samples = replace(self._graded(prompts, rollouts), metrics=metrics, replaced_rows=replaced_rows)
        return replace(samples, greedy=self._graded(prompts, greedy[0])) if greedy else samples

    def _with_greedy(self, samples: Samples, key: Array) -> Samples:
        if not self.sampling_plan.greedy:
            return samples
        return replace(samples, greedy=self._draw(samples.prompts, key, 1, Sampling(temperature=0)))

    def _first_complete(self, key: Array) -> Samples:
        """Samples until as many groups are complete as a batch has. The others go on in the next call."""
        group, length = self.sampling_plan.group_size, self.max_completion_tokens
        begin = partial(self.task.begin, group_size=group, length=length)
        # The first call begins two batches, so that another group can always begin when a group is complete.
        in_flight = self.task.opened(self.in_flight) if self.in_flight else begin(next(self.prompts))
        enough = len(in_flight.ended)
        in_flight = in_flight.joined(begin(next(self.prompts)))
        carried = in_flight.rollouts.completion_mask.any(axis=(1, 2))
        engine = cast(StreamEngine, self.engine)
        in_flight, first, idle = self.task.sample_first(
            engine, in_flight, key, self.sampling_plan.sampling, enough, SAMPLING
        )
        batch, self.in_flight = in_flight.split(first)
        measured = {"rollout/carried": carried[first], "rollout/idle_slots": np.array([idle], np.float32)}
        metrics = {name: distributed.gather(values, SAMPLING).mean() for name, values in measured.items()}
        return replace(self._graded(batch.prompts, batch.rollouts), in_flight=self.in_flight, metrics=metrics)

    def _draw(self, prompts: Prompts, key: Array, group_size: int, sampling: Sampling) -> Samples:
        return self._graded(prompts, self.task.sample(self.engine, prompts, key, group_size, sampling, SAMPLING))

    def _graded(self, prompts: Prompts, rollouts: Rollouts) -> Samples:
        graded = self.task.score.start(partial(self.task.completions, prompts, rollouts))
        return Samples(prompts, rollouts, graded, masks_truncated=self.sampling_plan.masks_truncated)


def refill(samples: Samples, draw: Callable[[int], Samples], collate: Collate, rounds: int) -> tuple[Samples, int]:
    """Replaces groups without signal by groups of `draw(1)`, `draw(2)` ..., and counts the replaced groups.

    Stops when every group has a signal, or after `rounds` rounds. Drops the fresh groups that it does not need.
    A group gives way to one of its own source alone: otherwise an easy or a hard source would vanish from a mixture.
    A group may go to another process. Completions and rewards are moved later (`apply_replacements`): this may be a
    thread, beside programs of the main thread on the same devices.
    """
    lacks, numbers, sources = _groups_of_all_processes(samples)
    without, replacements = numbers[lacks].tolist(), []
    # All processes see all groups, so they stop after the same round.
    for i in range(1, rounds + 1):
        if not lacks.any():
            break
        fresh = draw(i)
        fresh_lacks, fresh_numbers, fresh_sources = _groups_of_all_processes(fresh)
        without += fresh_numbers[fresh_lacks].tolist()
        pairs = list[tuple[int, int]]()
        for name in dict.fromkeys(sources[lacks]):
            places = np.flatnonzero(lacks & (sources == name))
            replacements = np.flatnonzero(~fresh_lacks & (fresh_sources == name))
            pairs.extend(zip(places.tolist(), replacements.tolist(), strict=False))
        at, replacing = np.array(pairs, int).reshape(-1, 2).T
        lacks[at], numbers[at] = False, fresh_numbers[replacing]
        replacements += [GroupReplacement(at, fresh, replacing)] if len(at) else []
    prompts = collate(numbers[distributed.part(len(numbers))]) if replacements else samples.prompts
    return replace(samples, prompts=prompts, replacements=replacements, replaced_rows=without), sum(
        len(move.at) for move in replacements
    )


def _groups_of_all_processes(samples: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns for the groups of all processes: whether a group has no signal, its row number, and its source."""
    prompts = samples.prompts
    # The array holds objects, because an array of text would cut the names of other processes to the longest name here.
    sources = np.array(prompts.sources or [""] * len(prompts.numbers), object)
    no_signal, numbers, sources = (
        distributed.gather(x, SAMPLING) for x in (samples.no_signal, prompts.numbers, sources)
    )
    return no_signal, numbers, sources


def apply_replacements(samples: Samples, tokenizer: Any, mesh: Mesh) -> Samples:
    """Moves completions and rewards to the places of the groups that they replace. All processes call it together."""
    rollouts, graded = samples.rollouts, samples.wait_for_grades
    for replacement in samples.replacements:
        rollouts, moved = _move_groups(rollouts, graded(), replacement, tokenizer, mesh)
        graded = partial(GradedCompletions, *moved)
    return replace(samples, rollouts=rollouts, wait_for_grades=graded, replacements=[])


def _move_groups(
    rollouts: Rollouts, graded: GradedCompletions, replacement: GroupReplacement, tokenizer: Any, mesh: Mesh
) -> tuple[Rollouts, GradedCompletions]:
    at, fresh, sources = replacement
    # The metrics of two batches may have other names: an environment need not give all of them.
    names = sorted({*rollouts.episodes, *fresh.rollouts.episodes})
    old = rollouts.measured(names), graded.rewards
    new = fresh.rollouts.measured(names), fresh.wait_for_grades().rewards
    rollouts, rewards = sharding.put_groups(old, new, at, sources, mesh)
    part = distributed.part(len(rollouts.truncated) * distributed.count())
    local = at[(part.start <= at) & (at < part.stop)] - part.start
    if not len(local):
        return rollouts, graded._replace(rewards=rewards)
    # Their texts follow from their tokens.
    tokens, mask, loss_mask = (x[local] for x in (rollouts.completions, rollouts.completion_mask, rollouts.loss_mask))
    texts = dict(zip(local.tolist(), data.decode(tokenizer, tokens, mask)[0], strict=True))
    turns = dict(zip(local.tolist(), data.decode_turns(tokenizer, tokens, mask, loss_mask), strict=True))
    all_texts = [texts.get(b, group) for b, group in enumerate(graded.texts)]
    all_turns = [turns.get(b, group) for b, group in enumerate(graded.turns)]
    return rollouts, GradedCompletions(all_texts, rewards, all_turns, graded.metrics)


def to_batch(
    prompts: Prompts, rollouts: Rollouts, trained: np.ndarray, pack: Callable[[np.ndarray, int], np.ndarray]
) -> Batch:
    """Makes a batch on the host. trained: its loss mask; pack: lengths [B, G], P -> packed_index [B, E, N, T]."""
    # The lengths of all processes decide the shape of the rows.
    lengths = distributed.gather(rollouts.completion_mask.sum(axis=-1))
    index = pack(lengths, prompts.tokens.shape[1])[distributed.part(len(lengths))]
    completions = rollouts.completions, rollouts.completion_mask, trained
    scored = dict(sampler_logprobs=rollouts.logprobs, packed_index=index)
    return Batch(prompts.tokens, prompts.mask, *completions, **scored, images=prompts.images)
