"""Partial rollouts: a step takes the groups that are complete first, and the others go on with the next weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.rollout.environments import EnvironmentBatch
from jaxrl_llm.structs import Collate, Prompts, Rollouts


class InFlightGroups(NamedTuple):
    """Groups of completions, some of which have not ended. On the host."""

    prompts: Prompts  # n
    rollouts: Rollouts  # [n, G, C]
    ended: np.ndarray  # [n, G] bool
    begins: np.ndarray  # [n, G, C] bool, True at the first token of each turn, also if it has not been sampled yet
    environments: EnvironmentBatch | None = None  # of episodes, in this process

    @classmethod
    def begin(cls, prompts: Prompts, group: int, length: int, pad_id: int) -> InFlightGroups:
        """Returns groups without a token, with room for `length` in each completion."""
        n = len(prompts.tokens)
        no = np.zeros((n, group, length), bool)
        numbers = np.full(no.shape, pad_id, np.int32), no, no, no.astype(np.float32), no.any(axis=-1)
        begins = np.broadcast_to(np.arange(length) == 0, no.shape)
        return cls(prompts, Rollouts(*numbers, no.astype(np.int32)), np.zeros((n, group), bool), begins)

    @property
    def arrays(self) -> tuple[Rollouts, np.ndarray, np.ndarray]:
        """What has an entry for each completion."""
        return self.rollouts, self.ended, self.begins

    def joined(self, later: InFlightGroups) -> InFlightGroups:
        """Returns these groups and later ones. Both have environments or none has."""
        names = sorted({*self.rollouts.episodes, *later.rollouts.episodes})
        parts = [(in_flight.rollouts.measured(names), in_flight.ended, in_flight.begins) for in_flight in (self, later)]
        rollouts, ended, begins = jax.tree.map(lambda *x: np.concatenate(x), *parts)
        environments = self.environments and later.environments and self.environments.joined(later.environments)
        return InFlightGroups(self.prompts.joined(later.prompts), rollouts, ended, begins, environments)

    def take(self, at: list[int]) -> InFlightGroups:
        """Returns the groups at these places."""
        environments = self.environments and self.environments.take(at)
        rollouts, ended, begins = jax.tree.map(lambda x: x[at], self.arrays)
        return InFlightGroups(self.prompts.take(at), rollouts, ended, begins, environments)

    def past_turns(self) -> list[list[list[int]]]:
        """Returns the tokens of each turn that an observation has followed; none of a completion that has ended."""
        shape = -1, self.begins.shape[2]
        tokens, sampled = (x.reshape(shape) for x in (self.rollouts.completions, self.rollouts.loss_mask))
        turns: list[list[list[int]]] = []
        for i, ended in enumerate(self.ended.ravel()):
            starts = [] if ended else np.flatnonzero(self.begins.reshape(shape)[i]).tolist()
            parts = [slice(start, stop) for start, stop in pairwise(starts)]
            # A turn, and the observation that follows it.
            turns.append([tokens[i, part][sampled[i, part]].tolist() for part in parts])
        return turns

    def split(self, at: list[int]) -> tuple[InFlightGroups, InFlightGroups]:
        """Returns the groups at these places, and the others."""
        rest = np.setdiff1d(np.arange(len(self.ended)), at).tolist()
        return self.take(at), self.take(rest)

    def to_checkpoint(self) -> dict[str, Any]:
        """Returns the arrays that a checkpoint keeps."""
        rollouts, ended, begins = self.arrays
        return {"numbers": self.prompts.numbers, "rollouts": rollouts, "ended": ended, "begins": begins}

    @classmethod
    def from_checkpoint(cls, arrays: dict[str, Any], collate: Collate) -> InFlightGroups:
        """Rebuilds what `to_checkpoint` has returned, without environments. A checkpoint holds dataclasses as dicts."""
        return cls(collate(arrays["numbers"]), Rollouts(**arrays["rollouts"]), arrays["ended"], arrays["begins"])


class FirstComplete(NamedTuple):
    """What a call has sampled until some groups were complete."""

    in_flight: InFlightGroups  # all groups
    complete: list[int]  # places of the complete ones, in the order in which they became so
    idle: float  # share of the places of the decode programs, over their steps, in which no sequence was computed


class StreamEngine(Protocol):
    """An engine that ends a call when some groups are complete."""

    def sample_first(
        self, in_flight: InFlightGroups, key: jax.Array, *, sampling: Sampling, enough: int
    ) -> FirstComplete:
        """Samples until `enough` groups are complete, in episodes with the environments of `in_flight`.

        Which ones these are, and how far the others have come, depends on counts of tokens alone.
        """
        ...
