"""Estimators of KL(policy || reference) from log-probabilities of sampled tokens.

They are elementwise over [B, G, C], with d = ref_logprobs - logprobs.
See J. Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).

k3 is unbiased if the policy can sample all tokens that the reference can, because then the mean of exp(d) is 1. With
top-k or top-p, policy and reference exclude different tokens, and the mean of k3 is the KL minus the reference's
probability of the tokens that the policy excludes. k1 remains unbiased.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Float

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.structs import Array

MAX_LOG_RATIO = 20.0  # upper bound of d in k3, which keeps exp(d) and its gradient finite


def k1(logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns -d: unbiased, signed. It suits only the reward, as a loss its on-policy gradient has mean zero."""
    return logprobs - ref_logprobs


def k2(logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns d^2 / 2: biased, never negative. As a loss, its on-policy gradient is the gradient of the KL."""
    return 0.5 * jnp.square(ref_logprobs - logprobs)


def k3(logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns exp(d) - d - 1: unbiased without top-k and top-p, never negative (used by GRPO, arXiv 2402.03300)."""
    d = jnp.minimum(ref_logprobs - logprobs, MAX_LOG_RATIO)
    # expm1 is used, because exp(d) - 1 loses the bits of a small d: at d = 1e-3, k3 is 5e-7 and the error would be
    # 1e-7.
    return jnp.expm1(d) - d


def unbiased_estimator(sampling: Sampling) -> Callable[[Array, Array], Array]:
    """Returns the unbiased estimator with the least variance: k1 with top-k or top-p, otherwise k3."""
    return k1 if sampling.truncates else k3
