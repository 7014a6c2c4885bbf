"""The records that flow through a step, and the legend of dimensions.

B  prompts in a step            P  prompt tokens (padded)
G  completions of one prompt    C  completion tokens (padded)
V  vocabulary    D  model width    L  layers    H  query heads    K  key/value heads

What belongs to a prompt is [B, P], what belongs to a completion token is [B, G, C].
Entry [b, g, t] of a per-token array describes completion token t itself: its
log-probability given all before it, its mask, its advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

if TYPE_CHECKING:
    Array: TypeAlias = jax.Array
else:
    Array = jax.Array | np.ndarray  # functions take NumPy's too; a type checker sees JAX's, whose operators it knows
AnyArray: TypeAlias = Any  # in records, which hold jax.Array on the device, np.ndarray on the host, or None
PyTree: TypeAlias = Any
Config: TypeAlias = Any  # an ml_collections.ConfigDict: its fields have no static types


@dataclass(frozen=True)
class Prompts:
    """One step's prompts, on the host."""

    tokens: np.ndarray  # [B, P] int32
    mask: np.ndarray  # [B, P] bool, True on real tokens (left- or right-padded)
    rows: list[dict[str, Any]]  # B data rows, with every column the reward may ask for
    numbers: np.ndarray  # [B] int32, where those rows stand in the data set


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollouts:
    """What an engine sampled; padding after the stop token."""

    completions: AnyArray  # [B, G, C] int32
    completion_mask: AnyArray  # [B, G, C] bool, a real token (attended to)
    loss_mask: AnyArray  # [B, G, C] bool, sampled by the policy (trained on)
    logprobs: AnyArray  # [B, G, C] float32, of the distribution actually sampled
    truncated: AnyArray  # [B, G] bool, the limit came before a stop token
    versions: AnyArray  # [B, G, C] int32, the step after which the weights that sampled a token were pushed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rewards:
    """What completions earned, as the reward functions say."""

    total: AnyArray  # [B, G], the weighted sum of the channels
    channels: dict[str, AnyArray]  # {function: [B, G]}, NaN where it abstained
    greedy: AnyArray = None  # [B, 1], the total of each prompt's greedy completion, where an estimator asks for it
    greedy_lengths: AnyArray = None  # [B, 1], its tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """What an update needs. A field that a run has no use for is None."""

    prompts: AnyArray  # [B, P] int32
    prompt_mask: AnyArray  # [B, P] bool
    completions: AnyArray  # [B, G, C] int32
    completion_mask: AnyArray  # [B, G, C] bool
    loss_mask: AnyArray  # [B, G, C] bool
    advantages: AnyArray = None  # [B, G, C], 0 where nothing is trained
    values: AnyArray = None  # [B, G, C], the critic's before its update
    returns: AnyArray = None  # [B, G, C], what the critic is to learn
    rewards: AnyArray = None  # [B, G], of the task
    policy_mask: AnyArray = None  # [B, G, C] bool, tokens that the policy loss counts; None: all trained ones
    sampler_logprobs: AnyArray = None  # [B, G, C], what the engine reported
    old_logprobs: AnyArray = None  # [B, G, C]; None: this very policy sampled
    ref_logprobs: AnyArray = None  # [B, G, C], the KL anchor
    packed_index: AnyArray = None  # [B, N, T] int32, as `packing.pack` makes it; None: each completion is a row


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A model in training: a frozen pytree of arrays."""

    params: PyTree
    opt_state: PyTree
    coef_state: PyTree  # what each coefficient keeps of the updates so far (`optim.Coefficient`)
