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
from jaxrl_llm.models.decoder import Decoder, decoder_of
from jaxrl_llm.models.settings import ModelSettings
from jaxrl_llm.structs import Array, Batch, PyTree, Sizes


def make_critic(
    settings: CriticSettings,
    policy_settings: ModelSettings,
    folder: Path,
    mesh: Mesh,
    aggregate: Callable[[Array], Array],
    *,
    sizes: Sizes,
    shared: LearnerParameters | None = None,
    backoff: optim.LearningRateBackoff | None = None,
) -> tuple[Learner, Scorer]:
    """Returns the critic's learner and scorer. The critic starts as the model in `folder`.

    If the folder holds a reward model, the readout starts as that model's readout, otherwise with zeros.
    policy_settings: config.model; the critic has the policy's dtype and remat. aggregate: maps a loss mask to the
    weights of tokens in the loss. shared: the policy's adapters and their base, on which the critic learns adapters of
    its own; None if all parameters learn. backoff: lowers the learning rate after a rollback, None if the run never
    rolls back.
    Raises: UserError, if the model cannot be loaded.
    """
    policy_like = hf.load_model(
        folder,
        family=policy_settings.family,
        dtype=policy_settings.dtype,
        remat=policy_settings.remat,
        row_parts=policy_settings.row_parts,
    )
    # The parameter tree of a tied head has no head, which a critic does not need.
    model = decoder_of(replace(policy_like.cfg, tied_head=True), mesh)

    def headless(decoder: PyTree) -> PyTree:
        """Returns the parameters of a decoder without its vocabulary head."""
        return {name: decoder[name] for name in decoder if name in model.shapes}

    def with_readout(decoder: PyTree) -> PyTree:
        """Returns the parameters of a critic with this decoder, and with a readout of zeros."""
        readout = {"kernel": jnp.zeros((model.cfg.width, 1)), "bias": jnp.zeros(1)}
        return {"decoder": headless(decoder), "readout": readout}

    def combine(base: PyTree, learned: PyTree) -> PyTree:
        return learned | {"decoder": parameters.base.combine(headless(base), learned["decoder"])}

    def params() -> PyTree:
        first_values = with_readout(parameters.params())
        if hf.has_readout(folder):
            first_values["readout"] = hf.load_readout(folder, model)
        return jax.device_put(first_values, sharding.shardings(first_values, mesh))

    # The critic has its own readout, so it does not load the tensors of a vocabulary head or of a reward model's head.
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

    score = forward.score_in_microbatches(values, mesh, sizes.microbatch)
    return replace(learner, prefix="critic/"), Scorer(
        ("values",), lambda states: learner.all_parameters(states["critic"]), score
    )


def value_objective(model: Decoder, *, clip: float) -> update.Objective:
    """Returns the critic's objective: the clipped squared error of values V to returns R, [B, G, C].

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, or (V - R)^2 / 2 if clip is 0 (arXiv 1707.06347;
    OpenAI's baselines).
    """

    def objective(params: PyTree, batch: Batch, coefs: losses.Metrics) -> tuple[Array, losses.Metrics]:
        """Returns the critic's loss per token [B, G, C], the squared error of its values, and metrics."""
        values = forward.completion_values(model, params, batch)
        squared_error = jnp.square(values - batch.returns)
        metrics = {"value": values}
        if clip:
            clipped_values = batch.values + jnp.clip(values - batch.values, -clip, clip)
            clipped_error = jnp.square(clipped_values - batch.returns)
            metrics["clip/fraction"] = (clipped_error > squared_error).astype(jnp.float32)
            squared_error = jnp.maximum(squared_error, clipped_error)
        return 0.5 * squared_error, metrics

    return objective
