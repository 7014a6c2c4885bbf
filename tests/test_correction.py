"""What the policy loss weighs or leaves out: numbers by hand, and plain restatements over random masks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.importance import high_entropy, make_importance_weights, stay_on_policy


def random_case(g: int):
    rng = np.random.default_rng(g)
    mask = (np.arange(6) < rng.integers(0, 7, (3, g))[:, :, None]) & (rng.random((3, g, 6)) < 0.8)
    trainer, sampler = rng.normal(-2, 0.7, (2, 3, g, 6))
    return trainer, sampler, mask


def restated(trainer, sampler, mask, level):
    """Importance weights of the trained tokens, sequence by sequence."""
    weights = np.ones(mask.shape)
    for i in np.ndindex(mask.shape[:2]):
        d = [t - s for t, s, m in zip(trainer[i], sampler[i], mask[i], strict=True) if m]
        if d:
            of_level = {"token": d, "sequence": [sum(d)] * len(d), "geometric": [sum(d) / len(d)] * len(d)}[level]
            weights[i][mask[i]] = [math.exp(x) for x in of_level]
    return weights


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("g", [1, 3, 16])
def test_importance_weights_equal_their_restatement(level, g):
    with jax.enable_x64(True):
        trainer, sampler, mask = random_case(g)
        raw = restated(trainer, sampler, mask, level)
        by_action = {
            "none": np.ones(raw.shape),
            "truncate": np.minimum(raw, 1.5),
            "mask": np.where((raw >= 0.5) & (raw <= 1.5), raw, 0.0),
        }
        for action, expected in by_action.items():
            weights, metrics = make_importance_weights(level=level, action=action, low=0.5, high=1.5)(
                trainer, sampler, mask
            )
            np.testing.assert_allclose(np.asarray(weights)[mask], expected[mask], rtol=1e-6)
            np.testing.assert_allclose(np.asarray(metrics["importance/weight_max"])[mask], raw[mask], rtol=1e-6)
            counted = raw if action == "none" else expected
            np.testing.assert_allclose(np.asarray(metrics["importance/mean"])[mask], counted[mask], rtol=1e-6)
            by_token = np.minimum(restated(trainer, sampler, mask, "token"), 10.0)[mask]
            np.testing.assert_allclose(np.asarray(metrics["importance/raw_mean"])[mask], by_token, rtol=1e-6)
            np.testing.assert_allclose(np.asarray(metrics["importance/raw_square"])[mask], by_token**2, rtol=1e-6)


def test_no_gradient_goes_through_a_weight():
    trainer, sampler, mask = random_case(2)
    weights = lambda x: jnp.sum(make_importance_weights(action="truncate")(x, sampler, mask)[0])  # noqa: E731
    np.testing.assert_array_equal(jax.grad(weights)(jnp.asarray(trainer)), 0)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_what_an_environment_wrote_changes_no_weight(level):
    trainer, sampler, mask = random_case(4)
    correct = make_importance_weights(level=level, action="truncate")
    both = [np.asarray(correct(np.where(mask, trainer, x), sampler, mask)[0])[mask] for x in (0.0, 3.0)]
    np.testing.assert_array_equal(*both)


def test_a_completion_stays_unless_its_advantage_is_negative_and_the_policy_has_left_it():
    old = jnp.full((1, 4, 2), -1.0)
    logprobs = old - jnp.array([0.0, 0.4, 0.4, 0.2])[None, :, None]
    advantages = jnp.broadcast_to(jnp.array([-1.0, -1.0, 1.0, -1.0])[None, :, None], old.shape)
    stays = stay_on_policy(logprobs, old, advantages, np.ones(old.shape, bool), threshold=0.3)
    np.testing.assert_array_equal(stays[..., 0], [[True, False, True, True]])


def test_the_tokens_of_highest_entropy_are_so_many_of_the_batch_and_all_of_it_at_1():
    rng = np.random.default_rng(0)
    entropy, mask = rng.random((4, 5, 6)), rng.random((4, 5, 6)) < 0.7
    for share in (0.2, 0.5, 1.0):
        chosen = np.asarray(high_entropy(entropy, mask, share=share))
        assert not chosen[~mask].any()
        assert chosen.sum() == pytest.approx(share * mask.sum(), abs=1)
        assert not chosen[mask].all() or share == 1
        if share < 1:
            assert entropy[chosen].min() > entropy[mask & ~chosen].max()
