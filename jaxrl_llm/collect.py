"""A step's completions and what they earned; DAPO's dynamic sampling (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import data
from jaxrl_llm.packing import pack
from jaxrl_llm.rewards import Score
from jaxrl_llm.rollout import Engine
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Array, Batch, Config, Prompts, Rollouts

Judged: TypeAlias = tuple[list[list[str]], dict[str, np.ndarray]]  # B x G texts, and channels [B, G]


@dataclass(frozen=True)
class Sampled:
    """Prompts and what was sampled for them, on the host."""

    prompts: Prompts
    rollouts: Rollouts
    judged: Callable[[], Judged]  # waits for it, so that the device may score meanwhile
    greedy: Sampled | None = None  # the same prompts' greedy completions, a group of 1

    @property
    def no_signal(self) -> np.ndarray:
        """Groups [B] whose members all earned the same, which teaches nothing."""
        return np.ptp(self.judged()[1]["total"], axis=1) == 0


class Collector:
    """Samples what the next prompts say, and lets it be judged."""

    def __init__(
        self, config: Config, engine: Engine, sampling: Sampling, prompts: Iterator[Prompts],
        collate: Callable[[Any], Prompts], tokenizer: Any, score: Score, *, greedy: bool,
    ):  # fmt: skip
        """collate(numbers) -> those rows of the data set; greedy: each prompt's greedy completion is drawn too."""
        self._config, self._engine, self._sampling, self._prompts = config, engine, sampling, prompts
        self._collate, self._tokenizer, self._score, self._greedy = collate, tokenizer, score, greedy

    def collect(self, key: Array) -> tuple[Sampled, dict[str, Any]]:
        """The next prompts sampled, and metrics."""
        config, metrics = self._config, {}

        def draw(key: Array) -> Sampled:
            return self._draw(next(self._prompts), key, config.group_size, self._sampling)

        sampled = draw(key)
        if config.rollout.resample_rounds:
            metrics = {"groups/no_signal_sampled": sampled.no_signal.mean()}
            more = lambda i: draw(jax.random.fold_in(key, i))  # noqa: E731
            sampled, metrics["groups/replaced"] = refill(sampled, more, config.rollout.resample_rounds)
        if self._greedy:
            sampled = replace(sampled, greedy=self._draw(sampled.prompts, key, 1, Sampling(temperature=0)))
        return sampled, metrics

    def keep(self, sampled: Sampled) -> dict[str, Any]:
        """What a checkpoint needs of a batch that is not yet learned from: arrays."""
        greedy = {"greedy": sampled.greedy.rollouts} if sampled.greedy else {}
        return {"numbers": sampled.prompts.numbers, "rollouts": sampled.rollouts} | greedy

    def again(self, kept: dict[str, Any]) -> Sampled:
        """The batch that `keep` was given, to be judged anew; its records may have become dicts."""
        prompts = self._collate(kept["numbers"])
        rollouts, *greedy = (Rollouts(**kept[name]) for name in ("rollouts", "greedy") if name in kept)
        sampled = self._judged(prompts, rollouts)
        return replace(sampled, greedy=self._judged(prompts, greedy[0])) if greedy else sampled

    def _draw(self, prompts: Prompts, key: Array, group_size: int, sampling: Sampling) -> Sampled:
        rollouts = self._engine.generate(prompts, key, group_size=group_size, sampling=sampling)
        trained = rollouts.loss_mask & ~(rollouts.truncated[..., None] & self._config.mask.truncated)
        return self._judged(prompts, replace(rollouts, loss_mask=trained))

    def _judged(self, prompts: Prompts, rollouts: Rollouts) -> Sampled:
        def judge() -> Judged:
            texts, ids = data.decode(self._tokenizer, rollouts.completions, rollouts.completion_mask)
            return texts, self._score(prompts.rows, texts, ids)

        return Sampled(prompts, rollouts, self._score.ahead(judge))


def refill(sampled: Sampled, draw: Callable[[int], Sampled], rounds: int) -> tuple[Sampled, int]:
    """Puts groups of `draw(1)`, `draw(2)` ... in the place of those without signal, and counts the replaced.

    It ends when every group has a signal, or after so many rounds; what a round samples beyond need is dropped.
    """
    replaced = 0
    for i in range(1, rounds + 1):
        lacking = np.flatnonzero(sampled.no_signal)
        if not len(lacking):
            break
        fresh = draw(i)
        found = np.flatnonzero(~fresh.no_signal)[: len(lacking)]
        sampled = _put(sampled, lacking[: len(found)], fresh, found)
        replaced += len(found)
    return sampled, replaced


def _put(sampled: Sampled, at: np.ndarray, fresh: Sampled, found: np.ndarray) -> Sampled:
    """Groups `found` of fresh in the places `at`."""
    put = dict(zip(at.tolist(), found.tolist(), strict=True))

    def array(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        old = np.array(old)
        old[at] = new[found]
        return old

    def rows(old: list, new: list) -> list:
        return [new[put[i]] if i in put else row for i, row in enumerate(old)]

    (texts, channels), (new_texts, new_channels) = sampled.judged(), fresh.judged()
    judged = rows(texts, new_texts), {name: array(x, new_channels[name]) for name, x in channels.items()}
    a, b = sampled.prompts, fresh.prompts
    tokens, mask, numbers = (array(getattr(a, x), getattr(b, x)) for x in ("tokens", "mask", "numbers"))
    prompts = Prompts(tokens, mask, rows(a.rows, b.rows), numbers)
    return Sampled(prompts, jax.tree.map(array, sampled.rollouts, fresh.rollouts), lambda: judged)


def to_batch(sampled: Sampled, length: int) -> Batch:
    """What was sampled, packed into lanes of at least `length` tokens, on the host."""
    prompts, rollouts = sampled.prompts, sampled.rollouts
    return Batch(
        prompts.tokens, prompts.mask, rollouts.completions, rollouts.completion_mask, rollouts.loss_mask,
        sampler_logprobs=rollouts.logprobs, slots=pack(rollouts.completion_mask.sum(axis=-1), length),
    )  # fmt: skip


def minibatches(config: Config, step: int) -> Iterator[Array]:
    """Rows of each update of a step: the first epoch in order, later ones shuffled by (seed, step, epoch)."""
    for epoch in range(config.epochs):
        rows = np.arange(config.prompts_per_step)
        if epoch:
            np.random.default_rng((config.seed, step, epoch)).shuffle(rows)
        yield from jnp.asarray(rows.reshape(-1, config.prompts_per_update))
