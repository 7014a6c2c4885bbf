"""The records of a training step, and the names of array dimensions.

B  prompts in a step            P  prompt tokens (padded)
G  completions of one prompt    C  completion tokens (padded)
V  vocabulary    D  model width    L  layers    H  query heads    K  key/value heads

Arrays over prompt tokens are [B, P]. Arrays over completion tokens are [B, G, C]: entry [b, g, t] describes token t
itself, for example its log-probability given all earlier tokens, its mask or its advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np

if TYPE_CHECKING:
    Array: TypeAlias = jax.Array
else:
    Array = jax.Array | np.ndarray  # functions also take NumPy arrays; type checkers see jax.Array, for its operators
AnyArray: TypeAlias = Any  # in records: jax.Array on the device, np.ndarray on the host, or None
PyTree: TypeAlias = Any
Config: TypeAlias = Any  # an ml_collections.ConfigDict: its fields have no static types


@dataclass(frozen=True)
class Prompts:
    """The prompts of a step, on the host."""

    tokens: np.ndarray  # [B, P] int32
    mask: np.ndarray  # [B, P] bool, True on real tokens (left- or right-padded)
    rows: list[dict[str, Any]]  # B data rows, with all columns for the reward functions
    numbers: np.ndarray  # [B] int32, indices of these rows in the data set
    sources: list[str] = field(default_factory=list)  # B names of the sources of these rows; []: there is no mixture


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollouts:
    """Completions from an engine, with padding after the stop token."""

    completions: AnyArray  # [B, G, C] int32
    completion_mask: AnyArray  # [B, G, C] bool, True on real tokens (attended to)
    loss_mask: AnyArray  # [B, G, C] bool, True on tokens that the policy sampled (trained on)
    logprobs: AnyArray  # [B, G, C] float32, of the sampled distribution
    truncated: AnyArray  # [B, G] bool, True if the limit came before a stop token, or if an episode met a limit
    versions: AnyArray  # [B, G, C] int32, step after which the sampling weights were pushed
    episodes: dict[str, AnyArray] = field(default_factory=dict)  # {metric: [B, G]} of episodes with an environment


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rewards:
    """The rewards of completions, from the reward functions."""

    total: AnyArray  # [B, G], weighted sum of the channels; NaN where no function with a weight returned a number
    channels: dict[str, AnyArray]  # {function: [B, G]}, NaN where the function abstained
    greedy: AnyArray = None  # [B, 1], total of each prompt's greedy completion, if the estimator needs it
    greedy_lengths: AnyArray = None  # [B, 1], number of its tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The inputs of an update. A field that a run does not need is None."""

    prompts: AnyArray  # [B, P] int32
    prompt_mask: AnyArray  # [B, P] bool
    completions: AnyArray  # [B, G, C] int32
    completion_mask: AnyArray  # [B, G, C] bool
    loss_mask: AnyArray  # [B, G, C] bool
    advantages: AnyArray = None  # [B, G, C], 0 on untrained tokens
    values: AnyArray = None  # [B, G, C], by the critic before its update
    returns: AnyArray = None  # [B, G, C], the critic's targets
    rewards: AnyArray = None  # [B, G], without a KL penalty; NaN as `Rewards.total`
    policy_mask: AnyArray = None  # [B, G, C] bool, tokens in the policy loss; None: all trained tokens
    sampler_logprobs: AnyArray = None  # [B, G, C], reported by the engine
    old_logprobs: AnyArray = None  # [B, G, C], by the policy before the first update; None: by the current policy
    ref_logprobs: AnyArray = None  # [B, G, C], by the reference (the KL anchor)
    packed_index: AnyArray = None  # [B, E, N, T] int32, from `packing.pack`; None: each completion is a row


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A model in training: a frozen pytree of arrays."""

    params: PyTree
    opt_state: PyTree
    coef_state: PyTree  # state of each coefficient (`optim.Coefficient`)


@dataclass(frozen=True)
class Totals:
    """Batch sizes and step counts that follow from a config."""

    prompts_per_update: int
    sequences_per_step: int
    sequences_per_update: int
    updates_per_rollout: int
    updates: int
    scheduled_updates: int  # optimizer steps that the schedules cover
    warmup_steps: int
    completion_tokens: int  # upper bound for the whole run
    critic_updates: int = 0  # optimizer steps that the critic's schedule covers


class Pending(NamedTuple):
    """The part of a checkpoint that makes a resumed run continue with the same samples."""

    position: dict[str, Any]  # of the source of batches, after the last of `batches`
    batches: list[tuple[dict[str, Any], dict[str, Any]]]  # arrays and metrics of each batch that waits for its update
