"""The record of a replayed step: its tokens, rewards and numbers per token as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A replayed step. The letters B, G, P and C are those of `structs`.

    The numbers per token in `columns` are the ones that the loss computed: the mean over the epochs of the step, each
    with the weights before its update. On tokens that are not trained on, they have no meaning.
    """

    run: str  # folder or address of the run
    step: int
    config: dict[str, Any]  # config of the run
    logged: dict[str, float | None]  # the run's line of metrics.jsonl; {} if the run has none
    metrics: dict[str, float | None]  # the replayed line; None = not finite
    differences: dict[str, tuple[float | None, float | None]]  # {metric: (logged, replayed)} of unequal values
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
    # {name: [B, G, C] float32}: logprobs, old_logprobs, sampler_logprobs, entropy, loss (the loss of the token before
    # aggregation), gap (|logprobs - sampler_logprobs|); ratio and clipped (1 if the loss clips the token), unless the
    # loss has no ratio; ref_logprobs and kl with a reference model; values and returns with a critic; weight with an
    # importance correction; masked (1 if an off-policy or entropy mask leaves the token out) with such a mask.
    columns: dict[str, np.ndarray]
    # {"norm", "cosine": [B, G] float32}: norm of a completion's term of the gradient, and its cosine to the whole
    # gradient; {} if they were not computed.
    gradient: dict[str, np.ndarray] = field(default_factory=dict)
    rows: list[dict[str, Any]]  # B data rows, as values of JSON; long texts are shortened
    token_ids: list[int]  # the token ids that occur in prompts and completions, sorted
    token_texts: list[str]  # their texts
    images: list[list[bytes]] = field(default_factory=list)  # thumbnails of each prompt as PNG; [] without images
    notes: list[str] = field(default_factory=list)  # sentences that a reader must know, such as another version of JAX
