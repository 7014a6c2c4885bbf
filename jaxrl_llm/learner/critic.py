"""PPO's critic: the policy's decoder with a scalar readout instead of the vocabulary head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms import losses
from jaxrl_llm.learner import forward, optim, update
from jaxrl_llm.learner.scorers import Scorer
from jaxrl_llm.learner.settings import CriticSettings
from jaxrl_llm.learner.update import Learner, LearnerParameters
from jaxrl_llm.machine import sharding
from jaxrl_llm.models import hf
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.settings import ModelSettings
from jaxrl_llm.structs import Array, Batch, PyTree, Sizes


def make_critic(
    settings: CriticSettings,
    start: ModelSettings,
    folder: Path,
    mesh: Mesh,
    aggregate: Callable[[Array], Array],
    *,
    sizes: Sizes,
    shared: LearnerParameters | None = None,
    backoff: optim.LearningRateBackoff | None = None,
) -> tuple[Learner, Scorer]:
    """Returns the critic's learner and scorer. The critic starts as the model in `folder`.

    Its readout starts as that of a reward model, if the folder holds one, and otherwise with zeros.
    start: dtype and remat of the policy, which are the critic's too. aggregate: maps a loss mask to weights, as for the
    policy. shared: the policy's adapters and their base; the critic learns adapters of its own on this base. backoff:
    what a rollback makes of its learning rate.
    Raises: UserError, if the model cannot be loaded.
    """
    policy_like = hf.load_model(
        folder, family=start.family, dtype=start.dtype, remat=start.remat, row_parts=start.row_parts
    )
    # A critic needs no head; with it, the tree has none.
    model = Decoder(replace(policy_like.cfg, tied_head=True), mesh)

    def headless(decoder: PyTree) -> PyTree:
        return {name: decoder[name] for name in decoder if name in model.shapes}

    def with_readout(decoder: PyTree) -> PyTree:
        readout = {"kernel": jnp.zeros((model.cfg.width, 1)), "bias": jnp.zeros(1)}
        return {"decoder": headless(decoder), "readout": readout}

    def combine(base: PyTree, learned: PyTree) -> PyTree:
        return learned | {"decoder": parameters.base.combine(headless(base), learned["decoder"])}

    def params() -> PyTree:
        first_values = with_readout(parameters.params())
        if hf.has_readout(folder):
            first_values["readout"] = hf.load_readout(folder, model)
        return jax.device_put(first_values, sharding.shardings(first_values, mesh))

    # The tensors of both heads stay in the file: the critic has a readout of its own.
    load = partial(hf.load_params, folder, model, mesh, unused=hf.HEADS)
    parameters = shared or LearnerParameters(model.shapes, load, update.ALL_LEARN)
    learner = update.make_learner(
        value_objective(model, clip=settings.clip),
        optim.make_optimizer(sizes.critic_updates, backoff=backoff, **settings.optim),
        jax.eval_shape(with_readout, parameters.shapes),
        params,
        mesh,
        microbatch=sizes.microbatch,
        aggregate=aggregate,
        base=update.FrozenBase(parameters.base.params, combine) if shared else update.ALL_LEARN,
    )

    def values(params: PyTree, batch: Batch) -> PyTree:
        return {"values": forward.completion_values(model, params, batch)}

    score = forward.in_microbatches(values, mesh, sizes.microbatch)
    return replace(learner, prefix="critic/"), Scorer(
        ("values",), lambda states: learner.all_parameters(states["critic"]), score
    )


def value_objective(model: Decoder, *, clip: float) -> update.Objective:
    """Returns an objective: the clipped squared error to the returns (arXiv 1707.06347; OpenAI's baselines).

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2; clip = 0: (V - R)^2 / 2.
    """

    def objective(params: PyTree, batch: Batch, coefs: losses.Metrics) -> tuple[Array, losses.Metrics]:
        values = forward.completion_values(model, params, batch)
        error = jnp.square(values - batch.returns)
        metrics = {"value": values}
        if clip:
            near = batch.values + jnp.clip(values - batch.values, -clip, clip)
            clipped = jnp.square(near - batch.returns)
            metrics["clip/fraction"] = (clipped > error).astype(jnp.float32)
            error = jnp.maximum(error, clipped)
        return 0.5 * error, metrics

    return objective
