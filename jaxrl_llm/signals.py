"""From what a rollout earned to advantages: the signals that an estimator may ask for."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages
from jaxrl_llm.config import arguments, needs, resolve
from jaxrl_llm.structs import Array, Config, Rollouts


def make_estimate(config: Config) -> tuple[tuple[str, ...], Callable[[dict[str, Array]], jax.Array]]:
    """Names of the signals that the estimator asks for, and `estimate(signals) -> advantages [B, G, C]`, jitted."""
    estimator = resolve(config.advantage.name, advantages)
    asked = needs(estimator)
    fixed = arguments(config.advantage)
    if "weights" in asked:
        fixed |= {"weights": dict(zip(config.reward.functions, config.reward.weights, strict=True))}

    @jax.jit
    def estimate(signals: dict[str, Array], loss_mask: Array) -> jax.Array:
        advantage = estimator(**signals, **fixed)
        by_token = advantage if advantage.ndim == 3 else advantage[..., None]
        return jnp.where(loss_mask, jnp.broadcast_to(by_token, loss_mask.shape), 0.0)

    def chosen(signals: dict[str, Array]) -> jax.Array:
        return estimate({name: signals[name] for name in asked if name != "weights"}, signals["loss_mask"])

    return asked, chosen


def of_rewards(
    channels: dict[str, np.ndarray], penalty: np.ndarray, loss_mask: np.ndarray, functions: tuple[str, ...]
) -> dict[str, Array]:
    """Signals of channels {name: [B, G]}, "total" among them, and of a KL penalty [B, G, C]."""
    return {
        "rewards": channels["total"] - penalty.sum(axis=-1),
        "channels": {name: np.nan_to_num(channels[name]) for name in functions},
        "token_rewards": at_the_end(channels["total"], loss_mask) - penalty,
        "loss_mask": loss_mask,
    }


def at_the_end(rewards: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    """Rewards [B, G] on the last trained token of each completion: [B, G, C]."""
    last = loss_mask & (np.cumsum(loss_mask, axis=-1) == loss_mask.sum(axis=-1, keepdims=True))
    return np.where(last, rewards[..., None], 0.0).astype(np.float32)


def with_overlong(channels: dict[str, np.ndarray], rollouts: Rollouts, *, tokens: int) -> dict[str, np.ndarray]:
    """Channels [B, G] with DAPO's soft penalty (arXiv 2503.14476) "overlong", and in their total.

    It falls from 0, `tokens` before the limit of a completion, to -1 at it; tokens = 0: there is none.
    """
    if not tokens:
        return channels
    limit, lengths = rollouts.completion_mask.shape[-1], rollouts.completion_mask.sum(axis=-1)
    penalty = -np.clip((lengths - (limit - tokens)) / tokens, 0, 1).astype(np.float32)
    return channels | {"overlong": penalty, "total": channels["total"] + penalty}
