"""Losses and aggregations: numbers by hand, and plain NumPy restatements in value and gradient over random cases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import losses
from jaxrl_llm.config.names import _functions
from jaxrl_llm.structs import Batch


def sign(a: float) -> float:
    return 1.0 if a > 0 else -1.0


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


# Each restatement maps the trained tokens of one sequence to their losses: x is what is differentiated, and
# frozen, equal to it, what is not. All in float64, token by token, from the papers' own equations.


def ppo_clip(x, frozen, old, a, low=0.2, high=0.2, delta=0.0):
    ratios = [math.exp(i - j) for i, j in zip(x, old, strict=True)]
    bounded = [min(r, delta) if delta else r for r in ratios]
    return [-min(b * k, clip(r, 1 - low, 1 + high) * k) for b, r, k in zip(bounded, ratios, a, strict=True)]


def dual_clip(x, frozen, old, a, low=0.2, high=0.28, c=1.5):
    """As arXiv 1912.09729 writes it: for A < 0 the objective is at least c A."""
    plain = [-loss for loss in ppo_clip(x, frozen, old, a, low, high)]
    return [-max(o, c * k) if k < 0 else -o for o, k in zip(plain, a, strict=True)]


def gspo(x, frozen, old, a, low=3e-4, high=4e-4):
    s = math.prod(math.exp(i - j) for i, j in zip(x, old, strict=True)) ** (1 / len(x))
    return [-min(s * k, clip(s, 1 - low, 1 + high) * k) for k in a]


def gspo_token(x, frozen, old, a, low=0.01, high=0.02):
    s = math.prod(math.exp(i - j) for i, j in zip(frozen, old, strict=True)) ** (1 / len(x))
    tokens = [s * math.exp(i) / math.exp(j) for i, j in zip(x, frozen, strict=True)]
    return [-min(t * k, clip(t, 1 - low, 1 + high) * k) for t, k in zip(tokens, a, strict=True)]


def gmpo(x, frozen, old, a, low=0.4, high=0.4):
    powers = [(math.exp(i - j)) ** sign(k) for i, j, k in zip(x, old, a, strict=True)]
    clipped = [
        clip(math.exp(i - j), math.exp(-low), math.exp(high)) ** sign(k) for i, j, k in zip(x, old, a, strict=True)
    ]
    least = [min(p, q) ** sign(k) for p, q, k in zip(powers, clipped, a, strict=True)]
    ratio = math.prod(least) ** (1 / len(x))
    return [-ratio * k for k in a]


def reinforce(x, frozen, old, a):
    return [-k * i for i, k in zip(x, a, strict=True)]


def cispo(x, frozen, old, a, low=1.0, high=4.0):
    weights = [clip(math.exp(i - j), 1 - low, 1 + high) for i, j in zip(frozen, old, strict=True)]
    return [-w * k * i for w, k, i in zip(weights, a, x, strict=True)]


def sapo(x, frozen, old, a, positive=1.0, negative=1.05):
    def gate(r, tau):
        return 4 / tau / (1 + math.exp(-tau * (r - 1)))

    return [-gate(math.exp(i - j), positive if k > 0 else negative) * k for i, j, k in zip(x, old, a, strict=True)]


def vespo(x, frozen, old, a, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    w = math.exp(sum(frozen) - sum(old))

    def weight(k, slope):
        return math.exp(slope) * w**k * math.exp(-slope * w)

    return [-weight(*(positive if k > 0 else negative)) * k * i for i, k in zip(x, a, strict=True)]


def topr(x, frozen, old, a):
    ratio = math.exp(sum(frozen)) / math.exp(sum(old))
    return [-(1.0 if k > 0 else min(ratio, 1.0)) * k * i for i, k in zip(x, a, strict=True)]


CASES: dict[str, tuple[losses.LossFn, Callable]] = {
    "ppo_clip": (losses.ppo_clip, ppo_clip),
    "two-sided": (
        partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28, delta=1.5),
        partial(ppo_clip, high=0.28, delta=1.5),
    ),
    "dual clip": (partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28, delta=1.5), dual_clip),
    "gspo": (losses.gspo, gspo),
    "gspo-token": (partial(losses.gspo, clip_low=0.01, clip_high=0.02, level="token"), gspo_token),
    "gmpo": (losses.gmpo, gmpo),
    "reinforce": (losses.reinforce, reinforce),
    "cispo": (losses.cispo, cispo),
    "cispo, bounded": (partial(losses.cispo, clip_low=0.3, clip_high=0.5), partial(cispo, low=0.3, high=0.5)),
    "sapo": (losses.sapo, sapo),
    "vespo": (losses.vespo, vespo),
    "topr": (losses.topr, topr),
}
SHAPE = (3, 5, 6)
aggregate = jax.jit(losses.aggregation_weights, static_argnames=("mode", "constant_length"))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def random_batch(seed: int = 0, *, by_token: bool = False) -> tuple[np.ndarray, Batch]:
    """Completions that are empty, cut short, and with holes where an environment spoke, in float64."""
    rng = np.random.default_rng(seed)
    real = np.arange(6) < rng.integers(0, 7, SHAPE[:2])[:, :, None]
    trained = real & (rng.random(SHAPE) < 0.8)
    logprobs, old = rng.normal(-2, 0.4 * (1 + seed), (2, *SHAPE))  # some ratios are beyond all bounds
    advantages = rng.normal(size=SHAPE if by_token else (*SHAPE[:2], 1)) * np.ones(SHAPE)
    return logprobs, Batch(None, None, None, real, trained, advantages, old_logprobs=old)


@cache
def compiled(name: str) -> Callable:
    """Returns `(logprobs, batch) -> loss, metrics, gradient of the sum over trained tokens`, 0 elsewhere."""

    def total(logprobs, batch):
        mask = batch.loss_mask
        loss, metrics = CASES[name][0](logprobs, batch)
        metrics = {key: jnp.where(mask if x.shape == mask.shape else True, x, 0.0) for key, x in metrics.items()}
        return jnp.sum(jnp.where(mask, loss, 0.0)), (jnp.where(mask, loss, 0.0), metrics)

    @jax.jit
    def run(logprobs, batch):
        gradient, (loss, metrics) = jax.grad(total, has_aux=True)(logprobs, batch)
        return loss, metrics, gradient

    return run


def restated(function: Callable, logprobs: np.ndarray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Losses [B, G, C], and the gradient of their sum over trained tokens by central differences."""
    value, gradient = np.zeros(logprobs.shape), np.zeros(logprobs.shape)
    for index in np.ndindex(logprobs.shape[:2]):
        where = np.flatnonzero(batch.loss_mask[index])
        if not len(where):
            continue
        x, old, a = (array[index][where] for array in (logprobs, batch.old_logprobs, batch.advantages))
        value[index][where] = function(x, x, old, a)
        for i, t in enumerate(where):
            step = 1e-6 * (np.arange(len(x)) == i)
            up, down = (sum(function(x + s, x, old, a)) for s in (step, -step))
            gradient[index][t] = (up - down) / 2e-6
    return value, gradient


@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_its_restatement_in_value_and_gradient(name):
    for seed in range(3):
        logprobs, batch = random_batch(seed, by_token=name != "gmpo" and seed > 0)
        loss, _, gradient = compiled(name)(logprobs, batch)
        value, expected = restated(CASES[name][1], logprobs, batch)
        np.testing.assert_allclose(loss, value, atol=1e-6)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_ratio_beyond_all_bounds_leaves_loss_and_gradient_finite(name):
    mask, signs = np.ones(SHAPE, bool), np.array([1.0, 1.0, -1.0, -1.0, 0.0])[None, :, None] * np.ones(SHAPE)
    old = np.array([-1000.0, -1.0, -1000.0, -1.0, -1.0])[None, :, None] * np.ones(SHAPE)
    batch = Batch(None, None, None, mask, mask, signs, old_logprobs=old)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(compiled(name)(-1001 - old, batch)))


@pytest.mark.parametrize("name", CASES)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    """GSPO's and GMPO's share the mean over a sequence's tokens: theirs is its sum over the tokens of the sequence."""
    logprobs, batch = random_batch()
    for old in (None, logprobs):
        *_, gradient = compiled(name)(logprobs, replace(batch, old_logprobs=old))
        np.testing.assert_allclose(gradient, np.where(batch.loss_mask, -batch.advantages, 0.0), atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_what_an_environment_wrote_changes_no_loss_gradient_or_metric(name):
    logprobs, batch = random_batch(1)
    other, run = np.where(batch.loss_mask, logprobs, -7.0), compiled(name)
    jax.tree.map(np.testing.assert_array_equal, run(logprobs, batch), run(other, batch))


def test_aggregation_equals_its_restatement():
    values, batch = random_batch()
    mask = batch.loss_mask
    sequences = [values[i][mask[i]] for i in np.ndindex(SHAPE[:2]) if mask[i].any()]
    by_mode = {
        "token_mean": np.concatenate(sequences).mean(),
        "sequence_mean": np.mean([s.mean() for s in sequences]),
        "sequence_sum": np.mean([s.sum() for s in sequences]),
        "constant": np.sum([s.sum() for s in sequences]) / (len(sequences) * 10),
    }
    for mode, expected in by_mode.items():
        how = dict(mode=mode, constant_length=10 if mode == "constant" else 0)
        weights = np.asarray(aggregate(mask, **how))
        np.testing.assert_allclose(np.sum(weights * values), expected, rtol=1e-5)
        assert not np.any(weights[~mask])
        np.testing.assert_array_equal(aggregate(mask & False, **how), 0)  # nothing is trained


def test_there_is_no_loss_that_these_tests_do_not_know():
    makers = set(_functions(losses, losses)) - {
        "old_logprobs",
        "sequence_mean",
        "importance_ratio",
        "aggregation_weights",
    }
    assert makers == {re.split("[ ,-]", name)[0] for name in CASES} - {"two", "dual"}
