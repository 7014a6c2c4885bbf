"""Advantage estimators: pure functions from rewards [B, G] to advantages [B, G]."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.structs import Array


def grpo(rewards: Array, *, normalise: Literal["group", "batch", "none"] = "group", epsilon: float = 1e-4) -> jax.Array:
    """Group-relative advantages (arXiv 2402.03300): A = (r - mean_group r) / (std r + epsilon).

    rewards [B, G], G >= 2 -> [B, G]. The standard deviation has ddof = 1, as in TRL and veRL.
    normalise: "group" divides by each group's own, "batch" by that of all B x G rewards
    (arXiv 2508.08221), "none" by nothing (Dr. GRPO, arXiv 2503.20783).
    """
    centred = rewards - jnp.mean(rewards, axis=1, keepdims=True)
    if normalise == "none":
        return centred
    axis = {"group": 1, "batch": None}[normalise]
    return centred / (jnp.std(rewards, axis=axis, ddof=1, keepdims=True) + epsilon)
