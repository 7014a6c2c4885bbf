"""PPO's critic: its loss, its targets, and what must not change them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms import credit, losses
from jaxrl_llm.config.load import load
from jaxrl_llm.learner import critic, forward, optim, update
from jaxrl_llm.learner.learning import TrainedModels
from jaxrl_llm.machine import sharding, transfers
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.recipe import fit
from jaxrl_llm.structs import Batch, PyTree

ARITHMETIC = Path(__file__).parents[2] / "jaxrl_llm" / "assets" / "arithmetic"


def loss_of_values(values, old, returns, clip):
    """Losses, metrics, and the gradient of the summed losses, with the model left out."""
    mask = np.ones(values.shape, bool)
    batch = Batch(None, None, None, mask, mask, values=old, returns=returns)

    def total(values, batch):
        loss, metrics = critic.value_objective(None, clip=clip)(values, batch, {})
        return loss.sum(), (loss, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "completion_values", lambda model, params, batch: params)
        gradient, (loss, metrics) = jax.jit(jax.grad(total, has_aux=True))(values, batch)
    return loss, metrics, gradient


def test_the_clipped_value_loss_equals_its_restatement_in_value_and_gradient():
    with jax.enable_x64(True):
        values, old, returns = np.random.default_rng(0).normal(size=(3, 2, 3, 4))
        for clip in (0.0, 0.2):

            def restated(v, o, r, clip=clip):
                plain = (v - r) ** 2
                return np.maximum(plain, (np.clip(v, o - clip, o + clip) - r) ** 2) / 2 if clip else plain / 2

            loss, metrics, gradient = loss_of_values(values, old, returns, clip)
            up, down = restated(values + 1e-6, old, returns), restated(values - 1e-6, old, returns)
            np.testing.assert_allclose(loss, restated(values, old, returns), atol=1e-9)
            np.testing.assert_allclose(gradient, (up - down) / 2e-6, atol=1e-6)
            assert ("clip/fraction" in metrics) == bool(clip)


def test_a_rollback_lowers_the_rate_of_the_critic_too():
    c = load("ppo")
    c.update_from_flattened_dict(
        {"critic.optim.warmup_steps": 0, "critic.optim.warmup_ratio": 0.0, "critic.optim.learning_rate": 0.3}
    )
    recipe, mesh, backoff = recipes.read(c), tiny.mesh_of((1, 1, 1)), optim.LearningRateBackoff(0.5, 2)
    settings = recipe.critic, recipe.model, ARITHMETIC, mesh, abs
    learner, _ = critic.make_critic(*settings, sizes=recipe.sizes, backoff=backoff)  # pyright: ignore[reportArgumentType]
    run = SimpleNamespace(reference=None, learners={"critic": learner})
    states = {"critic": learner.init()}
    rates = [
        learner.coefficients(s["critic"])["learning_rate"]
        for s in (states, TrainedModels.complete_restored(run, states, 1))
    ]  # pyright: ignore[reportArgumentType]
    assert rates == pytest.approx([0.3, 0.3 * 0.5 / 3])  # with a warm-up of two updates


def test_explained_variance_by_hand_and_without_what_an_environment_wrote():
    returns, mask = np.float32([[[1.0, 0.0, 1.0, 9.0]]]), np.array([[[True, True, True, False]]])
    explained = jax.jit(credit.explained_variance)
    for share, values in {1: returns, 0: 0 * returns, -3: -returns}.items():
        assert explained(values, returns, mask) == pytest.approx(share)
    assert explained(returns, np.ones_like(returns), mask) == 0  # nothing to explain


def params_of_critic() -> PyTree:
    readout = {"kernel": np.full((32, 1), 0.1, np.float32), "bias": np.zeros(1, np.float32)}
    return {"decoder": tiny.model_and_params()[1], "readout": readout}


@cache
def critic_gradients(shape=(1, 1, 1), microbatch=0) -> list[tuple]:
    """A critic's gradients and metrics: with each of two fillers at the tokens of an environment."""
    mesh, batch, made = tiny.mesh_of(shape), tiny.batch(), []
    params = jax.device_put(params_of_critic(), sharding.shardings(params_of_critic(), mesh))
    objective = critic.value_objective(Decoder(tiny.CONFIG, mesh), clip=0.2)
    aggregate = partial(losses.aggregation_weights, mode="token_mean")
    gradient = jax.jit(update.make_gradient(objective, mesh, microbatch, aggregate=aggregate, dtype="float32"))
    trained = batch.loss_mask & (np.arange(tiny.C) != 1)
    for filler in (0.0, 77.0):
        rng = np.random.default_rng(0)
        old, returns = np.where(trained, rng.normal(size=(2, *trained.shape)), filler).astype(np.float32)
        filled = replace(batch, loss_mask=trained, values=old, returns=returns)
        made.append(transfers.to_host(gradient(params, transfers.shard_batch(filled, mesh), {})))
    return made


@pytest.mark.slow
def test_mesh_and_micro_batch_change_no_gradient_of_a_critic():
    (ours, metrics), (theirs, expected) = critic_gradients((2, 2, 2), 4)[0], critic_gradients()[0]
    largest = max(np.abs(x).max() for x in jax.tree.leaves(theirs))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5 * largest), ours, theirs)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=5e-5, atol=5e-6), metrics, expected)


def test_numbers_at_the_tokens_of_an_environment_change_no_gradient_of_a_critic():
    jax.tree.map(np.testing.assert_array_equal, *critic_gradients())


def test_values_see_the_tokens_before_theirs_and_no_other():
    batch, params = tiny.batch(), params_of_critic()
    values = jax.jit(partial(forward.completion_values, Decoder(tiny.CONFIG)))
    before = values(params, batch)
    at = 2
    changed = np.array(batch.completions)
    changed[:, :, at] = (changed[:, :, at] + 1) % tiny.CONFIG.vocab_size
    after = values(params, replace(batch, completions=changed))
    moved = np.abs(np.asarray(after - before)) > 1e-5
    assert not moved[:, :, : at + 1].any()
    assert moved[:, :, at + 1][batch.completion_mask[:, :, at + 1]].all()
    assert not np.asarray(before)[~batch.completion_mask].any()


def test_targets_are_lambda_returns_over_the_trained_tokens():
    rewards = np.array([[[0.0, 5.0, 1.0]]], np.float32)
    mask = np.array([[[True, False, True]]])
    found = credit.lambda_returns(rewards * mask, np.full((1, 1, 3), 0.3, np.float32), mask, gamma=0.9, lam=1.0)
    np.testing.assert_allclose(found, [[[0.9, 0.0, 1.0]]], rtol=1e-6)


def test_another_model_that_cannot_read_what_the_policy_writes_is_refused(refused):
    fit.check_other_model("critic.path", tiny.CONFIG, tiny.CONFIG)
    with refused("config.teachers.big.path"):
        fit.check_other_model("teachers.big.path", replace(tiny.CONFIG, vocab_size=16), tiny.CONFIG)
