"""The record of a replayed step: its tokens, rewards and numbers per token as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class UpdateOutcome:
    """What the updates of a step did under one setting."""

    metrics: dict[str, float]  # metrics of the updates, as a run logs them
    kl_after: float  # KL of the policy before the updates to the policy after them, per trained token (k3)
    gradient: dict[str, np.ndarray]  # as `StepRecord.gradient`


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The updates of a step with the settings of the run, and with other ones."""

    changes: dict[str, str]  # {changed config field: its value as text}
    own: UpdateOutcome
    other: UpdateOutcome
    cosine: float  # cosine of the angle between the two changes of the parameters; 0 if one change is 0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A replayed step. The letters B, G, P and C are those of `structs`.

    The numbers per token in `columns` are the ones that the loss computed, with the weights before the update of the
    token's prompt: in the first epoch for logprobs, loss, gap and weight, and as the mean over the epochs for the
    others. They are 0 on tokens that are not trained on.
    """

    run: str  # folder or address of the run
    step: int
    config: dict[str, Any]  # config of the run
    logged: dict[str, float | None]  # the run's line of metrics.jsonl; {} if the run has none
    metrics: dict[str, float | None]  # the replayed line; None = not finite
    differences: dict[str, tuple[float | None, float | None]]  # {metric: (logged, replayed)} of unequal values
    exact: bool  # whether values were compared bit for bit; False: within a tolerance, for the reason in `notes`
    prompts: np.ndarray  # [B, P] int32
    prompt_mask: np.ndarray  # [B, P] bool
    completions: np.ndarray  # [B, G, C] int32
    completion_mask: np.ndarray  # [B, G, C] bool, True on real tokens
    loss_mask: np.ndarray  # [B, G, C] bool, True on trained tokens
    truncated: np.ndarray  # [B, G] bool, True if the completion reached a limit
    versions: np.ndarray  # [B, G, C] int32, step after which the sampling weights were pushed
    advantages: np.ndarray  # [B, G, C] float32
    rewards: np.ndarray  # [B, G] float32, total reward; NaN without a verdict
    channels: dict[str, np.ndarray]  # {reward function: [B, G]}; NaN without a verdict
    # Numbers per token, {name: [B, G, C] float32}. Always: logprobs, old_logprobs, sampler_logprobs, entropy,
    # gap (|logprobs - sampler_logprobs|), weight (importance weight pi_old / pi_sampler), loss (of the token, before
    # aggregation).
    # With a loss that has a ratio: ratio; with one that clips: clipped (1 if the loss clips the token). With a
    # reference model: ref_logprobs, kl. With a critic: values, returns. With an off-policy or an entropy mask: masked
    # (1 if the mask leaves the token out).
    columns: dict[str, np.ndarray]
    # {"norm", "cosine": [B, G] float32}: norm of a completion's term of the gradient, and its cosine to the whole
    # gradient; {} if they were not computed.
    gradient: dict[str, np.ndarray] = field(default_factory=dict)
    # Further inputs of the loss: policy_mask, columns/NAME, images/NAME, tree/NAME, as the fields of `structs.Batch`.
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)  # coefficients of the first update, such as kl/coef
    first_update: list[int] = field(default_factory=list)  # indices of the prompts of the first update
    # Hashes of models, rows and code of the run, and versions and processor of this replay.
    fingerprints: dict[str, str]
    rows: list[dict[str, Any]]  # B data rows, as values of JSON; long texts are shortened
    token_ids: list[int]  # the token ids that occur in prompts and completions, sorted
    token_texts: list[str]  # text of each of `token_ids`
    images: list[list[str]] = field(default_factory=list)  # thumbnails of each prompt as data URLs; [] without images
    what_if: WhatIf | None = None  # comparison with other settings; None if none was asked for
    notes: list[str] = field(default_factory=list)  # sentences that a reader must know, such as another version of JAX
