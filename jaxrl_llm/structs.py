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
from typing import Any, TypeAlias

import jax
import numpy as np

Array: TypeAlias = Any  # jax.Array, or np.ndarray: no checker follows their operators through the union
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

    completions: Array  # [B, G, C] int32
    completion_mask: Array  # [B, G, C] bool, a real token (attended to)
    loss_mask: Array  # [B, G, C] bool, sampled by the policy (trained on)
    logprobs: Array  # [B, G, C] float32, of the distribution actually sampled
    truncated: Array  # [B, G] bool, the limit came before a stop token
    versions: Array  # [B, G, C] int32, the step after which the weights that sampled a token were pushed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rewards:
    """What completions earned, as the reward functions say."""

    total: Array  # [B, G], the weighted sum of the channels
    channels: dict[str, Array]  # {function: [B, G]}, NaN where it abstained
    greedy: Array = None  # [B, 1], the total of each prompt's greedy completion, where an estimator asks for it
    greedy_lengths: Array = None  # [B, 1], its tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """What an update needs. A field that a run has no use for is None."""

    prompts: Array  # [B, P] int32
    prompt_mask: Array  # [B, P] bool
    completions: Array  # [B, G, C] int32
    completion_mask: Array  # [B, G, C] bool
    loss_mask: Array  # [B, G, C] bool
    advantages: Array = None  # [B, G, C], 0 where nothing is trained
    values: Array = None  # [B, G, C], the critic's before its update
    returns: Array = None  # [B, G, C], what the critic is to learn
    rewards: Array = None  # [B, G], of the task
    policy_mask: Array = None  # [B, G, C] bool, tokens that the policy loss counts; None: all trained ones
    sampler_logprobs: Array = None  # [B, G, C], what the engine reported
    old_logprobs: Array = None  # [B, G, C]; None: this very policy sampled
    ref_logprobs: Array = None  # [B, G, C], the KL anchor
    packed_index: Array = None  # [B, N, T] int32, as `packing.pack` makes it; None: each completion is a row


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A model in training: a frozen pytree of arrays."""

    step: Array  # int32 scalar, optimizer updates made (a skipped one included)
    params: PyTree
    opt_state: PyTree
    coef_state: PyTree  # what each coefficient keeps of the updates so far (`optim.Coefficient`)
