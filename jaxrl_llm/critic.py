"""PPO's critic: the policy's decoder with one number in place of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import advantages, checks, losses, optim, sharding, update
from jaxrl_llm.models import hf
from jaxrl_llm.models.blocks import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.structs import Array, Batch, Config, PyTree, TrainState


@dataclass(frozen=True)
class Critic:
    """What the training loop does with a critic; its TrainState is held by the loop, as the policy's is."""

    score: Callable[[PyTree, Batch], Array]  # (params, batch) -> values [B, G, C]
    targets: Callable[[Array, Array, Array], Array]  # (token_rewards, values, loss_mask) -> returns [B, G, C]
    update_step: jax.stages.Wrapped  # (state, batch, rows) -> state, metrics
    shapes: TrainState  # of its state, with their shardings
    start: Callable[[], TrainState]  # its state at step 0


def make_critic(
    config: Config, folder: Path, policy: DecoderConfig, mesh: Mesh, make_update_step: Callable[..., Any]
) -> Critic:
    """The critic of a config, which starts as the model in `folder`.

    Raises: UserError, for a model that cannot be loaded, or cannot read what the policy writes.
    """
    c = config.critic
    whole = hf.load_model(folder, mesh, dtype=config.model.dtype, remat=config.model.remat)
    checks.check_other_model("critic.path", whole.cfg, policy)
    model = Decoder(replace(whole.cfg, tied_head=True), mesh)  # it has no use for a head

    def params(decoder: PyTree) -> PyTree:
        readout = {"kernel": jnp.zeros((model.cfg.width, 1)), "bias": jnp.zeros(1)}
        return {"decoder": {name: decoder[name] for name in model.shapes()}, "readout": readout}

    def start() -> TrainState:
        made = params(hf.load_params(folder, whole, mesh))
        return update.init_state(jax.device_put(made, sharding.shardings(made, mesh)), optimizer, mesh)[0]

    optimizer = optim.make_optimizer(checks.critic_updates(config), **c.optim)
    shapes, placed = update.abstract_state(jax.eval_shape(params, whole.shapes()), optimizer, mesh)
    update_step = make_update_step(value_objective(model, clip=c.clip), optimizer, state_shardings=placed)

    targets = jax.jit(partial(lambda_returns, gamma=c.gamma, lam=c.lam))
    score = update.by_parts(partial(update.completion_values, model), mesh, config.microbatch)
    return Critic(score, targets, update_step, shapes, start)


def lambda_returns(token_rewards: Array, values: Array, loss_mask: Array, *, gamma: float, lam: float) -> jax.Array:
    """What a critic is to learn [B, G, C]: V + its generalised advantage, 0 where nothing is trained."""
    ahead = advantages.gae(token_rewards, values, loss_mask, gamma=gamma, lam=lam, normalise=False)
    return ahead + jnp.where(loss_mask, values, 0.0)


def value_objective(model: Decoder, *, clip: float) -> update.Objective:
    """Squared error to the returns, max of plain and clipped (arXiv 1707.06347; OpenAI's baselines).

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2; clip = 0: the plain one.
    """

    def objective(params: PyTree, batch: Batch, coefs: losses.Metrics) -> tuple[Array, losses.Metrics]:
        values = update.completion_values(model, params, batch)
        error = jnp.square(values - batch.returns)
        metrics = {"value": values}
        if clip:
            near = batch.values + jnp.clip(values - batch.values, -clip, clip)
            clipped = jnp.square(near - batch.returns)
            metrics["clip/fraction"] = (clipped > error).astype(jnp.float32)
            error = jnp.maximum(error, clipped)
        return 0.5 * error, metrics

    return objective


def explained_variance(values: Array, returns: Array, loss_mask: Array) -> jax.Array:
    """1 - Var(returns - values) / Var(returns) over the trained tokens: 1 is perfect, 0 no better than their mean."""

    def variance(x: Array) -> jax.Array:
        count = jnp.maximum(jnp.sum(loss_mask), 1)
        mean = jnp.sum(jnp.where(loss_mask, x, 0.0)) / count
        return jnp.sum(jnp.where(loss_mask, jnp.square(x - mean), 0.0)) / count

    spread = variance(returns)
    return jnp.where(spread > 0, 1 - variance(returns - values) / jnp.maximum(spread, 1e-30), 0.0)
