"""Losses: factories that hold hyperparameters and return `loss_fn(logprobs, batch)`.

A loss_fn maps logprobs [B, G, C] to a per-token loss [B, G, C] and a dict of per-token
metrics [B, G, C] (averaged over trained tokens). Reduction is `aggregation_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxrl_llm.structs import Array, Batch

Metrics: TypeAlias = dict[str, Array]
LossFn: TypeAlias = Callable[[Array, Batch], tuple[Array, Metrics]]


def ppo_clip(*, clip_low: float = 0.2, clip_high: float = 0.2) -> LossFn:
    """Clipped surrogate (arXiv 1707.06347; clip_high > clip_low as in DAPO, arXiv 2503.14476).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).
    """

    def loss_fn(logprobs: Array, batch: Batch) -> tuple[Array, Metrics]:
        on_policy = batch.old_logprobs is None
        old = jax.lax.stop_gradient(logprobs) if on_policy else batch.old_logprobs
        advantages = batch.advantages[:, :, None]
        ratio = jnp.exp(logprobs - old)
        clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
        loss = -jnp.minimum(ratio * advantages, clipped * advantages)
        bound = jnp.where(advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low) & (advantages != 0)
        return loss, {"clip/fraction": bound.astype(jnp.float32), "ratio/mean": ratio}

    return loss_fn


def cross_entropy() -> LossFn:
    """-logprobs: supervised fine-tuning."""

    def loss_fn(logprobs: Array, batch: Batch) -> tuple[Array, Metrics]:
        return -logprobs, {}

    return loss_fn


def aggregation_weights(mask: Array, *, mode: str, constant_length: int = 0) -> jax.Array:
    """Weights [B, G, C] such that sum(weights * per-token loss) is the loss of this update.

    The denominators are those of the whole mask [B, G, C], so that the parts of a
    micro-batched or sharded update add up to the same number. mode:
    "token_mean"     1 / trained tokens (DAPO, arXiv 2503.14476),
    "sequence_mean"  1 / (sequences x the sequence's own tokens) (GRPO, arXiv 2402.03300),
    "constant"       1 / (sequences x constant_length) (Dr. GRPO, arXiv 2503.20783).
    A sequence without a trained token counts for nothing.
    """
    mask = mask.astype(jnp.float32)
    lengths = jnp.sum(mask, axis=-1, keepdims=True)
    sequences = jnp.maximum(jnp.sum(lengths > 0), 1)
    if mode == "token_mean":
        return mask / jnp.maximum(jnp.sum(mask), 1)
    if mode == "sequence_mean":
        return mask / (sequences * jnp.maximum(lengths, 1))
    return mask / (sequences * constant_length)
