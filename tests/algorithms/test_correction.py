"""What the policy loss weighs or leaves out: numbers by hand, and plain restatements over random masks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.importance import high_entropy_mask, make_importance_weights, on_policy_mask


def random_case():
    rng, shape = np.random.default_rng(5), (3, 5, 6)
    mask = (np.arange(6) < rng.integers(0, 7, shape[:2])[:, :, None]) & (rng.random(shape) < 0.8)
    trainer, sampler = rng.normal(-2, 0.7, (2, *shape))
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
def test_importance_weights_equal_their_restatement_and_have_no_gradient(level):
    """What an environment wrote changes none of them."""
    with jax.enable_x64(True):
        trainer, sampler, mask = random_case()
        raw = restated(trainer, sampler, mask, level)
        by_token = np.minimum(restated(trainer, sampler, mask, "token"), 10.0)
        by_action = {
            "none": np.ones(raw.shape),
            "truncate": np.minimum(raw, 1.5),
            "mask": np.where((raw >= 0.5) & (raw <= 1.5), raw, 0.0),
        }
        for action, expected in by_action.items():
            correct = make_importance_weights(level=level, action=action, low=0.5, high=1.5)

            @jax.jit
            def run(trainer, sampler, mask, correct=correct):
                weights, metrics = correct(trainer, sampler, mask)
                return weights, metrics, jax.grad(lambda x: jnp.sum(correct(x, sampler, mask)[0]))(trainer)

            weights, metrics, gradient = run(np.where(mask, trainer, 3.0), sampler, mask)
            assert not np.any(gradient)
            np.testing.assert_allclose(np.asarray(weights)[mask], expected[mask], rtol=1e-6)
            counted = raw if action == "none" else expected
            for name, numbers in {
                "weight_min": raw, "weight_max": raw, "mean": counted, "square": counted**2, "raw_mean": by_token,
                "raw_square": by_token**2, "acted_on": counted != raw,
            }.items():  # fmt: skip
                found = np.asarray(metrics[f"importance/{name}"])[mask]
                np.testing.assert_allclose(found, numbers[mask], rtol=1e-6)


def test_a_completion_stays_unless_its_advantage_is_negative_and_it_is_left():
    old = np.full((1, 4, 2), -1.0, np.float32)
    logprobs = old - np.float32([0.0, 0.4, 0.4, 0.2])[:, None]
    advantages = np.broadcast_to(np.float32([-1.0, -1.0, 1.0, -1.0])[:, None], old.shape)
    stays = on_policy_mask(logprobs, old, advantages, np.ones(old.shape, bool), threshold=0.3)
    np.testing.assert_array_equal(stays[..., 0], [[True, False, True, True]])


def test_the_tokens_of_highest_entropy_are_a_share_of_the_batch():
    rng = np.random.default_rng(0)
    entropy, mask = rng.random((4, 5, 6)), rng.random((4, 5, 6)) < 0.7
    for share in (0.2, 0.5, 1.0):
        chosen = np.asarray(high_entropy_mask(entropy, mask, share=share))
        assert not chosen[~mask].any()
        assert chosen.sum() == pytest.approx(share * mask.sum(), abs=1)
        assert not chosen[mask].all() or share == 1
        if share < 1:
            assert entropy[chosen].min() > entropy[mask & ~chosen].max()
