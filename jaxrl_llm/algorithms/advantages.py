"""Advantage estimators: pure functions of what a rollout earned.

An estimator names what it needs by its positional arguments, and gets it:

rewards [B, G]           the weighted sum of all channels; a KL penalty in the reward is in it
channels {name: [B, G]}  each reward function by itself; weights {name: float} its weight in the sum
greedy_rewards [B]       of the greedy completion of each prompt, which is then sampled too
token_rewards [B, G, C]  rewards on the last trained token, a KL penalty where it arose
values [B, G, C]         of a critic, before each token
logprobs [B, G, C]       of the tokens, by the policy that sampled them
teacher_logprobs [B, G, C]  of the tokens, by a teacher; other models give other columns (`learner.scorers.FROZEN`)
loss_mask [B, G, C]      the trained tokens

It returns advantages [B, G], or [B, G, C]. Its keyword arguments are the fields of `config.advantage`.
Standard deviations have ddof = 1, as in TRL and veRL. epsilon is added to a deviation, and in whitening to a variance.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrl_llm.config.schema import AtLeastOne, NotNegative, Share
from jaxrl_llm.structs import Array

SIGNALS = ("rewards", "channels", "weights", "greedy_rewards", "token_rewards", "values", "logprobs", "loss_mask")
OF_A_GROUP = ("grpo", "rloo", "reinforce_pp_baseline", "opo", "gdpo", "pass_at_k")  # of no use at G = 1
OF_A_TOKEN = ("reinforce_pp", "gae", "distillation")  # these differ within a completion


def grpo(
    rewards: Float[Array, "B G"], *, normalize: Literal["group", "batch", "none"] = "group", epsilon: NotNegative = 1e-4
) -> Float[Array, "B G"]:
    """Group-relative advantages (arXiv 2402.03300): A = (r - mean_group r) / (std r + epsilon).

    G >= 2. normalize: "group" divides by each group's own deviation, "batch" by that of all B x G
    rewards (arXiv 2508.08221), "none" by nothing (Dr. GRPO, arXiv 2503.20783). A group without signal has A = 0.
    A KL penalty in the reward needs "none": the deviation of a group without signal would be that of the penalty.
    """
    centered = _centered(rewards)
    if normalize == "none":
        return centered
    axis = {"group": 1, "batch": None}[normalize]
    return centered / (jnp.std(rewards, axis=axis, ddof=1, keepdims=True) + epsilon)


def rloo(rewards: Float[Array, "B G"]) -> Float[Array, "B G"]:
    """Leave-one-out baseline (arXiv 2402.14740): A_i = r_i - mean of the other G - 1 rewards of the group. G >= 2."""
    g = rewards.shape[1]
    return _centered(rewards) * (g / (g - 1))


def reinforce_pp(
    token_rewards: Float[Array, "B G C"],
    loss_mask: Bool[Array, "B G C"],
    *,
    gamma: Share = 1.0,
    epsilon: NotNegative = 1e-8,
) -> Float[Array, "B G C"]:
    """REINFORCE++ (arXiv 2501.03262): returns sum_{s >= t} gamma^(s - t) r_s, whitened over the batch's tokens."""
    zeros = jnp.zeros_like(token_rewards)
    return _whiten(gae(token_rewards, zeros, loss_mask, gamma=gamma, lam=1.0, normalize=False), loss_mask, epsilon)


def reinforce_pp_baseline(
    rewards: Float[Array, "B G"], loss_mask: Bool[Array, "B G C"], *, epsilon: NotNegative = 1e-8
) -> Float[Array, "B G C"]:
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262): r - mean_group r, whitened over tokens."""
    return _whiten(jnp.broadcast_to(_centered(rewards)[..., None], loss_mask.shape), loss_mask, epsilon)


def remax(rewards: Float[Array, "B G"], greedy_rewards: Float[Array, " B"]) -> Float[Array, "B G"]:
    """ReMax (arXiv 2310.10505): A = r - reward of the prompt's greedy completion. G >= 1."""
    return rewards - greedy_rewards[:, None]


def opo(rewards: Float[Array, "B G"], loss_mask: Bool[Array, "B G C"]) -> Float[Array, "B G"]:
    """Optimal baseline by length (arXiv 2505.23585): A = r - sum_group l r / sum_group l, l the trained tokens."""
    lengths = jnp.sum(loss_mask, axis=-1).astype(rewards.dtype)
    baseline = jnp.sum(lengths * rewards, axis=1, keepdims=True)
    return _zero_without_signal(rewards - baseline / jnp.maximum(jnp.sum(lengths, axis=1, keepdims=True), 1), rewards)


def gdpo(
    channels: dict[str, Float[Array, "B G"]], weights: dict[str, float], *, epsilon: NotNegative = 1e-4
) -> Float[Array, "B G"]:
    """Each channel normalized by itself (GDPO, arXiv 2601.05242), so that none drowns another. G >= 2.

    A = whitened over B x G of sum_n w_n (r_n - mean_group r_n) / (std_group r_n + epsilon).
    """
    normalized = (weights[name] * grpo(x, epsilon=epsilon) for name, x in channels.items() if weights[name])
    total = jnp.sum(jnp.stack(list(normalized)), axis=0)
    return (total - jnp.mean(total)) / (jnp.std(total, ddof=1) + epsilon)


def pass_at_k(
    rewards: Float[Array, "B G"], *, k: AtLeastOne, threshold: float = 0.5, epsilon: NotNegative = 1e-4
) -> Float[Array, "B G"]:
    """Advantages of being in a set of k that holds a success (arXiv 2508.10751), in closed form. 1 <= k <= G.

    With n of the G rewards below the threshold: R = 1 - C(n, k) / C(G, k), s = sqrt(R (1 - R)), and
    A = (1 - R) / (s + epsilon) for a success, (1 - R - C(n - 1, k - 1) / C(G - 1, k - 1)) / (s + epsilon) for a
    failure.
    """
    g = rewards.shape[1]
    failed = rewards < threshold
    n = jnp.sum(failed, axis=1, keepdims=True).astype(rewards.dtype)
    missed = _all_from(n, g, k)  # 1 - R
    spread = jnp.sqrt(missed * (1 - missed)) + epsilon
    others_fail = _all_from(n - 1, g - 1, k - 1)
    return (missed - jnp.where(failed, others_fail, 0.0)) / spread


def gae(
    token_rewards: Float[Array, "B G C"],
    values: Float[Array, "B G C"],
    loss_mask: Bool[Array, "B G C"],
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    normalize: bool = True,
    epsilon: NotNegative = 1e-8,
) -> Float[Array, "B G C"]:
    """Generalized advantage estimation (arXiv 1506.02438) [B, G, C] over the trained tokens alone.

    A_t = d_t + gamma lam A_t', d_t = r_t + gamma V_t' - V_t, t' the next trained token; after the last
    both are 0. What an environment wrote in between is stepped over. normalize: whitened over them.
    """

    def back(after: tuple[Array, Array], now: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (next_value, next_advantage), (reward, value, trained) = after, now
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        kept = (jnp.where(trained, value, next_value), jnp.where(trained, advantage, next_advantage))
        return kept, jnp.where(trained, advantage, 0.0)

    nothing = jnp.zeros(loss_mask.shape[:2], values.dtype)
    reward, value, trained = (jnp.moveaxis(x, 2, 0) for x in (token_rewards, values, loss_mask))
    _, advantages = jax.lax.scan(back, (nothing, nothing), (reward, value, trained), reverse=True)
    advantages = jnp.moveaxis(advantages, 0, 2)
    return _whiten(advantages, loss_mask, epsilon) if normalize else advantages


def distillation(teacher_logprobs: Float[Array, "B G C"], logprobs: Float[Array, "B G C"]) -> Float[Array, "B G C"]:
    """On-policy distillation: A_t = log teacher - log policy of token t, minus the reverse KL's one-sample estimate.

    Its REINFORCE gradient is that of KL(policy || teacher) at each token, given what the policy wrote before
    (arXiv 2306.13649 with its lambda and beta at 1). No reward is looked at.
    """
    return teacher_logprobs - logprobs


def _whiten(x: Float[Array, "B G C"], mask: Bool[Array, "B G C"], epsilon: NotNegative) -> Float[Array, "B G C"]:
    """(x - mean) / sqrt(variance + epsilon) over the entries of the mask, 0 elsewhere.

    Rounding must not become a deviation where all entries are equal: hence the second centering, and the root of both.
    """
    count = jnp.maximum(jnp.sum(mask), 1)
    centered = jnp.where(mask, x - jnp.sum(jnp.where(mask, x, 0.0)) / count, 0.0)
    centered = jnp.where(mask, centered - jnp.sum(centered) / count, 0.0)
    return centered / jnp.sqrt(jnp.sum(centered**2) / jnp.maximum(count - 1, 1) + epsilon)


def _centered(rewards: Float[Array, "B G"]) -> Float[Array, "B G"]:
    return _zero_without_signal(rewards - jnp.mean(rewards, axis=1, keepdims=True), rewards)


def _zero_without_signal(advantages: Float[Array, "B G"], rewards: Float[Array, "B G"]) -> Float[Array, "B G"]:
    """Exactly 0 where a group's rewards are equal: a mean is off by rounding, which a division would blow up."""
    return jnp.where(jnp.max(rewards, axis=1, keepdims=True) > jnp.min(rewards, axis=1, keepdims=True), advantages, 0.0)


def _all_from(n: Array, g: int, k: int) -> jax.Array:
    """C(n, k) / C(g, k): the chance that k drawn from g are all of some n of them; exactly 0 for n < k."""
    chance = jnp.ones_like(n)
    for i in range(k):
        chance = chance * jnp.maximum(n - i, 0) / (g - i)
    return chance
