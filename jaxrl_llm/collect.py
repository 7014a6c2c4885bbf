"""A step's completions and what they earned; DAPO's dynamic sampling (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxrl_llm import data
from jaxrl_llm.rewards import Score
from jaxrl_llm.rollout import Engine
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Array, Config, Prompts, Rollouts

Judged: TypeAlias = tuple[list[list[str]], dict[str, np.ndarray]]  # B x G texts, and channels [B, G]


@dataclass(frozen=True)
class Sampled:
    """Prompts and what was sampled for them, on the host."""

    prompts: Prompts
    rollouts: Rollouts
    judged: Callable[[], Judged]  # when first asked, so that the device may score meanwhile
    greedy: Sampled | None = None  # the same prompts' greedy completions, a group of 1

    @property
    def no_signal(self) -> np.ndarray:
        """Groups [B] whose members all earned the same, which teaches nothing."""
        return np.ptp(self.judged()[1]["total"], axis=1) == 0


def make_collect(
    config: Config, engine: Engine, sampling: Sampling, prompts: Iterator[Prompts], tokenizer: Any, score: Score,
    *, greedy: bool,
) -> Callable[[Array], tuple[Sampled, dict[str, Any]]]:  # fmt: skip
    """`collect(key)` -> the next prompts sampled, and metrics; greedy: each prompt's greedy completion too."""

    def judge(batch: Prompts, rollouts: Rollouts) -> Judged:
        texts, ids = data.decode(tokenizer, rollouts.completions, rollouts.completion_mask)
        return texts, score(batch.rows, texts, ids)

    def draw(batch: Prompts, key: Array, group_size: int, sampling: Sampling) -> Sampled:
        rollouts = engine.generate(batch, key, group_size=group_size, sampling=sampling)
        trained = rollouts.loss_mask & ~(rollouts.truncated[..., None] & config.mask.truncated)
        return Sampled(batch, replace(rollouts, loss_mask=trained), cache(partial(judge, batch, rollouts)))

    def collect(key: Array) -> tuple[Sampled, dict[str, Any]]:
        sampled, metrics = draw(next(prompts), key, config.group_size, sampling), {}
        if config.rollout.resample_rounds:
            metrics = {"groups/no_signal_sampled": sampled.no_signal.mean()}
            more = lambda i: draw(next(prompts), jax.random.fold_in(key, i), config.group_size, sampling)  # noqa: E731
            sampled, metrics["groups/replaced"] = refill(sampled, more, config.rollout.resample_rounds)
        if greedy:
            sampled = replace(sampled, greedy=draw(sampled.prompts, key, 1, Sampling(temperature=0)))
        return sampled, metrics

    return collect


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
    prompts = Prompts(array(a.tokens, b.tokens), array(a.mask, b.mask), rows(a.rows, b.rows))
    return Sampled(prompts, jax.tree.map(array, sampled.rollouts, fresh.rollouts), lambda: judged)
