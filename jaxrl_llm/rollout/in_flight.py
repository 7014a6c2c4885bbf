"""Partial rollouts: a step takes the groups that complete first, and later steps continue the other groups."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.rollout.environments import EnvironmentBatch
from jaxrl_llm.structs import Collate, Prompts, Rollouts


class InFlightGroups(NamedTuple):
    """Groups of completions that a later call of the engine continues. All arrays are on the host."""

    prompts: Prompts  # n prompts
    rollouts: Rollouts  # [n, G, C]
    has_ended: np.ndarray  # [n, G] bool, True for completions that have ended
    is_turn_start: np.ndarray  # [n, G, C] bool, True at the first token of each turn, even if it is not sampled yet
    ages: np.ndarray  # [n] int32, steps since the step that sampled the group's first token; 0 without a token
    environments: EnvironmentBatch | None = None  # None for single turns, or before a resumed run has opened them

    @classmethod
    def empty(cls, prompts: Prompts, group_size: int, length: int, pad_id: int) -> InFlightGroups:
        """Returns groups without a token, with room for `length` tokens in each completion."""
        n = len(prompts.tokens)
        false = np.zeros((n, group_size, length), bool)
        rollouts = Rollouts(
            completions=np.full(false.shape, pad_id, np.int32),
            completion_mask=false,
            loss_mask=false,
            logprobs=false.astype(np.float32),
            truncated=false.any(axis=-1),
            versions=false.astype(np.int32),
        )
        is_turn_start = np.broadcast_to(np.arange(length) == 0, false.shape)
        return cls(prompts, rollouts, np.zeros((n, group_size), bool), is_turn_start, np.zeros(n, np.int32))

    @property
    def arrays(self) -> dict[str, Any]:
        """The fields that hold arrays with an entry for each group."""
        return {name: getattr(self, name) for name in ("rollouts", "has_ended", "is_turn_start", "ages")}

    @property
    def has_begun(self) -> np.ndarray:
        """True for groups [n] that have a token."""
        return self.rollouts.completion_mask.any(axis=(1, 2))

    def due_groups(self, max_age: int) -> list[int]:
        """Returns the groups that the next batch must have, because they are `max_age` steps old. 0 = no bound."""
        return np.flatnonzero(self.ages >= max_age).tolist() if max_age else []

    def one_step_later(self) -> InFlightGroups:
        """Returns the groups as the next step finds them: each group with a token is one step older."""
        return self._replace(ages=self.ages + self.has_begun.astype(np.int32))

    def concatenate(self, later: InFlightGroups) -> InFlightGroups:
        """Returns these groups followed by `later`. Either both have environments or neither has."""
        if not len(later.ages):
            return self  # because `later` has no environments if it has no groups
        names = sorted({*self.rollouts.episodes, *later.rollouts.episodes})
        parts = [part.arrays | {"rollouts": part.rollouts.measured(names)} for part in (self, later)]
        environments = self.environments and later.environments and self.environments.concatenate(later.environments)
        arrays = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        return self._replace(prompts=self.prompts.joined(later.prompts), environments=environments, **arrays)

    def take(self, groups: list[int]) -> InFlightGroups:
        """Returns the groups with these indices."""
        environments = self.environments and self.environments.take(groups)
        arrays = jax.tree.map(lambda x: x[groups], self.arrays)
        return self._replace(prompts=self.prompts.take(groups), environments=environments, **arrays)

    def answered_turns(self) -> list[list[list[int]]]:
        """Returns, for each completion, the tokens of the turns that its environment has answered; [] if it has ended.

        A resumed run sends these turns to a new environment, to bring it into the state of the old one.
        """
        by_completion = -1, self.is_turn_start.shape[2]
        tokens = self.rollouts.completions.reshape(by_completion)
        sampled = self.rollouts.loss_mask.reshape(by_completion)
        is_turn_start = self.is_turn_start.reshape(by_completion)
        turns: list[list[list[int]]] = []
        for number, has_ended in enumerate(self.has_ended.ravel()):
            starts = [] if has_ended else np.flatnonzero(is_turn_start[number]).tolist()
            # Each part is a turn and the observation that follows it.
            parts = [slice(start, stop) for start, stop in pairwise(starts)]
            turns.append([tokens[number, part][sampled[number, part]].tolist() for part in parts])
        return turns

    def split(self, groups: list[int]) -> tuple[InFlightGroups, InFlightGroups]:
        """Returns the groups with these indices, and all other groups."""
        other_groups = np.setdiff1d(np.arange(len(self.has_ended)), groups).tolist()
        return self.take(groups), self.take(other_groups)

    def to_checkpoint(self) -> dict[str, Any]:
        """Returns the arrays that a checkpoint keeps. Their names are those of existing checkpoints."""
        arrays = {"numbers": self.prompts.numbers, "rollouts": self.rollouts, "ended": self.has_ended}
        return arrays | {"begins": self.is_turn_start, "ages": self.ages}

    @classmethod
    def from_checkpoint(cls, arrays: dict[str, Any], collate: Collate) -> InFlightGroups:
        """Returns the groups of `to_checkpoint`, without environments. A checkpoint holds dataclasses as dicts."""
        rollouts, *others = (
            Rollouts.from_checkpoint(arrays["rollouts"]),
            arrays["ended"],
            arrays["begins"],
            arrays["ages"],
        )
        return cls(collate(arrays["numbers"]), rollouts, *others)


class FirstCompleteGroups(NamedTuple):
    """What a call has sampled until the wanted number of groups was complete."""

    in_flight: InFlightGroups  # all groups of the call
    # Indices of the wanted complete groups: the required groups, then the others in the order of their completion.
    complete_groups: list[int]
    computed_tokens: int  # tokens that the slots of the decode programs computed
    slot_steps: int  # tokens that these slots could have computed; 0 if the call decoded nothing


class StreamEngine(Protocol):
    """An engine that can end a call when some groups are complete."""

    def sample_first(
        self,
        in_flight: InFlightGroups,
        key: jax.Array,
        *,
        sampling: Sampling,
        wanted_groups: int,
        required_groups: list[int],
    ) -> FirstCompleteGroups:
        """Samples until `wanted_groups` groups are complete, in episodes with the environments of `in_flight`.

        required_groups: groups that must be among the complete ones, at most `wanted_groups`. Only counts of tokens
        decide which groups complete first, and how far the other groups get; time never does.
        """
        ...
