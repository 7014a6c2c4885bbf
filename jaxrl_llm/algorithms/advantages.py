"""Advantage estimators: pure functions from the rewards of a rollout to advantages.

The names of an estimator's positional arguments select its inputs:

rewards [B, G]           weighted sum of all channels, including the overlong penalty and a KL penalty in the reward
task_rewards [B, G]      weighted sum of all channels without penalties; a group with equal ones has no signal
has_reward [B, G]        False where no function with a weight returned a number: there `rewards` is 0 by default,
                         the completion is not trained on, and it must not count in means and deviations
channels {name: [B, G]}  rewards of each function, NaN where it returned None; weights {name: float} their weights
greedy_rewards [B]       reward of the greedy completion of each prompt, which the run samples for this estimator
token_rewards [B, G, C]  rewards on the last trained token, and a KL penalty on each token; for an estimator with an
                         input of turns, the rewards of turns are on the last tokens of the turns
turn_rewards [B, G, C]   reward of a turn on its last token, with the weight of its function, and 0 elsewhere; `rewards`
                         and `task_rewards` include its sum
turn_numbers [B, G, C]   number of the turn of each token that the policy sampled, from 0; -1 elsewhere
loss_mask [B, G, C]      True on trained tokens

and the columns [B, G, C] of the models that score, before the first update (`learner.scorers`):

old_logprobs             log-probabilities of the tokens, by the policy
entropy                  entropy of the distribution from which a token was sampled, by the policy
ref_logprobs             log-probabilities by the reference
values                   the critic's value before each token
NAME_logprobs            log-probabilities by the teacher `config.teachers.NAME`
reward_model_scores      score of the completion up to and with each token

An estimator returns advantages [B, G] or [B, G, C]. Its keyword arguments are the fields of `config.advantage`.
Standard deviations have ddof = 1, as in TRL and veRL. epsilon is added to the deviation; `_whiten` adds it to the
variance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrl_llm.algorithms.traits import Trait, declares
from jaxrl_llm.config.schema import AtLeastOne, NotNegative, Share
from jaxrl_llm.structs import Array

PENALIZED_INPUTS = "rewards", "token_rewards"  # inputs that include the penalties
TURN_INPUTS = "turn_rewards", "turn_numbers"  # inputs that only a run with several turns has
REWARD_INPUTS = (*PENALIZED_INPUTS, "task_rewards", "has_reward", "channels", "weights", "greedy_rewards", "loss_mask")


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator whose keyword arguments are set, and the inputs that it reads."""

    name: str  # name of the function in this module; "" for a user's function
    compute: Callable[..., Array]  # (inputs by keyword) -> advantages [B, G] or [B, G, C]
    inputs: tuple[str, ...]  # names of the inputs

    @property
    def needs_reward(self) -> bool:
        """Whether the estimator reads rewards, so that completions without a reward are not trained on."""
        return bool({*PENALIZED_INPUTS, "task_rewards", "channels", "turn_rewards"} & set(self.inputs))

    @property
    def uses_penalties(self) -> bool:
        """Whether a penalty in the reward changes the advantages."""
        return bool({*PENALIZED_INPUTS} & set(self.inputs))

    @property
    def needs_greedy(self) -> bool:
        """Whether the run also samples the greedy completion of each prompt."""
        return "greedy_rewards" in self.inputs

    @property
    def needs_turns(self) -> bool:
        """Whether the estimator assigns credit by the turn."""
        return bool({*TURN_INPUTS} & set(self.inputs))


@declares(Trait.COMPARES_GROUP, Trait.DIVIDES)
def grpo(
    rewards: Float[Array, "B G"],
    has_reward: Bool[Array, "B G"] | None = None,
    task_rewards: Float[Array, "B G"] | None = None,
    *,
    normalize: Literal["group", "batch", "none"] = "group",
    epsilon: NotNegative = 1e-4,
) -> Float[Array, "B G"]:
    """Computes group-relative advantages (arXiv 2402.03300): A = (r - mean_group r) / (std r + epsilon).

    G >= 2. normalize: "group" divides by the deviation of each group, "batch" by the deviation of all B x G rewards
    (arXiv 2508.08221), and "none" does not divide (Dr. GRPO, arXiv 2503.20783). A group with equal rewards has A = 0.
    If A is divided, a group with equal task rewards also has A = 0, whatever its penalties are: the division would
    scale a small penalty up to advantages as large as those of the task. So a KL penalty in the reward needs "none",
    which keeps its effect in these groups.
    """
    if normalize == "none":
        return _centered(rewards, has_reward)
    centered = _centered(rewards, has_reward, task_rewards)
    axis = {"group": 1, "batch": None}[normalize]
    return centered / (_deviation(rewards, has_reward, axis) + epsilon)


@declares(Trait.COMPARES_GROUP, Trait.DIVIDES, Trait.VARIES_BY_TOKEN)
def grpo_turns(
    rewards: Float[Array, "B G"],
    turn_rewards: Float[Array, "B G C"],
    turn_numbers: Int[Array, "B G C"],
    has_reward: Bool[Array, "B G"] | None = None,
    task_rewards: Float[Array, "B G"] | None = None,
    *,
    normalize: Literal["group", "none"] = "group",
    epsilon: NotNegative = 1e-4,
) -> Float[Array, "B G C"]:
    """Computes group-relative advantages of turns: the outcome, and the rewards from the turn on. G >= 2.

    A token of turn t of completion i has the advantage a_it / (s + epsilon), with

        a_it = o_i - mean_group o + z_it - mean_{j has a turn t} z_jt,    z_it = sum_{u >= t} r_iu,
        s^2 = sum_i mean_t a_it^2 / (G - 1); normalize = "none" divides by 1.

    r_iu: reward of turn u. o_i: the other rewards of the completion, which do not belong to a turn. Without rewards of
    turns, this is `grpo`. A group with equal rewards has A = 0, as in `grpo`. If no other completion of the group has a
    turn t, only the outcome counts there.

    The baseline of a turn follows from other completions, and from the fact that the completion has this turn. It does
    not depend on whether turn t is the last one, so it leaves the expected gradient unchanged. The advantage of
    arXiv 2505.11821 for several turns, sum_{u >= t} (r_iu - mean_u r_u), subtracts one term for each turn of the
    completion itself. So each further turn costs the mean reward of a turn, and the policy learns to stop early
    (verl issue 7244).
    """
    # Slot t of the last axis belongs to turn t of a completion, which has at most C turns.
    sum_by_turn = jax.vmap(jax.vmap(partial(jax.ops.segment_sum, num_segments=turn_numbers.shape[-1])))
    is_sampled, index = turn_numbers >= 0, jnp.clip(turn_numbers, 0, turn_numbers.shape[-1] - 1)
    counts = is_sampled if has_reward is None else is_sampled & has_reward[..., None]
    has_turn = sum_by_turn(counts.astype(jnp.int32), index) > 0
    to_go = jnp.cumsum(sum_by_turn(turn_rewards, index)[..., ::-1], axis=-1)[..., ::-1]
    completions = jnp.maximum(jnp.sum(has_turn, axis=1, keepdims=True), 1)
    baseline = jnp.sum(to_go, axis=1, keepdims=True, where=has_turn) / completions
    outcome = rewards - jnp.sum(turn_rewards, axis=-1)
    centered = _centered(outcome, has_reward)[..., None] + to_go - baseline
    signal = _zero_without_signal(jnp.ones_like(rewards), rewards, has_reward)
    if normalize == "group":
        signal = signal if task_rewards is None else _zero_without_signal(signal, task_rewards, has_reward)
        turns = jnp.maximum(jnp.sum(has_turn, axis=-1), 1)
        squares = jnp.sum(centered**2, axis=-1, where=has_turn) / turns
        others = jnp.maximum(_count_rewarded(rewards, has_reward) - 1, 1)
        centered /= (jnp.sqrt(jnp.sum(squares, axis=1, keepdims=True) / others) + epsilon)[..., None]
    # Where the signal is 0, `centered` is a rounding error or the reward of a completion that does not count.
    return jnp.where(signal[..., None] > 0, jnp.take_along_axis(centered, index, axis=-1), 0.0)


@declares(Trait.COMPARES_GROUP)
def rloo(rewards: Float[Array, "B G"], has_reward: Bool[Array, "B G"] | None = None) -> Float[Array, "B G"]:
    """Computes leave-one-out advantages (arXiv 2402.14740): A_i = r_i - mean of the group's other rewards. G >= 2."""
    g = _count_rewarded(rewards, has_reward)
    # This uses r_i - mean of the other G - 1 rewards = (r_i - mean of all G rewards) G / (G - 1).
    return _centered(rewards, has_reward) * (g / jnp.maximum(g - 1, 1))


@declares(Trait.VARIES_BY_TOKEN, Trait.NEEDS_CHAINS)
def reinforce_pp(
    token_rewards: Float[Array, "B G C"],
    loss_mask: Bool[Array, "B G C"],
    *,
    gamma: Share = 1.0,
    epsilon: NotNegative = 1e-8,
) -> Float[Array, "B G C"]:
    """Computes REINFORCE++ (arXiv 2501.03262): sum_{s >= t} gamma^(s - t) r_s, whitened over the batch's tokens."""
    # `gae` with values of 0 and lam = 1 returns the discounted sums of the later rewards.
    zeros = jnp.zeros_like(token_rewards)
    return _whiten(gae(token_rewards, zeros, loss_mask, gamma=gamma, lam=1.0, normalize=False), loss_mask, epsilon)


@declares(Trait.COMPARES_GROUP, Trait.DIVIDES)
def reinforce_pp_baseline(
    rewards: Float[Array, "B G"],
    loss_mask: Bool[Array, "B G C"],
    has_reward: Bool[Array, "B G"] | None = None,
    task_rewards: Float[Array, "B G"] | None = None,
    *,
    epsilon: NotNegative = 1e-8,
) -> Float[Array, "B G C"]:
    """Computes REINFORCE++ with a group baseline (arXiv 2501.03262): r - mean_group r, whitened over tokens.

    A group with equal task rewards has A = 0 before whitening, as in `grpo`.
    """
    centered = _centered(rewards, has_reward, task_rewards)
    return _whiten(jnp.broadcast_to(centered[..., None], loss_mask.shape), loss_mask, epsilon)


def remax(rewards: Float[Array, "B G"], greedy_rewards: Float[Array, " B"]) -> Float[Array, "B G"]:
    """Computes ReMax (arXiv 2310.10505): A = r - reward of the prompt's greedy completion. G >= 1."""
    # If one of the two has no reward, the completion is not trained on, and its advantage means nothing.
    return rewards - greedy_rewards[:, None]


@declares(Trait.COMPARES_GROUP)
def opo(
    rewards: Float[Array, "B G"], loss_mask: Bool[Array, "B G C"], has_reward: Bool[Array, "B G"] | None = None
) -> Float[Array, "B G"]:
    """Computes advantages with the length-weighted optimal baseline (OPO, arXiv 2505.23585).

    A = r - sum_group l r / sum_group l, where l is the number of trained tokens of a completion.
    """
    lengths = jnp.sum(loss_mask, axis=-1).astype(rewards.dtype)
    total = partial(jnp.sum, axis=1, keepdims=True, where=has_reward)
    # The baseline is computed from centered rewards, because float32 would round the baseline of large rewards.
    centered = _centered(rewards, has_reward)
    baseline = total(lengths * centered) / jnp.maximum(total(lengths), 1)
    return _zero_without_signal(centered - baseline, rewards, has_reward)


@declares(Trait.COMPARES_GROUP)
def gdpo(
    channels: dict[str, Float[Array, "B G"]], weights: dict[str, float], *, epsilon: NotNegative = 1e-4
) -> Float[Array, "B G"]:
    """Normalizes each channel separately (GDPO, arXiv 2601.05242), so that no channel dominates the sum. G >= 2.

    A = sum_n w_n (r_n - mean_group r_n) / (std_group r_n + epsilon), whitened over B x G. A channel that is NaN adds 0,
    and does not count in its mean and deviation.
    """
    # Channels with weight 0 are left out, so that a completion with numbers only in these has no reward.
    weighted_channels = {name: x for name, x in channels.items() if weights[name]}
    has_channel = {name: ~jnp.isnan(x) for name, x in weighted_channels.items()}
    normalized = [
        weights[name] * grpo(jnp.nan_to_num(x), has_channel[name], epsilon=epsilon)
        for name, x in weighted_channels.items()
    ]
    total, has_reward = jnp.sum(jnp.stack(normalized), axis=0), jnp.any(jnp.stack(list(has_channel.values())), axis=0)
    centered = jnp.where(has_reward, total - _mean(total, has_reward, None), 0.0)
    return centered / (_deviation(total, has_reward, None) + epsilon)


@declares(Trait.COMPARES_GROUP)
def pass_at_k(
    task_rewards: Float[Array, "B G"],
    has_reward: Bool[Array, "B G"] | None = None,
    *,
    k: AtLeastOne,
    threshold: float = 0.5,
    epsilon: NotNegative = 1e-4,
) -> Float[Array, "B G"]:
    """Computes pass@k advantages in closed form (arXiv 2508.10751): a set of k needs one success. 1 <= k <= G.

    A success has a task reward of at least `threshold`; penalties do not count. With n failures among G completions:
    R = 1 - C(n, k) / C(G, k), s = sqrt(R (1 - R)), A = (1 - R) / (s + epsilon) for a success, and
    A = (1 - R - C(n - 1, k - 1) / C(G - 1, k - 1)) / (s + epsilon) for a failure. Here G counts the completions that
    have a reward; a group with fewer than k of them has A = 0.
    """
    g = _count_rewarded(task_rewards, has_reward)
    failed = task_rewards < threshold
    failed = failed if has_reward is None else failed & has_reward
    n = jnp.sum(failed, axis=1, keepdims=True).astype(task_rewards.dtype)
    all_fail = _probability_all_among(n, g, k)  # 1 - R
    deviation = jnp.sqrt(all_fail * (1 - all_fail)) + epsilon
    others_fail = _probability_all_among(n - 1, g - 1, k - 1)
    advantages = (all_fail - jnp.where(failed, others_fail, 0.0)) / deviation
    return advantages if has_reward is None else jnp.where(has_reward & (g >= k), advantages, 0.0)


@declares(Trait.VARIES_BY_TOKEN, Trait.NEEDS_CHAINS)
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
    """Computes generalized advantage estimates [B, G, C] (arXiv 1506.02438) over the trained tokens.

    A_t = d_t + gamma lam A_t', d_t = r_t + gamma V_t' - V_t, where t' is the next trained token. After the last
    trained token, A and V are 0. Tokens of an environment are skipped. normalize: whether to whiten over trained
    tokens.
    """

    def step_back(
        next_token: tuple[Array, Array], this_token: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        (next_value, next_advantage), (reward, value, trained) = next_token, this_token
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        # An untrained token passes on the value and the advantage of the next trained token.
        carry = (jnp.where(trained, value, next_value), jnp.where(trained, advantage, next_advantage))
        return carry, jnp.where(trained, advantage, 0.0)

    zeros = jnp.zeros(loss_mask.shape[:2], values.dtype)
    reward, value, trained = (jnp.moveaxis(x, 2, 0) for x in (token_rewards, values, loss_mask))
    # The scan runs backwards, because a token's advantage needs the advantages of the later tokens.
    _, advantages = jax.lax.scan(step_back, (zeros, zeros), (reward, value, trained), reverse=True)
    advantages = jnp.moveaxis(advantages, 0, 2)
    return _whiten(advantages, loss_mask, epsilon) if normalize else advantages


@declares(Trait.VARIES_BY_TOKEN, Trait.NEEDS_CHAINS)
def gae_turns(
    token_rewards: Float[Array, "B G C"],
    turn_numbers: Int[Array, "B G C"],
    values: Float[Array, "B G C"],
    loss_mask: Bool[Array, "B G C"],
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    token_gamma: Share = 1.0,
    token_lam: Share = 1.0,
    normalize: bool = True,
    epsilon: NotNegative = 1e-8,
) -> Float[Array, "B G C"]:
    """Computes generalized advantage estimates on two levels (VAGEN, arXiv 2510.16907): turns, and tokens of a turn.

    The last trained token e of a turn looks at that of the next turn, e', and discounts by the turn:

        A_e = r_e + gamma (q + V_e') - V_e + gamma lam A_e',    q = sum of r over the tokens of the next turn before e'.

    Any other token i looks at the next trained token of its turn, i':

        A_i = r_i + token_gamma V_i' - V_i + token_gamma token_lam A_i'.

    A and V are 0 after the last turn. The paper leaves out q, which is not 0 if tokens have a KL penalty. With q,
    A equals that of `gae` if all four factors are 1, and also if each turn has one token. normalize: whether to whiten
    over trained tokens.
    """

    def step_back(later: tuple[Array, ...], token: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        next_number, next_value, next_advantage, end_value, end_advantage, q = later
        reward, value, number, trained = token
        is_end = number != next_number
        at_end = reward + gamma * (q + end_value) - value + gamma * lam * end_advantage
        within = reward + token_gamma * next_value - value + token_gamma * token_lam * next_advantage
        advantage = jnp.where(is_end, at_end, within)
        end = (jnp.where(is_end, x, y) for x, y in ((value, end_value), (advantage, end_advantage), (0.0, q + reward)))
        # An untrained token passes on the values and advantages of later tokens.
        carry = tuple(jnp.where(trained, x, y) for x, y in zip((number, value, advantage, *end), later, strict=True))
        return carry, jnp.where(trained, advantage, 0.0)

    zeros = jnp.zeros(loss_mask.shape[:2], values.dtype)
    no_number = jnp.full(zeros.shape, -1, turn_numbers.dtype)
    tokens = tuple(jnp.moveaxis(x, 2, 0) for x in (token_rewards, values, turn_numbers, loss_mask))
    _, advantages = jax.lax.scan(step_back, (no_number, *[zeros] * 5), tokens, reverse=True)
    advantages = jnp.moveaxis(advantages, 0, 2)
    return _whiten(advantages, loss_mask, epsilon) if normalize else advantages


@declares(Trait.VARIES_BY_TOKEN)
def distillation(teacher_logprobs: Float[Array, "B G C"], old_logprobs: Float[Array, "B G C"]) -> Float[Array, "B G C"]:
    """Computes advantages for on-policy distillation: A_t = log teacher - log policy of token t.

    A_t is minus a one-sample estimate of the reverse KL. The REINFORCE gradient is the gradient of
    KL(policy || teacher) at each token, given the policy's earlier tokens (arXiv 2306.13649 with lambda = beta = 1).
    Rewards are not used.
    """
    return teacher_logprobs - old_logprobs


def _whiten(x: Float[Array, "B G C"], mask: Bool[Array, "B G C"], epsilon: NotNegative) -> Float[Array, "B G C"]:
    """Returns (x - mean) / sqrt(variance + epsilon) over the entries in the mask, and 0 elsewhere.

    The mean is subtracted twice, and epsilon is added before the root, so that rounding errors do not count as a
    deviation if all entries are equal.
    """
    count = jnp.maximum(jnp.sum(mask), 1)
    centered = jnp.where(mask, x - jnp.sum(jnp.where(mask, x, 0.0)) / count, 0.0)
    centered = jnp.where(mask, centered - jnp.sum(centered) / count, 0.0)
    return centered / jnp.sqrt(jnp.sum(centered**2) / jnp.maximum(count - 1, 1) + epsilon)


def _count_rewarded(rewards: Float[Array, "B G"], has_reward: Bool[Array, "B G"] | None) -> jax.Array:
    """Counts the completions of each group that have a reward: [B, 1]."""
    return jnp.sum(jnp.ones_like(rewards), axis=1, keepdims=True, where=has_reward)


def _mean(rewards: Float[Array, "B G"], has_reward: Bool[Array, "B G"] | None, axis: int | None) -> jax.Array:
    """Returns the mean over the completions that have a reward; 0 if none has."""
    return jnp.nan_to_num(jnp.mean(rewards, axis=axis, keepdims=True, where=has_reward))


def _deviation(rewards: Float[Array, "B G"], has_reward: Bool[Array, "B G"] | None, axis: int | None) -> jax.Array:
    """Returns the deviation, with ddof 1, of the completions that have a reward; 0 if only one has."""
    # The mean is subtracted first, because its rounding error would otherwise add to the deviation.
    centered = rewards - _mean(rewards, has_reward, axis)
    return jnp.nan_to_num(jnp.std(centered, axis=axis, ddof=1, keepdims=True, where=has_reward))


def _centered(
    rewards: Float[Array, "B G"], has_reward: Bool[Array, "B G"] | None, task_rewards: Float[Array, "B G"] | None = None
) -> Float[Array, "B G"]:
    """Returns rewards minus the mean of their group; 0 where the rewards or the task rewards of a group are equal."""
    centered = rewards - _mean(rewards, has_reward, 1)
    # The mean is subtracted twice, because rounding falsifies the first mean if rewards are larger than their
    # differences.
    centered = _zero_without_signal(centered - _mean(centered, has_reward, 1), rewards, has_reward)
    return centered if task_rewards is None else _zero_without_signal(centered, task_rewards, has_reward)


def _zero_without_signal(
    advantages: Float[Array, "B G"], rewards: Float[Array, "B G"], has_reward: Bool[Array, "B G"] | None
) -> Float[Array, "B G"]:
    """Sets A to exactly 0 in groups with equal rewards, and for completions without a reward.

    Without this, a division would amplify the rounding error of the mean.
    """
    # A group without any reward compares -inf > inf, which is False.
    largest = jnp.max(rewards, axis=1, keepdims=True, where=has_reward, initial=-jnp.inf)
    signal = largest > jnp.min(rewards, axis=1, keepdims=True, where=has_reward, initial=jnp.inf)
    return jnp.where(signal if has_reward is None else signal & has_reward, advantages, 0.0)


def _probability_all_among(n: Array, g: Array, k: int) -> jax.Array:
    """Returns C(n, k) / C(g, k): the probability that k random items of g are all among n given ones; 0 for n < k."""
    probability = jnp.ones_like(n)
    # Multiply factor by factor, because factorials of a large group would overflow float32.
    for i in range(k):
        probability = probability * jnp.maximum(n - i, 0) / jnp.maximum(g - i, 1)
    return probability
