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
from jaxrl_llm.algorithms.importance import high_entropy
from jaxrl_llm.machine import sharding
from jaxrl_llm.structs import Array, Batch, Rewards

Columns: TypeAlias = dict[str, Array]
ROUNDING = 1e-5  # of a log-probability in float32, and some more
CreditFn: TypeAlias = Callable[[Batch, Columns, Rewards, Columns], tuple[Batch, Columns]]


@dataclass(frozen=True)
class Credit:
    """How the rewards of a run become advantages."""

    estimator: Estimator
    weights: dict[str, float]  # of the reward functions, by channel
    model_weight: float | None  # of the reward model; None: there is none
    overlong_tokens: int  # before the limit, over which the penalty grows; 0: no penalty
    kl: Callable[[Array, Array], Array] | None  # estimates the KL penalty in the reward; None: there is none
    returns: Callable[[Array, Array, Array], Array] | None  # (token rewards, values, loss mask) -> a critic's targets
    top_entropy: float  # share of tokens in the policy loss; 1: all
    updates: int  # optimizer steps on a rollout
    loss_columns: tuple[str, ...] = ()  # scores that the loss asks for


def make_credit(credit: Credit, mesh: Mesh) -> CreditFn:
    """Returns `assign_credit(batch, scores, rewards, coefs) -> (batch, metrics)`. The metrics are scalars.

    scores: {column: [B, G, C]} of all scorers. coefs: {"kl/coef": scalar}, for a KL penalty in the reward.
    The new batch also has rewards, advantages, the policy mask, old and reference log-probabilities, the critic's
    values and returns, and the columns of the loss. A single update on a rollout uses its own log-probabilities as the
    old ones.
    """
    estimator, weights = credit.estimator, credit.weights
    if credit.model_weight is not None:
        weights = weights | {"reward_model": credit.model_weight}
    place = NamedSharding(mesh, sharding.BATCH)

    @jax.jit
    def assign(batch: Batch, scores: Columns, rewards: Rewards, coefs: Columns) -> tuple[Columns, Columns]:
        total, channels = rewards.total, rewards.channels
        if credit.model_weight is not None:
            last = last_tokens(batch.completion_mask)
            score = jnp.sum(jnp.where(last, scores["reward_model_scores"], 0.0), axis=-1)
            channels = channels | {"reward_model": score}
            if credit.model_weight:
                # A reward model judges every completion: one on which all functions abstain has a reward through it.
                total = jnp.nan_to_num(total) + credit.model_weight * score
        greedy = jnp.zeros_like(total) if rewards.greedy is None else rewards.greedy
        # A group has no baseline if its greedy completion has no reward.
        has_reward = ~jnp.isnan(total) & ~jnp.isnan(greedy) | (not estimator.needs_reward)
        mask = batch.loss_mask & has_reward[..., None]
        shaped = total
        if tokens := credit.overlong_tokens:
            limit = mask.shape[-1]
            overlong = overlong_penalty(jnp.sum(batch.completion_mask, axis=-1), limit, tokens)
            shaped, channels = total + overlong, channels | {"overlong": overlong}
        penalty = jnp.zeros(mask.shape)
        if credit.kl:
            term = coefs["kl/coef"] * credit.kl(scores["old_logprobs"], scores["ref_logprobs"])
            penalty = jnp.where(mask, term, 0.0)
        inputs: dict[str, Any] = scores | {
            # NaN where no function has answered: 0 keeps it out of sums, and has_reward out of counts.
            "rewards": jnp.where(has_reward, shaped - jnp.sum(penalty, axis=-1), 0.0),
            "task_rewards": jnp.where(has_reward, total, 0.0),
            "has_reward": has_reward,
            "channels": {name: channels[name] for name in weights},
            "weights": weights,
            "token_rewards": at_the_end(shaped, mask) - penalty,
            "loss_mask": mask,
        }
        if rewards.greedy is not None:
            if tokens:
                # The baseline must have the same penalty as the reward.
                greedy = greedy + overlong_penalty(rewards.greedy_lengths, mask.shape[-1], tokens)
            inputs["greedy_rewards"] = jnp.nan_to_num(greedy)[:, 0]
        advantage = estimator.compute(**{name: inputs[name] for name in estimator.inputs})
        by_token = advantage if advantage.ndim == 3 else advantage[..., None]
        columns = {"rewards": total, "advantages": jnp.where(mask, by_token, 0.0), "loss_mask": mask}
        metrics = reward_metrics(total, channels)
        metrics |= penalty_metrics(penalty, mask, coefs["kl/coef"]) if credit.kl else {}
        metrics |= {"reward/no_verdict": 1 - jnp.mean(has_reward)}
        if credit.returns:
            returns = credit.returns(inputs["token_rewards"], scores["values"], mask)
            columns |= {"returns": returns}
            metrics |= {"critic/explained_variance": explained_variance(scores["values"], returns, mask)}
        if credit.top_entropy < 1:
            columns["policy_mask"] = high_entropy(scores["entropy"], mask, share=credit.top_entropy)
        return jax.lax.with_sharding_constraint(columns, place), metrics

    def assign_credit(batch: Batch, scores: Columns, rewards: Rewards, coefs: Columns) -> tuple[Batch, Columns]:
        # Packed rows are left out: credit does not read them, and each of their shapes would compile another program.
        assigned, metrics = assign(replace(batch, packed_index=None), scores, rewards, coefs)
        # A single update has a ratio of exactly 1 without scored log-probabilities, which differ from the update's
        # by rounding.
        used_scores = {"values", "ref_logprobs"} | ({"old_logprobs"} if credit.updates > 1 else set())
        used = {name: scores[name] for name in used_scores & scores.keys()}
        columns = {name: scores[name] for name in credit.loss_columns}
        return replace(batch, **assigned, **used, columns=columns), metrics

    return assign_credit


def at_the_end(rewards: Float[Array, "B G"], mask: Bool[Array, "B G C"]) -> Float[Array, "B G C"]:
    """Puts rewards [B, G] on the last trained token of each completion: [B, G, C]."""
    return jnp.where(last_tokens(mask), rewards[..., None], 0.0)


def last_tokens(mask: Bool[Array, "B G C"]) -> Bool[Array, "B G C"]:
    """Returns the mask of the last token of each completion that `mask` has."""
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
    ahead = advantages.gae(token_rewards, values, loss_mask, gamma=gamma, lam=lam, normalize=False)
    return ahead + jnp.where(loss_mask, values, 0.0)


def explained_variance(
    values: Float[Array, "B G C"], returns: Float[Array, "B G C"], loss_mask: Bool[Array, "B G C"]
) -> Float[Array, ""]:
    """Computes 1 - Var(returns - values) / Var(returns) over trained tokens: 1 is perfect, 0 as good as the mean.

    0 for equal returns, and NaN without a trained token.
    """
    variance = partial(jnp.var, where=loss_mask)
    spread = variance(returns)
    # Both branches of `where` are computed: the floor keeps the unused one finite.
    return jnp.where(spread == 0, 0.0, 1 - variance(returns - values) / jnp.maximum(spread, 1e-30))


def reward_metrics(total: Float[Array, "B G"], channels: Columns) -> Columns:
    """Returns means over the completions that have a reward, and over the numbers of each channel; NaN where none is.

    reward/error is the standard error of reward/mean: the deviation of the means of groups over the root of their
    number (completions of a prompt are alike). reward/without_signal is the mean of groups whose rewards are all equal.
    total [B, G]: without penalties, because a penalty must not hide that the task has no signal.
    """
    metrics = {"reward/mean": jnp.nanmean(total), "reward/std": jnp.nanstd(total)}
    metrics |= {"reward/min": jnp.nanmin(total), "reward/max": jnp.nanmax(total)}
    groups = jnp.nanmean(total, axis=1)
    metrics |= {"reward/error": jnp.nanstd(groups, ddof=1) / jnp.sqrt(jnp.sum(~jnp.isnan(groups)))}
    metrics |= {f"reward/{name}": jnp.nanmean(x) for name, x in channels.items()}
    if total.shape[1] > 1:
        # NaN is not above NaN: a group without any reward has no signal.
        signal = jnp.nanmax(total, axis=1) > jnp.nanmin(total, axis=1)
        metrics["groups/no_signal"] = 1 - jnp.mean(signal)
        metrics["reward/without_signal"] = jnp.nanmean(jnp.where(signal, jnp.nan, groups))
    return metrics


def penalty_metrics(penalty: Float[Array, "B G C"], mask: Bool[Array, "B G C"], coef: Float[Array, ""]) -> Columns:
    """Returns metrics of the KL penalty in the reward, over the completions with a trained token; NaN without any.

    k1 has a sign: a negative penalty pays the policy for leaving the reference. While the two are the same, its sign is
    that of rounding, which pays nothing.
    """
    sequence_penalty, tokens = jnp.sum(penalty, axis=-1), jnp.sum(mask, axis=-1)
    mean = partial(jnp.mean, where=tokens > 0)
    return {"reward/kl": -mean(sequence_penalty), "reward/kl_pays": mean(sequence_penalty < -ROUNDING * coef * tokens)}
