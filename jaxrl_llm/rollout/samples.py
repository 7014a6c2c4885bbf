"""The completions of a step and their rewards; DAPO's dynamic sampling (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import grain
import jax
import numpy as np

from jaxrl_llm import distributed
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.envs.batch import EnvironmentPool
from jaxrl_llm.rewards.reward_fn import RewardFn
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.structs import Array, Config, Prompts, Rewards, Rollouts

T = TypeVar("T")
SAMPLING = "sampling"  # channel of the thread that samples


class Graded(NamedTuple):
    """Completions as text, and what they earn."""

    texts: list[list[str]]  # B x G
    channels: dict[str, np.ndarray]  # [B, G]
    turns: list[list[list[data.Turn]]]  # B x G, of episodes of several turns; []: these are none
    metrics: dict[str, float]  # what reward functions measured: "function/name"


@dataclass(frozen=True)
class Samples:
    """Prompts and their completions, on the host."""

    prompts: Prompts
    rollouts: Rollouts
    graded: Callable[[], Graded]  # waits for the reward functions; the device can score meanwhile
    greedy: Samples | None = None  # greedy completions of the same prompts, with G = 1
    masks_truncated: bool = False  # True: truncated completions are not trained on
    metrics: dict[str, Any] = field(default_factory=dict)  # of the sampling
    position: dict[str, Any] = field(default_factory=dict)  # of the actor's data and shapes after these prompts
    replaced: list[int] = field(default_factory=list)  # numbers of rows whose groups had no signal and gave way

    @property
    def no_signal(self) -> np.ndarray:
        """True for groups [B] in which all completions have the same reward, or none has one: no learning signal."""
        total = self.graded().channels["total"]
        return ~(np.fmax.reduce(total, axis=1) > np.fmin.reduce(total, axis=1))  # both ignore NaN

    @property
    def trained(self) -> np.ndarray:
        """True for tokens [B, G, C] that are trained on."""
        return self.rollouts.loss_mask & ~(self.rollouts.truncated & self.masks_truncated)[..., None]

    def tokens(self) -> int:
        """Returns the number of sampled tokens."""
        return int(self.rollouts.completion_mask.sum())

    def rewards(self) -> Rewards:
        """Waits for the reward functions and returns the rewards."""
        channels = dict(self.graded().channels)
        rewards = Rewards(channels.pop("total"), channels)
        if not self.greedy:
            return rewards
        greedy, lengths = self.greedy.graded().channels["total"], self.greedy.rollouts.completion_mask.sum(axis=-1)
        return replace(rewards, greedy=greedy, greedy_lengths=lengths)


def episodes(
    engine: Engine, environments: EnvironmentPool, prompts: Prompts, key: Array, group_size: int, sampling: Sampling
) -> Rollouts:
    """Samples group_size episodes for each prompt, and what their environments measured."""
    batch = environments.begin(prompts.rows, group_size)
    rollouts = engine.converse(prompts, key, group_size=group_size, sampling=sampling, environments=batch)
    return replace(rollouts, truncated=rollouts.truncated | batch.truncated, episodes=batch.metrics())


def measured_alike(rollouts: Rollouts, channel: str) -> Rollouts:
    """Returns rollouts in which all processes have what the environments of any measured: 0 where they did not.

    So rewards get the columns that they get in one process, and checkpoints the same arrays. channel: see `exchange`.
    """
    names = distributed.exchange([*rollouts.episodes], channel)
    return _filled(rollouts, sorted({*chain(*names)}))


def per_episode(rollouts: Rollouts) -> list[list[dict[str, float]]]:
    """Returns what environments measured, B x G. Without the time, so that a reward is the same in a resumed run."""
    named = {name: values.tolist() for name, values in rollouts.episodes.items() if name != "seconds"}
    b, g = rollouts.truncated.shape
    return [[{name: values[i][j] for name, values in named.items()} for j in range(g)] for i in range(b)]


@dataclass(frozen=True)
class Task:
    """What completions are for: the environments that they talk to, and the reward functions that judge their text."""

    tokenizer: Any
    score: RewardFn
    environments: EnvironmentPool | None = None  # None: a completion is one turn

    def sample(self, engine: Engine, prompts: Prompts, key: Array, group_size: int, sampling: Sampling) -> Rollouts:
        """Samples completions of one turn, or episodes if there are environments."""
        if not self.environments:
            return engine.generate(prompts, key, group_size=group_size, sampling=sampling)
        return episodes(engine, self.environments, prompts, key, group_size, sampling)

    def grade(self, prompts: Prompts, rollouts: Rollouts) -> Graded:
        """Returns texts and rewards. With environments, functions also get the columns of `rewards`' docstring."""
        tokens, mask = rollouts.completions, rollouts.completion_mask
        texts, ids = data.decode(self.tokenizer, tokens, mask)
        if not self.environments:
            channels, metrics = self.score(prompts.rows, texts, ids)
            return Graded(texts, channels, [], metrics)
        turns = data.decode_turns(self.tokenizer, tokens, mask, rollouts.loss_mask)
        groups = zip(rollouts.loss_mask, mask, strict=True)
        own = [[row[real].tolist() for row, real in zip(*group, strict=True)] for group in groups]
        columns = {"turns": turns, "episode": per_episode(rollouts), "loss_mask": own}
        channels, metrics = self.score(prompts.rows, texts, ids, columns)
        return Graded(texts, channels, turns, metrics)


class SampleSource:
    """Samples completions for the next prompts and starts the reward functions."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        sampling: Sampling,
        prompts: grain.DatasetIterator,
        collate: Callable[[Any], Prompts],
        task: Task,
        *,
        greedy: bool,
    ):
        """collate(numbers) -> these rows of the data set; greedy: also sample each prompt's greedy completion."""
        self._config, self._engine, self._sampling, self._prompts = config, engine, sampling, prompts
        self._collate, self._task, self._greedy = collate, task, greedy

    def position(self) -> dict[str, Any]:
        """Returns the position in the data after the last prompts."""
        return self._prompts.get_state()

    def go_to(self, position: dict[str, Any]) -> None:
        """Goes to a position in the data."""
        self._prompts.set_state(position)

    def sample(self, key: Array) -> Samples:
        """Samples the next prompts."""
        config, metrics = self._config, {}

        def draw(key: Array) -> Samples:
            return self._draw(next(self._prompts), key, config.group_size, self._sampling)

        samples = draw(key)
        if config.rollout.resample_rounds:
            metrics = {"groups/no_signal_sampled": distributed.gather(samples.no_signal, SAMPLING).mean()}
            more = lambda i: draw(jax.random.fold_in(key, i))  # noqa: E731
            rounds = config.rollout.resample_rounds
            samples, metrics["groups/replaced"] = refill(samples, more, self._collate, rounds)
        # After `refill`, which may replace prompts.
        greedy = self._draw(samples.prompts, key, 1, Sampling(temperature=0)) if self._greedy else None
        return replace(samples, greedy=greedy, metrics=metrics)

    def to_checkpoint(self, samples: Samples) -> dict[str, Any]:
        """Returns the arrays that a checkpoint keeps of a batch that no update has used yet."""
        greedy = {"greedy": samples.greedy.rollouts} if samples.greedy else {}
        return {"numbers": samples.prompts.numbers, "rollouts": samples.rollouts} | greedy

    def from_checkpoint(self, kept: dict[str, Any], metrics: dict[str, Any]) -> Samples:
        """Rebuilds the batch of `to_checkpoint` and grades it again. kept: a checkpoint holds dataclasses as dicts."""
        prompts = self._collate(kept["numbers"])
        rollouts, *greedy = (Rollouts(**kept[name]) for name in ("rollouts", "greedy") if name in kept)
        samples = replace(self._graded(prompts, rollouts), metrics=metrics)
        return replace(samples, greedy=self._graded(prompts, greedy[0])) if greedy else samples

    def _draw(self, prompts: Prompts, key: Array, group_size: int, sampling: Sampling) -> Samples:
        rollouts = self._task.sample(self._engine, prompts, key, group_size, sampling)
        return self._graded(prompts, measured_alike(rollouts, SAMPLING) if self._task.environments else rollouts)

    def _graded(self, prompts: Prompts, rollouts: Rollouts) -> Samples:
        graded = self._task.score.start(lambda: self._task.grade(prompts, rollouts))
        return Samples(prompts, rollouts, graded, masks_truncated=self._config.mask.truncated)


def refill(
    samples: Samples, draw: Callable[[int], Samples], collate: Callable[[Any], Prompts], rounds: int
) -> tuple[Samples, int]:
    """Replaces groups without signal by groups of `draw(1)`, `draw(2)` ..., and counts the replaced groups.

    Stops when every group has a signal, or after `rounds` rounds. Drops the fresh groups that it does not need.
    A group may go to another process. collate(numbers) -> these rows of the data set.
    """
    replaced, without = 0, _without_signal(samples)
    for i in range(1, rounds + 1):
        lacking = np.flatnonzero(distributed.gather(samples.no_signal, SAMPLING))
        if not len(lacking):
            break
        fresh = draw(i)
        found = np.flatnonzero(~distributed.gather(fresh.no_signal, SAMPLING))[: len(lacking)]
        without += _without_signal(fresh)
        samples = _put(samples, lacking[: len(found)], fresh, found, collate)
        replaced += len(found)
    return replace(samples, replaced=without), replaced


def _without_signal(samples: Samples) -> list[int]:
    """Returns the numbers of the rows whose groups have no signal, of all processes."""
    return distributed.gather(samples.prompts.numbers[samples.no_signal], SAMPLING).tolist()


def _put(
    samples: Samples, at: np.ndarray, fresh: Samples, found: np.ndarray, collate: Callable[[Any], Prompts]
) -> Samples:
    """Replaces groups `at` of samples by groups `found` of fresh: their numbers in the batches of all processes."""
    part = distributed.part(len(samples.no_signal) * distributed.count())
    given = found[(part.start <= found) & (found < part.stop)] - part.start  # from this process
    taken = (part.start <= at) & (at < part.stop)  # of the replaced ones, those of this process
    here = at[taken] - part.start

    def array(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        old = np.array(old)
        old[here] = distributed.gather(new[given], SAMPLING)[taken]
        return old

    put = dict(zip(here.tolist(), np.flatnonzero(taken).tolist(), strict=True))

    def groups(old: list[T], new: list[T]) -> list[T]:
        moved = list(chain(*distributed.exchange([new[i] for i in given] if new else [], SAMPLING)))
        return [moved[put[i]] if i in put else group for i, group in enumerate(old)]

    had, got = samples.graded(), fresh.graded()
    channels = {name: array(x, got.channels[name]) for name, x in had.channels.items()}
    graded = Graded(groups(had.texts, got.texts), channels, groups(had.turns, got.turns), had.metrics)
    prompts = collate(array(samples.prompts.numbers, fresh.prompts.numbers))
    # The metrics of two batches may have other names: an environment need not give all of them.
    names = sorted({*samples.rollouts.episodes, *fresh.rollouts.episodes})
    old, new = (_filled(x.rollouts, names) for x in (samples, fresh))
    return replace(samples, prompts=prompts, rollouts=jax.tree.map(array, old, new), graded=lambda: graded)


def _filled(rollouts: Rollouts, names: Iterable[str]) -> Rollouts:
    nothing = np.zeros(rollouts.truncated.shape, np.float32)
    return replace(rollouts, episodes={name: rollouts.episodes.get(name, nothing) for name in names})
