"""Estimators of KL(policy || reference) from log-probabilities of sampled tokens.

See J. Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). With
d = ref_logprobs - logprobs, elementwise over [B, G, C].
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxrl_llm.structs import Array, PyTree

LARGEST = 20.0  # d in k3: exp of what is beyond, and its gradient, would soon not be finite


def k1(logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """-d: unbiased, signed. For the reward only: as a loss its on-policy gradient has mean zero."""
    return logprobs - ref_logprobs


def k2(logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """d^2 / 2: biased, never negative; as a loss its on-policy gradient is that of the KL."""
    return 0.5 * jnp.square(ref_logprobs - logprobs)


def k3(logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """exp(d) - d - 1: unbiased, never negative (GRPO's choice, arXiv 2402.03300)."""
    d = jnp.minimum(ref_logprobs - logprobs, LARGEST)
    return jnp.expm1(d) - d


@partial(jax.jit, donate_argnums=0)
def mix_params(ref_params: PyTree, params: PyTree, rate: float | Array) -> PyTree:
    """The reference moved towards the policy: (1 - rate) ref + rate policy, in the reference's memory."""
    return jax.tree.map(lambda ref, new: (1 - rate) * ref + rate * new, ref_params, params)
