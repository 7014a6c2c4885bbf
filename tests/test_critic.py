"""PPO's critic: its loss, its targets, and what must not change them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.algorithms import credit
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import critic, forward
from jaxrl_llm.machine import sharding
from jaxrl_llm.recipe import fit
from jaxrl_llm.structs import Batch


def loss_of_values(values, old, returns, clip, monkeypatch):
    """The objective with the model left out."""
    monkeypatch.setattr(forward, "completion_values", lambda model, params, batch: params)
    mask = np.ones(values.shape, bool)
    batch = Batch(None, None, None, mask, mask, values=old, returns=returns)
    return critic.value_objective(None, clip=clip)(values, batch, {})


def test_the_clipped_value_loss_equals_its_restatement_in_value_and_gradient(monkeypatch):
    with jax.enable_x64(True):
        values, old, returns = np.random.default_rng(0).normal(size=(3, 2, 3, 4))
        for clip in (0.0, 0.2):
            loss, metrics = loss_of_values(jnp.asarray(values), old, returns, clip, monkeypatch)
            gradient = jax.grad(lambda v, c=clip: loss_of_values(v, old, returns, c, monkeypatch)[0].sum())(values)

            def restated(v, o, r, clip=clip):
                plain = (v - r) ** 2
                return (max(plain, (min(max(v, o - clip), o + clip) - r) ** 2) if clip else plain) / 2

            for i in np.ndindex(values.shape):
                at = values[i], old[i], returns[i]
                assert loss[i] == pytest.approx(restated(*at), abs=1e-9)
                up, down = restated(at[0] + 1e-6, *at[1:]), restated(at[0] - 1e-6, *at[1:])
                assert gradient[i] == pytest.approx((up - down) / 2e-6, abs=1e-6)
            assert ("clip/fraction" in metrics) == bool(clip)


def test_the_value_loss_by_hand(monkeypatch):
    values = jnp.array([[[0.0, 0.5, 1.0]]])
    loss, _ = loss_of_values(values, jnp.zeros((1, 1, 3)), jnp.ones((1, 1, 3)), 0.2, monkeypatch)
    np.testing.assert_allclose(loss, [[[0.5, 0.32, 0.32]]], rtol=1e-6)


def test_explained_variance_by_hand_and_without_what_an_environment_wrote():
    returns, mask = jnp.array([[[1.0, 0.0, 1.0, 9.0]]]), np.array([[[True, True, True, False]]])
    assert credit.explained_variance(returns, returns, mask) == pytest.approx(1)
    assert credit.explained_variance(jnp.zeros((1, 1, 4)), returns, mask) == pytest.approx(0)
    assert credit.explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert credit.explained_variance(returns, jnp.ones((1, 1, 4)), mask) == 0  # nothing to explain


def critic_update(shape=(1, 1, 1), microbatch=0, filler=0.0):
    """A critic's parameters and metrics after one update on `tiny.batch()` with a hole that an environment wrote."""
    mesh = tiny.mesh_of(shape)
    model, params = tiny.model_and_params()
    model = type(model)(model.cfg, mesh)
    params = {"decoder": params, "readout": {"kernel": jnp.full((32, 1), 0.1), "bias": jnp.zeros(1)}}
    params = jax.device_put(params, sharding.shardings(params, mesh))
    optimizer = tiny.optimizer()
    state, step = tiny.updater(critic.value_objective(model, clip=0.2), optimizer, params, mesh, microbatch=microbatch)
    batch, rng = tiny.batch(), np.random.default_rng(0)
    trained = batch.loss_mask & (np.arange(tiny.C) != 1)
    old, returns = np.where(trained, rng.normal(size=(2, *trained.shape)), filler).astype(np.float32)
    batch = replace(batch, loss_mask=trained, values=old, returns=returns)
    state, metrics = step(state, sharding.shard_batch(batch, mesh), jnp.arange(tiny.B))
    return sharding.to_host(state.params), sharding.to_host(metrics)


@pytest.mark.parametrize(("shape", "microbatch"), [pytest.param((1, 1, 1), 2, marks=pytest.mark.slow), ((2, 2, 2), 4)])
def test_mesh_and_microbatch_change_nothing_of_a_critics_update(shape, microbatch):
    for a, b in zip(jax.tree.leaves(critic_update()), jax.tree.leaves(critic_update(shape, microbatch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-6)


def test_what_stands_at_an_environments_tokens_changes_nothing_of_a_critics_update():
    jax.tree.map(np.testing.assert_array_equal, critic_update(), critic_update(filler=77.0))


def test_values_see_the_tokens_before_theirs_and_no_other():
    model, params = tiny.model_and_params()
    params = {"decoder": params, "readout": {"kernel": jnp.full((32, 1), 0.1), "bias": jnp.zeros(1)}}
    batch = tiny.batch()
    values = jax.jit(partial(forward.completion_values, model))
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


def test_another_model_that_cannot_read_what_the_policy_writes_is_refused():
    fit.check_other_model("critic.path", tiny.CONFIG, tiny.CONFIG)
    with pytest.raises(UserError, match=r"config.teachers.big.path: .*vocabulary of 16, the policy, .* 32: give one"):
        fit.check_other_model("teachers.big.path", replace(tiny.CONFIG, vocab_size=16), tiny.CONFIG)
