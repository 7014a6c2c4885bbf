"""KL estimators and schedules: hand-computed numbers."""

from __future__ import annotations

import jax
import numpy as np

from jaxrl_llm.algorithms import kl
from jaxrl_llm.learner import optim


def test_kl_estimators_by_hand():
    logprobs, ref = np.log(np.float32([0.5, 0.2])), np.log(np.float32([0.25, 0.4]))
    d = np.log([0.5, 2.0])
    for estimator, expected in {kl.k1: -d, kl.k2: d**2 / 2, kl.k3: np.exp(d) - d - 1}.items():
        np.testing.assert_allclose(jax.jit(estimator)(logprobs, ref), expected, rtol=1e-5)


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
    assert optim.has_weight_decay(params) == {
        "embed": {"embedding": False},
        "norm": {"scale": False},
        "layers": {"up": {"kernel": True}, "query": {"bias": False}},
    }


def test_clipping_bounds_the_whole_gradient():
    settings = dict(warmup_steps=0, warmup_ratio=0.0, decay="constant", end=0.0, weight_decay=0.0, b1=0.0, b2=0.0)
    # With eps far above the gradient Adam is a plain scaled step, so the clipping shows.
    optimizer = optim.make_optimizer(10, learning_rate=1.0, clip_norm=1.0, eps=1e6, **settings)
    params = {"kernel": np.zeros(4, np.float32)}
    gradient = {"kernel": np.full(4, 50.0, np.float32)}
    updates, _ = jax.jit(lambda g: optimizer.transform.update(g, optimizer.transform.init(params), params))(gradient)
    np.testing.assert_allclose(np.linalg.norm(updates["kernel"]) * 1e6, 1.0, rtol=1e-3)
