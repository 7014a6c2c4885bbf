"""Advantages, losses, KL and schedules: hand-computed numbers, and NumPy restatements over random cases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, kl, losses, optim
from jaxrl_llm.structs import Batch

RNG = np.random.default_rng(0)


def test_grpo_advantages_by_hand():
    rewards = jnp.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    std = (4 * 0.25 / 3) ** 0.5  # ddof 1
    expected = [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]]
    np.testing.assert_allclose(advantages.grpo(rewards), np.array(expected) / (std + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(advantages.grpo(rewards, normalise="none"), expected, rtol=1e-6)
    whole = np.std([1, 0, 0, 1, 1, 1, 1, 1], ddof=1)
    np.testing.assert_allclose(
        advantages.grpo(rewards, normalise="batch"), np.array(expected) / (whole + 1e-4), rtol=1e-6
    )


@pytest.mark.parametrize("normalise", ["group", "batch", "none"])
@pytest.mark.parametrize("g", [2, 5, 16])
def test_grpo_advantages_have_mean_zero_in_every_group_and_ignore_a_constant(normalise, g):
    rewards = RNG.normal(size=(7, g)).astype(np.float32)
    result = advantages.grpo(rewards, normalise=normalise)
    np.testing.assert_allclose(result.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(result, advantages.grpo(rewards + 3, normalise=normalise), atol=1e-4)


def test_kl_estimators_by_hand_and_their_means():
    logprobs, ref = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.25, 0.4]))
    d = np.log([0.5, 2.0])
    np.testing.assert_allclose(kl.k1(logprobs, ref), -d, rtol=1e-6)
    np.testing.assert_allclose(kl.k2(logprobs, ref), d**2 / 2, rtol=1e-6)
    np.testing.assert_allclose(kl.k3(logprobs, ref), np.exp(d) - d - 1, rtol=1e-5)
    # Over a whole distribution, E_p of k1 and of k3 is the KL itself.
    p, q = (x / x.sum() for x in RNG.random((2, 20)))
    true = np.sum(p * np.log(p / q))
    for estimator in (kl.k1, kl.k3):
        np.testing.assert_allclose(np.sum(p * estimator(np.log(p), np.log(q))), true, rtol=1e-4)


def test_k1_as_a_loss_has_no_gradient_on_policy_where_k2_has_that_of_the_kl():
    logits, ref = jnp.asarray(RNG.normal(size=(2, 6)), jnp.float32)
    p, q = jax.nn.softmax(logits), jax.nn.log_softmax(ref)

    def sampled(estimator):  # E over the sampled token of the gradient of its loss term
        term = lambda x, token: estimator(jax.nn.log_softmax(x)[token], q[token])  # noqa: E731
        return sum(p[token] * jax.grad(term)(logits, token) for token in range(6))

    true = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - q)))(logits)
    np.testing.assert_allclose(sampled(kl.k1), 0, atol=1e-6)
    np.testing.assert_allclose(sampled(kl.k2), true, atol=1e-6)


def random_batch(g: int) -> tuple[np.ndarray, Batch]:
    shape = (4, g, 6)
    mask = np.arange(6) < RNG.integers(0, 7, (4, g))[:, :, None]  # empty completions too
    mask &= RNG.random(shape) < 0.8  # and holes, where an environment spoke
    logprobs, old = RNG.normal(-2, 0.5, (2, *shape)).astype(np.float32)
    batch = Batch(None, None, None, mask, mask, RNG.normal(size=(4, g)).astype(np.float32), old_logprobs=old)
    return logprobs, batch


@pytest.mark.parametrize("g", [1, 2, 4, 8, 16])
def test_ppo_clip_equals_its_restatement_in_value_and_gradient(g):
    logprobs, batch = random_batch(g)
    low, high = 0.2, 0.28
    loss, metrics = losses.ppo_clip(clip_low=low, clip_high=high)(logprobs, batch)
    gradient = jax.grad(lambda x: losses.ppo_clip(clip_low=low, clip_high=high)(x, batch)[0].sum())(logprobs)
    for index in np.ndindex(logprobs.shape):
        a = float(batch.advantages[index[:2]])
        r = float(np.exp(np.float64(logprobs[index]) - batch.old_logprobs[index]))
        bound = r > 1 + high if a > 0 else r < 1 - low
        value = -min(r * a, min(max(r, 1 - low), 1 + high) * a)
        np.testing.assert_allclose(loss[index], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradient[index], 0.0 if bound else -a * r, rtol=1e-5, atol=1e-6)
        assert metrics["clip/fraction"][index] == bound


@pytest.mark.parametrize("g", [1, 3, 16])
def test_aggregation_equals_its_restatement(g):
    values, batch = random_batch(g)
    mask = batch.loss_mask
    by_mode = {
        "token_mean": values[mask].mean(),
        "sequence_mean": np.mean([values[i][mask[i]].mean() for i in np.ndindex(4, g) if mask[i].any()]),
        "constant": values[mask].sum() / (mask.any(-1).sum() * 10),
    }  # fmt: skip
    for mode, expected in by_mode.items():
        weights = losses.aggregation_weights(mask, mode=mode, constant_length=10 if mode == "constant" else 0)
        np.testing.assert_allclose(np.sum(weights * values), expected, rtol=1e-5)
        assert not np.any(np.asarray(weights)[~mask])


def test_aggregation_of_nothing_is_zero_and_finite():
    for mode in ("token_mean", "sequence_mean", "constant"):
        weights = losses.aggregation_weights(np.zeros((2, 2, 3), bool), mode=mode, constant_length=3)
        np.testing.assert_array_equal(weights, 0)


def test_the_rate_rises_in_warm_up_steps_and_decays_to_its_end():
    rate = optim.schedule(1.0, decay="linear", end=0.1, warmup=4, total_steps=14)
    np.testing.assert_allclose([rate(i) for i in range(5)], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    np.testing.assert_allclose([rate(9), rate(14), rate(99)], [0.55, 0.1, 0.1], rtol=1e-6)
    cosine = optim.schedule(2.0, decay="cosine", end=0.5, total_steps=10)
    np.testing.assert_allclose([cosine(0), cosine(5), cosine(10)], [2.0, 1.25, 0.5], rtol=1e-6)
    assert optim.schedule(3.0, decay="constant", end=0.0, total_steps=10)(1000) == 3.0


def test_a_warm_up_ratio_is_the_same_warm_up_in_steps():
    assert optim.count_warmup(305, warmup_steps=0, warmup_ratio=0.95) == 290
    assert optim.count_warmup(305, warmup_steps=290, warmup_ratio=0.0) == 290


def test_weight_decay_spares_norms_biases_and_the_embedding():
    params = {"embed": {"embedding": 1}, "norm": {"scale": 1}, "layers": {"up": {"kernel": 1}, "query": {"bias": 1}}}
    assert optim.decayed(params) == {
        "embed": {"embedding": False},
        "norm": {"scale": False},
        "layers": {"up": {"kernel": True}, "query": {"bias": False}},
    }


def test_clipping_bounds_the_whole_gradient():
    settings = dict(warmup_steps=0, warmup_ratio=0.0, decay="constant", end=0.0, weight_decay=0.0, b1=0.0, b2=0.0)
    # With eps far above the gradient Adam is a plain scaled step, so the clipping shows.
    optimizer, _ = optim.make_optimizer(10, learning_rate=1.0, clip_norm=1.0, eps=1e6, **settings)
    params = {"kernel": jnp.zeros(4)}
    updates, _ = optimizer.update({"kernel": jnp.full(4, 50.0)}, optimizer.init(params), params)
    np.testing.assert_allclose(np.linalg.norm(updates["kernel"]) * 1e6, 1.0, rtol=1e-3)
