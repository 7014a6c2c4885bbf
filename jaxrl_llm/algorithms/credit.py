"""Credit assignment: one compiled program from rewards and scores to advantages, returns and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Bool, Float, Int

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.advantages import Estimator
from jaxrl_llm.algorithms.importance import high_entropy_mask
from jaxrl_llm.machine import sharding
from jaxrl_llm.structs import Array, Batch, Rewards

Columns: TypeAlias = dict[str, Array]
ROUNDING = 1e-5  # tolerance for the rounding of a log-probability in float32
CreditFn: TypeAlias = Callable[[Batch, Columns, Rewards, Columns], tuple[Batch, Columns]]


@dataclass(frozen=True)
class Credit:
    """The settings by which the rewards of a run become advantages."""

    estimator: Estimator
    weights: dict[str, float]  # {channel: weight of the reward function}
    model_weight: float | None  # weight of the reward model; None if the run has no reward model
    overlong_tokens: int  # number of tokens before the limit over which the penalty grows; 0 = no penalty
    kl: Callable[[Array, Array], Array] | None  # estimator of a KL penalty in the reward; None = no such penalty
    # (token rewards, values, loss mask) -> targets of the critic; None if the run has no critic.
    returns: Callable[[Array, Array, Array], Array] | None
    top_entropy: float  # share of the tokens, those of highest entropy, in the policy loss; 1 = all
    updates: int  # number of optimizer steps on a rollout
    loss_columns: tuple[str, ...] = ()  # names of the scores that the loss reads
    turn_channel: str = ""  # channel that adds up the rewards of turns; "" if the run has no such channel


def make_credit(credit: Credit, mesh: Mesh) -> CreditFn:
    """Returns the function `assign_credit(batch, scores, rewards, coefs) -> (batch, metrics)` of a run.

    scores: {column: [B, G, C]} of all scorers. coefs: {"kl/coef": scalar}, for a KL penalty in the reward. The returned
    batch also has rewards, advantages, the policy mask, old and reference log-probabilities, the critic's values and
    returns, and the columns of the loss. If a rollout has a single update, the old log-probabilities are left out,
    because the update then uses its own. The metrics are scalars.
    """
    estimator, weights = credit.estimator, credit.weights
    if credit.model_weight is not None:
        weights = weights | {"reward_model": credit.model_weight}
    batch_sharding = NamedSharding(mesh, sharding.BATCH)

    # The output shardings are explicit, because the compiler would otherwise write equal shardings in another form, and
    # the update would be another program than the one that is compiled ahead.
    @partial(jax.jit, out_shardings=(batch_sharding, None))
    def assign(batch: Batch, scores: Columns, rewards: Rewards, coefs: Columns) -> tuple[Columns, Columns]:
        total, channels = rewards.total, rewards.channels
        if credit.model_weight is not None:
            is_last_token = last_tokens(batch.completion_mask)
            score = jnp.sum(jnp.where(is_last_token, scores["reward_model_scores"], 0.0), axis=-1)
            channels = channels | {"reward_model": score}
            if credit.model_weight:
                # The reward model judges every completion, so none is without a reward, even if all functions abstain.
                total = jnp.nan_to_num(total) + credit.model_weight * score
        greedy_rewards = jnp.zeros_like(total) if rewards.greedy is None else rewards.greedy
        # A group has no baseline if its greedy completion has no reward.
        has_reward = ~jnp.isnan(total) & ~jnp.isnan(greedy_rewards) | (not estimator.needs_reward)
        mask = batch.loss_mask & has_reward[..., None]
        shaped_rewards = total
        if overlong_tokens := credit.overlong_tokens:
            limit = mask.shape[-1]
            overlong = overlong_penalty(jnp.sum(batch.completion_mask, axis=-1), limit, overlong_tokens)
            shaped_rewards, channels = total + overlong, channels | {"overlong": overlong}
        penalty = jnp.zeros(mask.shape)
        if credit.kl:
            token_penalty = coefs["kl/coef"] * credit.kl(scores["old_logprobs"], scores["ref_logprobs"])
            penalty = jnp.where(mask, token_penalty, 0.0)
        inputs: dict[str, Any] = scores | {
            # Where no function returned a number, the reward is NaN. 0 replaces it in sums, and has_reward excludes it.
            "rewards": jnp.where(has_reward, shaped_rewards - jnp.sum(penalty, axis=-1), 0.0),
            "task_rewards": jnp.where(has_reward, total, 0.0),
            "has_reward": has_reward,
            "channels": {name: channels[name] for name in weights},
            "weights": weights,
            "token_rewards": put_on_last_token(shaped_rewards, mask) - penalty,
            "loss_mask": mask,
        }
        inputs |= turn_inputs(credit, rewards, shaped_rewards, penalty, mask) if estimator.needs_turns else {}
        if rewards.greedy is not None:
            if overlong_tokens:
                # The baseline must have the same penalty as the reward.
                greedy_rewards += overlong_penalty(rewards.greedy_lengths, mask.shape[-1], overlong_tokens)
            inputs["greedy_rewards"] = jnp.nan_to_num(greedy_rewards)[:, 0]
        advantage = estimator.compute(**{name: inputs[name] for name in estimator.inputs})
        by_token = advantage if advantage.ndim == 3 else advantage[..., None]
        columns = {"rewards": total, "advantages": jnp.where(mask, by_token, 0.0), "loss_mask": mask}
        metrics = reward_metrics(total, channels)
        metrics |= penalty_metrics(penalty, mask, coefs["kl/coef"]) if credit.kl else {}
        metrics |= {"reward/no_verdict": 1 - jnp.mean(has_reward)}
        metrics |= turn_metrics(inputs) if estimator.needs_turns else {}
        if credit.returns:
            returns = credit.returns(inputs["token_rewards"], scores["values"], mask)
            columns |= {"returns": returns}
            metrics |= {"critic/explained_variance": explained_variance(scores["values"], returns, mask)}
        if credit.top_entropy < 1:
            columns["policy_mask"] = high_entropy_mask(scores["entropy"], mask, share=credit.top_entropy)
        return columns, metrics

    def assign_credit(batch: Batch, scores: Columns, rewards: Rewards, coefs: Columns) -> tuple[Batch, Columns]:
        # Packed rows are left out, because credit does not read them and each of their shapes would compile a program.
        assigned, metrics = assign(replace(batch, packed_index=None, tree=None), scores, rewards, coefs)
        # For a single update the scored log-probabilities are left out, because they differ from the update's own by
        # rounding, and the ratio must be exactly 1.
        used_scores = {"values", "ref_logprobs"} | ({"old_logprobs"} if credit.updates > 1 else set())
        used_columns = {name: scores[name] for name in used_scores & scores.keys()}
        columns = {name: scores[name] for name in credit.loss_columns}
        return replace(batch, **assigned, **used_columns, columns=columns), metrics

    return assign_credit


def turn_inputs(
    credit: Credit,
    rewards: Rewards,
    shaped_rewards: Float[Array, "B G"],
    penalty: Float[Array, "B G C"],
    mask: Bool[Array, "B G C"],
) -> Columns:
    """Returns the inputs of an estimator that assigns credit by the turn; all others do not depend on turns.

    shaped_rewards: rewards with the overlong penalty. The rewards of turns are on the last tokens of the turns, and all
    other rewards on the last token of the completion, so that the sum of a completion stays the same.
    """
    # Where the function that adds up the rewards of turns returned no number, the sum of a completion lacks them.
    has_sum = ~jnp.isnan(rewards.channels[credit.turn_channel])[..., None]
    earned = credit.weights[credit.turn_channel] * jnp.where(has_sum, jnp.nan_to_num(rewards.turn_rewards), 0.0)
    token_rewards = put_on_last_token(shaped_rewards - jnp.sum(earned, axis=-1), mask) + earned - penalty
    return {"turn_numbers": rewards.turn_numbers, "turn_rewards": earned, "token_rewards": token_rewards}


def turn_metrics(inputs: Columns) -> Columns:
    """Returns reward/turns: the mean sum of the rewards of a completion's turns, over completions with a reward."""
    return {"reward/turns": jnp.mean(jnp.sum(inputs["turn_rewards"], axis=-1), where=inputs["has_reward"])}


def put_on_last_token(rewards: Float[Array, "B G"], mask: Bool[Array, "B G C"]) -> Float[Array, "B G C"]:
    """Puts rewards [B, G] on the last trained token of each completion: [B, G, C]."""
    return jnp.where(last_tokens(mask), rewards[..., None], 0.0)


def last_tokens(mask: Bool[Array, "B G C"]) -> Bool[Array, "B G C"]:
    """Returns a mask of the last token of each completion that `mask` includes."""
    # The last token is found by counting, because observations may lie between the trained tokens.
    return mask & (jnp.cumsum(mask, axis=-1) == jnp.sum(mask, axis=-1, keepdims=True))


def overlong_penalty(lengths: Int[Array, "B G"], limit: int, tokens: int) -> Float[Array, "B G"]:
    """Computes DAPO's soft overlong penalty (arXiv 2503.14476) [B, G] from lengths [B, G] in tokens.

    The penalty falls linearly from 0 at `limit - tokens` to -1 at `limit`.
    """
    return -jnp.clip((lengths - (limit - tokens)) / tokens, 0.0, 1.0)


def lambda_returns(
    token_rewards: Float[Array, "B G C"],
    values: Float[Array, "B G C"],
    loss_mask: Bool[Array, "B G C"],
    *,
    gamma: float,
    lam: float,
) -> Float[Array, "B G C"]:
    """Computes the critic's targets [B, G, C]: V + generalized advantage; 0 on untrained tokens."""
    # The advantages are not whitened, because targets of the critic have the units of the rewards.
    token_advantages = advantages.gae(token_rewards, values, loss_mask, gamma=gamma, lam=lam, normalize=False)
    return token_advantages + jnp.where(loss_mask, values, 0.0)


def explained_variance(
    values: Float[Array, "B G C"], returns: Float[Array, "B G C"], loss_mask: Bool[Array, "B G C"]
) -> Float[Array, ""]:
    """Computes 1 - Var(returns - values) / Var(returns) over trained tokens: 1 is perfect, 0 as good as the mean.

    0 for equal returns, and NaN without a trained token.
    """
    variance = partial(jnp.var, where=loss_mask)
    return_variance = variance(returns)
    # The floor keeps the unused branch of `where` finite, because both branches are computed.
    return jnp.where(return_variance == 0, 0.0, 1 - variance(returns - values) / jnp.maximum(return_variance, 1e-30))


def reward_metrics(total: Float[Array, "B G"], channels: Columns) -> Columns:
    """Returns metrics of the rewards: means over the completions that have one; NaN if none has.

    total: rewards [B, G] without penalties, because a penalty would hide that the task has no signal. channels: rewards
    [B, G] of each function. reward/error is the standard error of reward/mean: the deviation of group means divided by
    the root of the number of groups, because completions of a prompt are correlated. reward/without_signal is the mean
    reward of groups whose rewards are all equal.
    """
    metrics = {"reward/mean": jnp.nanmean(total), "reward/std": jnp.nanstd(total)}
    metrics |= {"reward/min": jnp.nanmin(total), "reward/max": jnp.nanmax(total)}
    group_means = jnp.nanmean(total, axis=1)
    metrics |= {"reward/error": jnp.nanstd(group_means, ddof=1) / jnp.sqrt(jnp.sum(~jnp.isnan(group_means)))}
    metrics |= {f"reward/{name}": jnp.nanmean(x) for name, x in channels.items()}
    if total.shape[1] > 1:
        # A group without any reward has no signal, because NaN > NaN is False.
        has_signal = jnp.nanmax(total, axis=1) > jnp.nanmin(total, axis=1)
        metrics["groups/no_signal"] = 1 - jnp.mean(has_signal)
        metrics["reward/without_signal"] = jnp.nanmean(jnp.where(has_signal, jnp.nan, group_means))
    return metrics


def penalty_metrics(penalty: Float[Array, "B G C"], mask: Bool[Array, "B G C"], coef: Float[Array, ""]) -> Columns:
    """Returns metrics of the KL penalty in the reward, over completions with a trained token; NaN if none has one.

    reward/kl is the mean reward by the penalty. reward/kl_pays is the share of completions with a negative penalty: the
    k1 estimate has a sign, so it may reward the policy for leaving the reference. Rounding does not count.
    """
    sequence_penalty, tokens = jnp.sum(penalty, axis=-1), jnp.sum(mask, axis=-1)
    mean = partial(jnp.mean, where=tokens > 0)
    return {"reward/kl": -mean(sequence_penalty), "reward/kl_pays": mean(sequence_penalty < -ROUNDING * coef * tokens)}
