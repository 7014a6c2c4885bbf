"""The terms beside the policy loss, and the coefficients that move by themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.algorithms import kl, losses
from jaxrl_llm.algorithms.importance import make_importance_weights
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.names import required_inputs
from jaxrl_llm.learner import forward, learning, optim, update
from jaxrl_llm.machine import sharding
from jaxrl_llm.session.record import of_updates
from jaxrl_llm.structs import Batch


def with_columns(logprobs, batch, entropy, ref_logprobs):
    """A loss with inputs of its own."""
    return entropy * (logprobs - ref_logprobs) ** 2, {}


LOSSES = {
    "ppo_clip": losses.ppo_clip,
    "two-sided": partial(losses.ppo_clip, delta=1.3),
    "gspo": losses.gspo,
    "gspo-token": partial(losses.gspo, level="token"),
    "gmpo": losses.gmpo,
    "reinforce": losses.reinforce,
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "vespo": losses.vespo,
    "topr": losses.topr,
    "with columns": with_columns,
}
TERMS = {  # what an objective may have besides
    "kl": dict(kl=kl.k3),
    "weighted kl": dict(kl=kl.k3, kl_weighted=True),
    "correction": dict(correct=make_importance_weights(level="sequence", action="truncate", high=1.1)),
    "off-policy mask": dict(off_policy=0.05),
}


def one_update(shape, microbatch, loss, terms, monkeypatch, filler=None):
    """Parameters and metrics after an update of a model that is a table of log-probabilities."""
    table = lambda model, params, batch, sampling: ((params["table"][batch.prompts[:, 0]],) * 2, None)  # noqa: E731
    monkeypatch.setattr(update, "completion_logprobs_and_load", table)
    _, batch = random_batch(0, b=8)
    columns = {"entropy": np.exp(batch.sampler_logprobs), "ref_logprobs": batch.ref_logprobs}
    batch = replace(batch, columns={name: columns[name] for name in required_inputs(LOSSES[loss])[2:]})
    batch = replace(batch, prompts=np.arange(8)[:, None], policy_mask=np.random.default_rng(1).random((8, 4, 5)) < 0.8)
    if filler is not None:
        fill = lambda x: np.where(batch.loss_mask, x, filler)  # noqa: E731
        named = ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs", "policy_mask")
        batch = replace(batch, **{name: fill(getattr(batch, name)).astype(np.float32) for name in named})
        batch = replace(batch, columns=jax.tree.map(fill, batch.columns))
    mesh = tiny.mesh_of(shape)
    optimizer = tiny.optimizer(more={"kl/coef": optim.constant(0.1), "entropy/coef": optim.constant(0.01)})
    params = {"table": jnp.asarray(random_batch(5, b=8)[0], jnp.float32)}
    state, step = tiny.updater(
        update.policy_objective(None, LOSSES[loss], Sampling(), **TERMS[terms]),
        optimizer,
        params,
        mesh,
        microbatch=microbatch,
        aggregate=partial(losses.aggregation_weights, mode="sequence_mean"),
    )
    batch = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, batch)
    state, metrics = step(state, sharding.shard_batch(batch, mesh), jnp.arange(8))
    return sharding.to_host((state.params, metrics))


CASES = [*((loss, "kl") for loss in LOSSES), *(("ppo_clip", terms) for terms in TERMS if terms != "kl")]
ON_A_MESH = (
    ("gspo", "kl"),
    ("with columns", "kl"),
    ("ppo_clip", "correction"),
    ("ppo_clip", "off-policy mask"),
)  # quickly; the others are slow


@pytest.mark.parametrize(
    ("loss", "terms"), [pytest.param(*case, marks=() if case in ON_A_MESH else pytest.mark.slow) for case in CASES]
)
def test_mesh_and_microbatch_change_nothing_of_an_update(loss, terms, monkeypatch):
    one = one_update((1, 1, 1), 0, loss, terms, monkeypatch)
    for shape, microbatch in (((1, 1, 1), 2), ((2, 2, 2), 4)):
        other = one_update(shape, microbatch, loss, terms, monkeypatch)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(("loss", "terms"), CASES)
def test_what_stands_at_an_environments_tokens_changes_nothing_of_an_update(loss, terms, monkeypatch):
    one, other = (one_update((1, 1, 1), 0, loss, terms, monkeypatch, filler) for filler in (0.0, -7.0))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_every_loss_and_term_makes_an_update_of_its_own(monkeypatch):
    updates = [one_update((1, 1, 1), 0, *case, monkeypatch)[0]["table"] for case in CASES]
    for i, one in enumerate(updates):
        for j, other in enumerate(updates[:i]):
            assert not np.allclose(one, other, rtol=0, atol=1e-6), (CASES[i], CASES[j])


def with_logprobs(monkeypatch, entropy=0.5):
    """Objectives whose parameters are the log-probabilities themselves."""
    scored = lambda model, params, *_: ((params, entropy * params**2), None)  # noqa: E731
    monkeypatch.setattr(update, "completion_logprobs_and_load", scored)


def random_batch(seed=0, b=3):
    rng = np.random.default_rng(seed)
    shape = (b, 4, 5)
    mask = rng.random(shape) < 0.7
    logprobs, old, ref, sampler = rng.normal(-2, 0.3, (4, *shape))
    advantages = np.where(mask, rng.normal(size=shape), 0)
    batch = Batch(
        None, None, None, mask, mask, advantages, old_logprobs=old, ref_logprobs=ref, sampler_logprobs=sampler
    )  # fmt: skip
    return logprobs, batch


def nothing(logprobs, batch):
    """A policy loss that is zero, so that the other terms stand alone."""
    return jnp.zeros_like(logprobs), {}


RESTATED = {  # of one token: log-probability now, of the reference, of the policy that sampled
    "k2": (dict(kl=kl.k2), lambda x, ref, old: 0.5 * (ref - x) ** 2),
    "k3": (dict(kl=kl.k3), lambda x, ref, old: np.exp(ref) / np.exp(x) - np.log(np.exp(ref) / np.exp(x)) - 1),
    "k3 by the ratio": (
        dict(kl=kl.k3, kl_weighted=True),
        lambda x, ref, old: np.exp(x) / np.exp(old) * (np.exp(ref - x) - (ref - x) - 1),
    ),
}


def test_k3_by_the_ratio_by_hand(monkeypatch):
    with_logprobs(monkeypatch)
    x, old, ref = (jnp.full((1, 1, 1), np.log(p), jnp.float32) for p in (0.4, 0.2, 0.2))
    mask = np.ones((1, 1, 1), bool)
    batch = Batch(None, None, None, mask, mask, x, old_logprobs=old, ref_logprobs=ref)
    objective = update.policy_objective(None, nothing, Sampling(), kl=kl.k3, kl_weighted=True)
    by_hand = 2 * (0.5 - np.log(0.5) - 1)
    np.testing.assert_allclose(objective(x, batch, {"kl/coef": 1.0})[0], by_hand, rtol=1e-5)


@pytest.mark.parametrize("name", RESTATED)
def test_a_kl_term_equals_its_restatement_in_value_and_gradient(name, monkeypatch):
    with_logprobs(monkeypatch)
    terms, restated = RESTATED[name]
    with jax.enable_x64(True):
        x, batch = random_batch()
        objective = update.policy_objective(None, nothing, Sampling(), **terms)
        value = lambda x: objective(x, batch, {"kl/coef": 0.3})[0]  # noqa: E731
        expected = lambda x: 0.3 * restated(x, batch.ref_logprobs, batch.old_logprobs)  # noqa: E731
        np.testing.assert_allclose(value(jnp.asarray(x)), expected(x), atol=1e-9)
        gradient = jax.grad(lambda x: value(x).sum())(jnp.asarray(x))
        np.testing.assert_allclose(gradient, (expected(x + 1e-6) - expected(x - 1e-6)) / 2e-6, atol=1e-6)


def test_k3_weighted_by_the_ratio_has_the_gradient_of_the_kl_off_policy_where_plain_k3_has_not():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        logits, sampler, ref = rng.normal(size=(3, 6))
        mu, log_mu, log_q = jax.nn.softmax(sampler), jax.nn.log_softmax(sampler), jax.nn.log_softmax(ref)

        def mean(weighted):  # over what the old policy samples
            def term(x, token):
                logprob = jax.nn.log_softmax(x)[token]
                ratio = jnp.exp(logprob - log_mu[token]) if weighted else 1.0
                return ratio * kl.k3(logprob, log_q[token])

            return sum(mu[token] * jax.grad(term)(logits, token) for token in range(6))

        true = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - log_q)))(logits)
        np.testing.assert_allclose(mean(True), true, atol=1e-9)
        assert np.abs(mean(False) - true).max() > 0.01


def test_an_entropy_bonus_is_taken_off_and_a_coefficient_of_none_is_none(monkeypatch):
    with_logprobs(monkeypatch)
    x, batch = random_batch()
    objective = update.policy_objective(None, nothing, Sampling())
    loss, metrics = objective(jnp.asarray(x, jnp.float32), batch, {"entropy/coef": 0.1})
    np.testing.assert_allclose(loss, -0.1 * 0.5 * x**2, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss/entropy"], loss)
    assert not np.asarray(objective(x, batch, {})[0]).any()


def test_tokens_that_are_not_chosen_keep_their_kl_and_lose_their_policy_loss(monkeypatch):
    with_logprobs(monkeypatch)
    x, batch = random_batch()
    chosen = np.random.default_rng(1).random(x.shape) < 0.5
    with_kl = update.policy_objective(None, losses.ppo_clip, Sampling(), kl=kl.k3)
    alone = update.policy_objective(None, nothing, Sampling(), kl=kl.k3)
    coefs = {"kl/coef": 0.3}
    whole, part, rest = (
        np.asarray(f(x, b, coefs)[0])
        for f, b in ((with_kl, batch), (with_kl, replace(batch, policy_mask=chosen)), (alone, batch))
    )
    np.testing.assert_allclose(part, np.where(chosen, whole, rest), rtol=1e-6)


def test_importance_weights_multiply_the_policy_loss_and_not_the_kl(monkeypatch):
    with_logprobs(monkeypatch)
    x, batch = random_batch()
    plain = losses.ppo_clip(x, batch)[0]
    correct = lambda trainer, sampler, mask: (jnp.full(x.shape, 0.5), {})  # noqa: E731
    objective = update.policy_objective(None, losses.ppo_clip, Sampling(), kl=kl.k2, correct=correct)
    expected = 0.5 * plain + 0.3 * kl.k2(x, batch.ref_logprobs)
    np.testing.assert_allclose(objective(x, batch, {"kl/coef": 0.3})[0], expected, rtol=1e-6)


def test_an_adaptive_kl_coefficient_moves_towards_its_target_by_hand():
    coefficient = optim.adaptive_kl(0.1, 10, target=0.05, horizon=100)
    moved = [float(coefficient.adapt(jnp.float32(0.1), {"kl/ref": jnp.float32(x)})) for x in (0.05, 0.055, 9, 0)]
    np.testing.assert_allclose(moved, [0.1, 0.101, 0.102, 0.098], rtol=1e-5)
    fixed = optim.scheduled(0.1, decay="linear", end=0.0, total_steps=10)
    assert float(fixed.value(jnp.float32(5))) == pytest.approx(0.05)  # after five updates of ten
    assert float(fixed.adapt(jnp.float32(5), {})) == 6


def test_an_adaptive_entropy_coefficient_grows_below_its_target_within_its_bounds_and_is_off_above():
    coefficient = optim.adaptive_entropy(0.005, target=0.3, step=0.01, most=0.02)
    state = jnp.asarray(coefficient.start)
    assert float(coefficient.value(state)) == pytest.approx(0.005)
    seen = []
    for entropy in (0.2, 0.2, 0.2, 0.4, 0.2, 0.4, 0.4):
        state = coefficient.adapt(state, {"entropy": jnp.float32(entropy)})
        seen.append((round(float(state[0]), 4), round(float(coefficient.value(state)), 4)))
    assert [c for c, _ in seen] == [0.015, 0.02, 0.02, 0.01, 0.02, 0.01, 0.0]
    assert [used for _, used in seen] == [0.015, 0.02, 0.02, 0.0, 0.02, 0.0, 0.0]


@pytest.mark.slow
def test_the_kl_to_reward_ratio_is_that_of_the_penalty_of_a_completion_to_the_task_reward():
    batch = replace(tiny.batch(), rewards=np.full((tiny.B, tiny.G), -0.5, np.float32))
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1)
    model, params = tiny.model_and_params()
    optimizer = tiny.optimizer(more={"kl/coef": optim.constant(0.1)})
    objective = update.policy_objective(model, losses.ppo_clip, Sampling(), kl=kl.k3)
    state, step = tiny.updater(objective, optimizer, params, mesh, microbatch=2)
    logprobs, _ = forward.completion_logprobs(model, params, batch, Sampling())
    penalty = 0.1 * np.where(batch.loss_mask, kl.k3(logprobs, batch.ref_logprobs), 0).sum(axis=-1).mean()
    _, metrics = step(state, sharding.shard_batch(batch, mesh), jnp.arange(tiny.B))
    assert float(metrics["kl/to_reward"]) == pytest.approx(penalty / 0.5, rel=1e-4)


@pytest.mark.parametrize("spoilt", ["not finite", "without a trained token"])
def test_an_update_that_learns_nothing_moves_no_coefficient(spoilt):
    batch = tiny.batch()
    bad = (
        dict(advantages=batch.advantages * np.nan)
        if spoilt == "not finite"
        else dict(loss_mask=batch.loss_mask & False, rewards=np.full((tiny.B, tiny.G), np.nan, np.float32))
    )
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1)
    model, params = tiny.model_and_params()
    adaptive = optim.adaptive_kl(0.1, 32, target=1.0, horizon=100)
    optimizer = tiny.optimizer(warmup_steps=5, more={"kl/coef": adaptive})
    state, step = tiny.updater(
        update.policy_objective(model, losses.ppo_clip, Sampling(), kl=kl.k3), optimizer, params, mesh
    )
    states, ratios = [], []
    for x in (batch, replace(batch, **bad), batch):
        state, metrics = step(state, sharding.shard_batch(x, mesh), jnp.arange(tiny.B))
        states.append(sharding.to_host(state.coef_state))
        ratios.append(float(metrics.get("kl/to_reward", 0.0)))
    assert np.isfinite(ratios).all()  # also without any verdict
    assert states[0] == states[1]
    assert states[1]["learning_rate"] + 1 == states[2]["learning_rate"]
    assert states[1]["kl/coef"] != states[2]["kl/coef"]


def test_a_mixed_reference_lies_so_far_between():
    policy = {"a": jnp.array([3.0, 6.0])}
    np.testing.assert_allclose(learning.mixed(policy, {"a": jnp.array([1.0, 2.0])}, 0.25)["a"], [1.5, 3.0])
    np.testing.assert_array_equal(learning.mixed(policy, {"a": jnp.array([1.0, 2.0])}, 1.0)["a"], policy["a"])


def test_good_completions_and_a_penalty_without_an_advantage_have_metrics_of_their_own(monkeypatch):
    with_logprobs(monkeypatch)
    x, batch = random_batch()
    sign = np.random.default_rng(2).integers(-1, 2, x.shape).astype(np.float32)
    objective = update.policy_objective(None, nothing, Sampling(), kl=kl.k3)
    _, metrics = objective(jnp.asarray(x, jnp.float32), replace(batch, advantages=sign), {"kl/coef": 0.3})
    good, alone = np.asarray(metrics["tokens/good"]), np.asarray(metrics["loss/kl_alone"])
    np.testing.assert_array_equal(good, sign > 0)
    assert not np.asarray(metrics["logprobs/good"])[sign <= 0].any()
    np.testing.assert_array_equal(alone, np.where(sign == 0, metrics["loss/kl"], 0.0))
    updates = [{name: float(np.mean(np.asarray(value))) for name, value in metrics.items()}]
    of_good = np.asarray(metrics["logprobs/good"])[sign > 0].mean()
    assert of_updates(updates)["logprobs/good"] == pytest.approx(of_good, rel=1e-5)
    assert "logprobs/good" not in of_updates([{"logprobs/good": 0.0, "tokens/good": 0.0}])
