"""Partial rollouts: a step takes the groups that are complete first, and the others go on with the next weights."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.structs import Collate, Prompts, Rollouts


class Flight(NamedTuple):
    """Groups of completions, some of which have not ended. On the host."""

    prompts: Prompts  # n
    rollouts: Rollouts  # [n, G, C]
    ended: np.ndarray  # [n, G] bool

    @classmethod
    def begin(cls, prompts: Prompts, group: int, length: int, pad_id: int) -> Flight:
        """Returns groups without a token, with room for `length` in each completion."""
        n = len(prompts.tokens)
        no = np.zeros((n, group, length), bool)
        numbers = np.full(no.shape, pad_id, np.int32), no, no, no.astype(np.float32), no.any(axis=-1)
        return cls(prompts, Rollouts(*numbers, no.astype(np.int32)), np.zeros((n, group), bool))

    def joined(self, later: Flight) -> Flight:
        """Returns these groups and later ones."""
        rollouts, ended = jax.tree.map(lambda *x: np.concatenate(x), self[1:], later[1:])
        return Flight(self.prompts.joined(later.prompts), rollouts, ended)

    def take(self, at: list[int]) -> Flight:
        """Returns the groups at these places."""
        return Flight(self.prompts.take(at), *jax.tree.map(lambda x: x[at], self[1:]))

    def split(self, at: list[int]) -> tuple[Flight, Flight]:
        """Returns the groups at these places, and the others."""
        rest = np.setdiff1d(np.arange(len(self.ended)), at).tolist()
        return self.take(at), self.take(rest)

    def to_checkpoint(self) -> dict[str, Any]:
        """Returns the arrays that a checkpoint keeps."""
        return {"numbers": self.prompts.numbers, "rollouts": self.rollouts, "ended": self.ended}

    @classmethod
    def from_checkpoint(cls, arrays: dict[str, Any], collate: Collate) -> Flight:
        """Rebuilds what `to_checkpoint` has returned. A checkpoint holds dataclasses as dicts."""
        return cls(collate(arrays["numbers"]), Rollouts(**arrays["rollouts"]), arrays["ended"])


class StreamEngine(Protocol):
    """An engine that ends a call when some groups are complete."""

    def sample_first(
        self, flight: Flight, key: jax.Array, *, sampling: Sampling, enough: int
    ) -> tuple[Flight, list[int]]:
        """Samples until `enough` groups are complete.

        Returns all groups, and the places of the complete ones, in their order. Which ones these are depends on counts
        of tokens alone.
        """
        ...
