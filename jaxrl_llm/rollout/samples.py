"""The completions of a step and their rewards; DAPO's dynamic sampling (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.machine import distributed, transfers
from jaxrl_llm.rollout.agents.pool import AgentPool, OpenEngine
from jaxrl_llm.rollout.environments import EnvironmentBatch
from jaxrl_llm.rollout.grading import Completions, GradedCompletions, RewardFn
from jaxrl_llm.rollout.in_flight import FirstCompleteGroups, InFlightGroups, StreamEngine
from jaxrl_llm.rollout.named_environments import Environments, NamedEnvironments
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.structs import Array, Batch, Collate, Prompts, Rewards, Rollouts
from jaxrl_llm.tasks.agents import AgentSettings

if TYPE_CHECKING:  # it takes a second, which a check of a config need not wait for
    import grain

SAMPLING = "sampling"  # channel on which the sampling threads of all processes exchange values


@dataclass(frozen=True)
class Samples:
    """Prompts, their completions and rewards for one step, on the host."""

    prompts: Prompts
    rollouts: Rollouts
    wait_for_grades: Callable[[], GradedCompletions]  # waits for the reward functions; devices can score meanwhile
    greedy: Samples | None = None  # greedy completions of the same prompts, with G = 1; None if no estimator needs them
    masks_truncated: bool = False  # whether truncated completions are left out of training
    has_named_environments: bool = False  # whether the rows of the prompts name their environments
    metrics: dict[str, Any] = field(default_factory=dict)  # metrics of sampling
    position: dict[str, Any] = field(default_factory=dict)  # position in the data after these prompts
    in_flight: InFlightGroups | None = None  # groups that the next call continues, None without partial rollouts
    replaced_rows: list[int] = field(default_factory=list)  # row numbers of sampled groups that had no signal
    replacements: list[GroupReplacement] = field(default_factory=list)  # not yet applied by `apply_replacements`

    @property
    def no_signal(self) -> np.ndarray:
        """True for groups [B] that teach nothing. Waits for the reward functions.

        A group has no signal if all its rewards are equal, if it has no reward, or if no token of it is trained on.
        """
        total = self.wait_for_grades().rewards.total
        rewards_differ = np.fmax.reduce(total, axis=1) > np.fmin.reduce(total, axis=1)  # both ignore NaN
        return ~(rewards_differ & self.trained.any(axis=(1, 2)))

    @property
    def trained(self) -> np.ndarray:
        """True for tokens [B, G, C] that are trained on."""
        return self.rollouts.loss_mask & ~(self.rollouts.truncated & self.masks_truncated)[..., None]

    def with_metrics(self, metrics: dict[str, Any]) -> Samples:
        """Returns the samples with further metrics, such as those of the push of the weights."""
        return replace(self, metrics=self.metrics | metrics)

    def tokens(self) -> int:
        """Returns the number of tokens of all completions."""
        return int(self.rollouts.completion_mask.sum())

    def rewards(self) -> Rewards:
        """Waits for the reward functions and returns the rewards, with those of the greedy completions."""
        rollouts = self.rollouts
        rewards = replace(
            self.wait_for_grades().rewards, turn_numbers=rollouts.turn_numbers, turn_rewards=rollouts.turn_rewards
        )
        if not self.greedy:
            return rewards
        greedy, lengths = self.greedy.wait_for_grades().rewards.total, self.greedy.rollouts.completion_mask.sum(axis=-1)
        return replace(rewards, greedy=greedy, greedy_lengths=lengths)


class GroupReplacement(NamedTuple):
    """Groups of a batch that groups of a fresh batch replace. Indices count the groups of all processes."""

    replaced_groups: np.ndarray  # [n] indices in the batch
    fresh: Samples  # the fresh batch, or this process's part of it
    fresh_groups: np.ndarray  # [n] indices in the fresh batch


def align_metrics(rollouts: Rollouts, channel: str) -> Rollouts:
    """Returns rollouts with the episode metrics of all processes; a metric that this process lacks is 0.

    So reward functions get the same columns with any number of processes, and checkpoints the same arrays.
    channel: name of the exchange between the processes, such as SAMPLING; threads that exchange use different names.
    """
    names = distributed.exchange([*rollouts.episodes], channel)
    return rollouts.measured(sorted({*chain(*names)}))


def episode_metrics(rollouts: Rollouts) -> list[list[dict[str, float]]]:
    """Returns the environments' metrics of each completion, B x G, for reward functions.

    The metric `seconds` is left out, because a reward must be the same in a resumed run.
    """
    lists_by_metric = {name: values.tolist() for name, values in rollouts.episodes.items() if name != "seconds"}
    prompts, group_size = rollouts.truncated.shape

    def metrics_of(prompt: int, member: int) -> dict[str, float]:
        return {name: values[prompt][member] for name, values in lists_by_metric.items()}

    return [[metrics_of(prompt, member) for member in range(group_size)] for prompt in range(prompts)]


@dataclass(frozen=True)
class CompletionTask:
    """What completions are sampled for: their environments, and the reward functions that judge their text."""

    tokenizer: Any
    score: RewardFn
    environments: Environments | None = None  # None if no environment answers turns
    agents: AgentPool | None = None  # None if no agents call the policy
    keeps_turns: bool = False  # whether rollouts have the numbers and the rewards of turns

    def sample(
        self,
        engine: Engine,
        prompts: Prompts,
        key: Array,
        group_size: int,
        sampling: Sampling,
        channel: str,
        report_ended: Callable[[int], None] = lambda count: None,
    ) -> tuple[Prompts, Rollouts]:
        """Samples completions of a single turn, or episodes if the task has environments or agents.

        Returns the prompts too, because agents write prompts of their own. channel: name of the exchange of metrics
        between processes, for `align_metrics`. report_ended: argument of `Engine.sample`.
        """
        if self.agents:
            open_engine = cast(OpenEngine, engine)
            prompts, rollouts = self.agents.sample(
                open_engine,
                prompts,
                key,
                group_size=group_size,
                temperature=sampling.temperature,
                report_ended=report_ended,
            )
            return prompts, rollouts if self.keeps_turns else replace(rollouts, turn_numbers=None, turn_rewards=None)
        batch = self.environments.start_batch(prompts.rows, group_size) if self.environments else None
        rollouts = engine.sample(
            prompts, key, group_size=group_size, sampling=sampling, environments=batch, report_ended=report_ended
        )
        if not batch:
            return prompts, rollouts
        batch.finish()
        return prompts, self._with_measurements(rollouts, batch, channel)

    def start_groups(self, prompts: Prompts, group_size: int, length: int) -> InFlightGroups:
        """Returns new groups with open environments and room for `length` tokens in each completion."""
        return self.open_environments(InFlightGroups.empty(prompts, group_size, length, self.tokenizer.pad_token_id))

    def open_environments(self, in_flight: InFlightGroups) -> InFlightGroups:
        """Returns groups with the environments of their episodes.

        After a resume it opens new environments, and replays the earlier turns of their episodes.
        """
        if in_flight.environments or not self.environments:
            return in_flight
        rollouts, turns = in_flight.rollouts, in_flight.answered_turns()
        batch = self.environments.start_batch(in_flight.prompts.rows, in_flight.has_ended.shape[1])
        batch.replay(turns, rollouts.episodes, rollouts.truncated, in_flight.has_ended)
        batch.restore_turns(in_flight.is_turn_start, rollouts.turn_rewards)
        return in_flight._replace(environments=batch, rollouts=self._with_turns(rollouts, batch))

    def sample_first(
        self,
        engine: StreamEngine,
        in_flight: InFlightGroups,
        key: Array,
        sampling: Sampling,
        wanted_groups: int,
        required_groups: list[int],
        channel: str,
    ) -> FirstCompleteGroups:
        """Samples until `wanted_groups` groups are complete, `required_groups` among them.

        channel: name of the exchange of metrics between processes, for `align_metrics`.
        """
        first = engine.sample_first(
            in_flight, key, sampling=sampling, wanted_groups=wanted_groups, required_groups=required_groups
        )
        if not (batch := in_flight.environments):
            return first
        batch.finish(first.in_flight.has_ended)
        rollouts = self._with_measurements(first.in_flight.rollouts, batch, channel)
        # Every episode gets every metric now, as it does after a resume.
        batch.restore_measurements(rollouts.episodes, rollouts.truncated)
        return first._replace(in_flight=first.in_flight._replace(rollouts=rollouts))

    def _with_measurements(self, rollouts: Rollouts, batch: EnvironmentBatch, channel: str) -> Rollouts:
        """Returns rollouts of episodes with the metrics, the limits and the turns of their environments."""
        truncated = rollouts.truncated | batch.truncated
        measured = align_metrics(replace(rollouts, truncated=truncated, episodes=batch.metrics()), channel)
        return self._with_turns(measured, batch)

    def _with_turns(self, rollouts: Rollouts, batch: EnvironmentBatch) -> Rollouts:
        return replace(rollouts, **batch.turn_arrays(rollouts.loss_mask)) if self.keeps_turns else rollouts

    def grade(self, prompts: Prompts, rollouts: Rollouts) -> GradedCompletions:
        """Waits for the reward functions and returns texts and rewards."""
        return self._without_failures(rollouts, self.score(*self.completions(prompts, rollouts)))

    def start_grading(self, prompts: Prompts, rollouts: Rollouts) -> Callable[[], GradedCompletions]:
        """Starts the reward functions. Returns a function that waits for texts and rewards."""
        wait_for_grades = self.score.start(partial(self.completions, prompts, rollouts))
        if not self.agents:
            return wait_for_grades
        return cache(lambda: self._without_failures(rollouts, wait_for_grades()))

    def _without_failures(self, rollouts: Rollouts, graded: GradedCompletions) -> GradedCompletions:
        """Returns grades without the rewards of episodes whose agent has failed."""
        if not self.agents:
            return graded
        has_failed, rewards = rollouts.episodes["errors"] > 0, graded.rewards
        no_verdict = np.float32(np.nan)
        channels = {name: np.where(has_failed, no_verdict, values) for name, values in rewards.channels.items()}
        total = np.where(has_failed, no_verdict, rewards.total)
        return graded._replace(rewards=replace(rewards, total=total, channels=channels))

    def completions(self, prompts: Prompts, rollouts: Rollouts) -> Completions:
        """Decodes completions for the reward functions. Adds columns about episodes if the task has any."""
        tokens, mask = rollouts.completions, rollouts.completion_mask
        texts, ids = data.decode(self.tokenizer, tokens, mask)
        if not (self.environments or self.agents):
            return Completions(prompts.rows, texts, ids)
        turns = data.decode_turns(self.tokenizer, tokens, mask, rollouts.loss_mask)
        loss_masks = data.real_tokens(rollouts.loss_mask, mask)
        columns = {"turns": turns, "episode": episode_metrics(rollouts), "loss_mask": loss_masks}
        return Completions(prompts.rows, texts, ids, columns)


def open_agents(settings: AgentSettings | None, exit_stack: ExitStack, **parts: Any) -> AgentPool | None:
    """Opens the agents of a run, which `exit_stack` closes. Returns None if the run has no agents.

    parts: the other fields of `AgentPool`.
    """
    return exit_stack.enter_context(closing(AgentPool(settings=settings, **parts))) if settings else None


class SampledGroups(NamedTuple):
    """Numbers of groups in one call of the engine."""

    prompts: int  # groups that the call starts or continues
    wanted_groups: int = 0  # number of complete groups with which the call ends (`StreamEngine`); 0 = all groups


class SamplingPlan(NamedTuple):
    """How many completions a step samples for each of its prompts, and with which settings."""

    group_size: int  # completions of a prompt
    sampling: Sampling
    resample_rounds: int = 0  # most rounds of fresh prompts that replace groups without a signal
    greedy: bool = False  # whether to sample the greedy completion too
    masks_truncated: bool = False  # whether truncated completions are left out of training
    # Open groups of all processes in addition to a batch. The groups that are complete first are the batch, and the
    # next call continues all other groups. 0 = no additional groups, so that all groups are the batch.
    partial: int = 0
    max_age: int = 0  # steps after which a group must be in the batch; 0 = no bound


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
    in_flight: InFlightGroups | None = None  # groups that the next call continues, for partial rollouts

    def sample(self, key: Array) -> Samples:
        """Samples the next prompts. The main thread calls `apply_replacements` on the result."""
        plan, metrics = self.sampling_plan, {}
        if plan.partial:
            return self._with_greedy(self._sample_first_complete(key), key)

        def sample_batch(key: Array) -> Samples:
            return self._sample_prompts(next(self.prompts), key, plan.group_size, plan.sampling)

        samples = sample_batch(key)
        if plan.resample_rounds:
            metrics = {"groups/no_signal_sampled": distributed.gather(samples.no_signal, SAMPLING).mean()}

            def sample_fresh(attempt: int) -> Samples:
                return sample_batch(jax.random.fold_in(key, np.uint32(attempt)))

            samples, metrics["groups/replaced"] = resample_groups(
                samples, sample_fresh, self.collate, plan.resample_rounds
            )
        # The greedy completions are sampled last, because `resample_groups` may replace prompts.
        return self._with_greedy(replace(samples, metrics=metrics), key)

    def apply_replacements(self, samples: Samples) -> Samples:
        """Returns samples with fresh groups in the places that they replace. All processes call it together."""
        return apply_replacements(samples, self.task.tokenizer, self.mesh)

    def to_checkpoint(self, samples: Samples) -> dict[str, Any]:
        """Returns the arrays, on the devices, that a checkpoint keeps of a batch that no update has used."""
        greedy = {"greedy": samples.greedy.rollouts} if samples.greedy else {}
        arrays = {"numbers": samples.prompts.numbers, "rollouts": samples.rollouts} | greedy
        if self.task.agents:
            arrays["prompts"] = {"tokens": samples.prompts.tokens, "mask": samples.prompts.mask}
        return transfers.shard_batch(arrays, self.mesh)

    def from_checkpoint(self, arrays: dict[str, Any], metrics: dict[str, Any], replaced_rows: list[int]) -> Samples:
        """Returns the batch of `to_checkpoint`, and starts its grading. A checkpoint holds dataclasses as dicts.

        A checkpoint has no texts and no rewards, because both follow from the data rows and the tokens.
        """
        arrays = transfers.to_host(arrays)
        prompts = replace(self.collate(arrays["numbers"]), **arrays.get("prompts", {}))  # agents write prompts
        rollouts, *greedy = (
            Rollouts.from_checkpoint(arrays[name]) for name in ("rollouts", "greedy") if name in arrays
        )
        samples = replace(self._start_grading(prompts, rollouts), metrics=metrics, replaced_rows=replaced_rows)
        return replace(samples, greedy=self._start_grading(prompts, greedy[0])) if greedy else samples

    def _with_greedy(self, samples: Samples, key: Array) -> Samples:
        """Adds the greedy completions of the same prompts, if the advantage estimator compares with them."""
        if not self.sampling_plan.greedy:
            return samples
        return replace(samples, greedy=self._sample_prompts(samples.prompts, key, 1, Sampling(temperature=0)))

    def _sample_first_complete(self, key: Array) -> Samples:
        """Samples until as many groups are complete as a batch has. The next call continues the other groups."""
        plan, task = self.sampling_plan, self.task
        start_groups = partial(task.start_groups, group_size=plan.group_size, length=self.max_completion_tokens)
        # The first call takes the prompts of two batches, because it opens `partial` groups more than a batch has.
        in_flight = task.open_environments(self.in_flight) if self.in_flight else start_groups(next(self.prompts))
        wanted_groups = len(in_flight.has_ended)
        in_flight = in_flight.concatenate(start_groups(next(self.prompts)))
        # The groups after the open ones have no token yet. They wait for a later call.
        open_count = wanted_groups + plan.partial // distributed.count()
        in_flight, waiting = in_flight.split([*range(open_count)])
        first = task.sample_first(
            cast(StreamEngine, self.engine),
            in_flight,
            key,
            sampling=plan.sampling,
            wanted_groups=wanted_groups,
            required_groups=in_flight.due_groups(plan.max_age),
            channel=SAMPLING,
        )
        batch, in_flight = first.in_flight.split(first.complete_groups)
        self.in_flight = in_flight.one_step_later().concatenate(waiting)
        metrics = partial_metrics(batch.ages, in_flight.has_begun, first)
        samples = self._start_grading(batch.prompts, batch.rollouts)
        return replace(samples, in_flight=self.in_flight, metrics=metrics)

    def _sample_prompts(self, prompts: Prompts, key: Array, group_size: int, sampling: Sampling) -> Samples:
        prompts, rollouts = self.task.sample(
            self.engine, prompts, key, group_size=group_size, sampling=sampling, channel=SAMPLING
        )
        return self._start_grading(prompts, rollouts)

    def _start_grading(self, prompts: Prompts, rollouts: Rollouts) -> Samples:
        return Samples(
            prompts,
            rollouts,
            self.task.start_grading(prompts, rollouts),
            masks_truncated=self.sampling_plan.masks_truncated,
            has_named_environments=isinstance(self.task.environments, NamedEnvironments),
        )


def partial_metrics(ages: np.ndarray, has_begun: np.ndarray, first: FirstCompleteGroups) -> dict[str, Any]:
    """Returns the metrics of a step of partial rollouts, over the groups of all processes.

    ages: steps since the start of each group in the batch. has_begun: True for the groups outside of the batch that
    have a token. first: result of the engine's call, with the use of its slots.
    """
    slot_use = np.array([[first.computed_tokens, first.slot_steps]])
    ages, has_begun, slot_use = (distributed.gather(array, SAMPLING) for array in (ages, has_begun, slot_use))
    computed_tokens, slot_steps = slot_use.sum(axis=0)
    return {
        "rollout/age": ages.mean(),
        "rollout/age_max": ages.max(),
        "rollout/carried": (ages > 0).mean(),
        "rollout/in_flight": has_begun.sum(),
        # If all groups of the batch were already complete, the call has decoded nothing, so no slot could be idle.
    } | ({"rollout/idle_slots": 1 - computed_tokens / slot_steps} if slot_steps else {})


def resample_groups(
    samples: Samples, sample_fresh: Callable[[int], Samples], collate: Collate, rounds: int
) -> tuple[Samples, int]:
    """Replaces groups without a signal by groups of `sample_fresh(1)`, `sample_fresh(2)` and so on.

    Also returns the number of replaced groups. The search stops when every group has a signal, or after `rounds`
    rounds. Fresh groups that are not needed are dropped.
    A fresh group replaces only a group of the same source. Otherwise an easy or a hard source would vanish from a
    mixture.
    The fresh group may be in another process. `apply_replacements` moves its completions and rewards later, because
    this function may run in a thread beside programs of the main thread on the same devices.
    """
    lacks_signal, numbers, sources = _groups_of_all_processes(samples)
    replaced_rows, replacements = numbers[lacks_signal].tolist(), list[GroupReplacement]()
    # Every process sees the groups of all processes, so all stop after the same round.
    for attempt in range(1, rounds + 1):
        if not lacks_signal.any():
            break
        fresh = sample_fresh(attempt)
        fresh_lacks_signal, fresh_numbers, fresh_sources = _groups_of_all_processes(fresh)
        replaced_rows += fresh_numbers[fresh_lacks_signal].tolist()
        pairs = list[tuple[int, int]]()
        for source in dict.fromkeys(sources[lacks_signal]):
            replaceable = np.flatnonzero(lacks_signal & (sources == source))
            usable = np.flatnonzero(~fresh_lacks_signal & (fresh_sources == source))
            pairs.extend(zip(replaceable.tolist(), usable.tolist(), strict=False))
        replaced_groups, fresh_groups = np.array(pairs, int).reshape(-1, 2).T
        lacks_signal[replaced_groups], numbers[replaced_groups] = False, fresh_numbers[fresh_groups]
        if len(replaced_groups):
            replacements.append(GroupReplacement(replaced_groups, fresh, fresh_groups))
    prompts = collate(numbers[distributed.part(len(numbers))]) if replacements else samples.prompts
    samples = replace(samples, prompts=prompts, replacements=replacements, replaced_rows=replaced_rows)
    return samples, sum(len(replacement.replaced_groups) for replacement in replacements)


def _groups_of_all_processes(samples: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns three arrays with an entry for each group of all processes.

    The entries are: whether the group has no signal, the number of its data row, and the name of its source.
    """
    prompts = samples.prompts
    # An array of text has room for the longest name of this process, and would cut longer names of other processes.
    sources = np.array(prompts.sources or [""] * len(prompts.numbers), object)
    no_signal, numbers, sources = (
        distributed.gather(x, SAMPLING) for x in (samples.no_signal, prompts.numbers, sources)
    )
    return no_signal, numbers, sources


def apply_replacements(samples: Samples, tokenizer: Any, mesh: Mesh) -> Samples:
    """Moves completions and rewards of fresh groups to the places of the groups that they replace.

    All processes call it together.
    """
    rollouts, wait_for_grades = samples.rollouts, samples.wait_for_grades
    for replacement in samples.replacements:
        rollouts, graded = _apply_replacement(rollouts, wait_for_grades(), replacement, tokenizer, mesh)
        wait_for_grades = partial(GradedCompletions, *graded)  # nothing is left to wait for
    return replace(samples, rollouts=rollouts, wait_for_grades=wait_for_grades, replacements=[])


def _apply_replacement(
    rollouts: Rollouts, graded: GradedCompletions, replacement: GroupReplacement, tokenizer: Any, mesh: Mesh
) -> tuple[Rollouts, GradedCompletions]:
    """Returns rollouts and grades in which the groups of one fresh batch replace groups without a signal."""
    replaced_groups, fresh, fresh_groups = replacement
    # The two batches may have different metrics, because an environment may report a metric only at times.
    names = sorted({*rollouts.episodes, *fresh.rollouts.episodes})
    old_values = rollouts.measured(names), graded.rewards
    new_values = fresh.rollouts.measured(names), fresh.wait_for_grades().rewards
    rollouts, rewards = transfers.put_groups(old_values, new_values, replaced_groups, fresh_groups, mesh)
    part = distributed.part(len(rollouts.truncated) * distributed.count())
    local_groups = replaced_groups[(part.start <= replaced_groups) & (replaced_groups < part.stop)] - part.start
    if not len(local_groups):
        return rollouts, graded._replace(rewards=rewards)
    # The texts are decoded again, because only arrays move between processes.
    tokens, mask, loss_mask = (
        x[local_groups] for x in (rollouts.completions, rollouts.completion_mask, rollouts.loss_mask)
    )
    new_texts = dict(zip(local_groups.tolist(), data.decode(tokenizer, tokens, mask)[0], strict=True))
    new_turns = dict(zip(local_groups.tolist(), data.decode_turns(tokenizer, tokens, mask, loss_mask), strict=True))
    all_texts = [new_texts.get(group, old_texts) for group, old_texts in enumerate(graded.texts)]
    all_turns = [new_turns.get(group, old_turns) for group, old_turns in enumerate(graded.turns)]
    return rollouts, GradedCompletions(all_texts, rewards, all_turns, graded.metrics)


def to_batch(
    prompts: Prompts, rollouts: Rollouts, trained: np.ndarray, pack: Callable[[np.ndarray, int], np.ndarray]
) -> Batch:
    """Returns the batch of scoring and updates, on the host.

    trained: True for the completion tokens [B, G, C] that are trained on. pack(lengths [B, G] of completions, mean
    number of computed tokens of a prompt): returns packed_index [B, E, N, T], as `packing.Packing`.
    """
    # The lengths of all processes decide the shape of the packed rows.
    lengths = rollouts.completion_mask.sum(axis=-1)
    lengths = distributed.gather(np.concatenate([lengths, prompts.computed_tokens[:, None]], axis=1))
    packed_index = pack(lengths[:, :-1], round(lengths[:, -1].mean()))[distributed.part(len(lengths))]
    return Batch(
        prompts.tokens,
        prompts.mask,
        rollouts.completions,
        rollouts.completion_mask,
        trained,
        sampler_logprobs=rollouts.logprobs,
        packed_index=packed_index,
        images=prompts.images,
        smaller=prompts.smaller,
        tree=rollouts.tree,
    )
