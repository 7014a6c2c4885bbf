"""Losses and aggregations: numbers by hand, and plain NumPy restatements in value and gradient over random cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import losses
from jaxrl_llm.config.names import _functions, required_inputs
from jaxrl_llm.structs import Batch


def sign(a: float) -> float:
    return 1.0 if a > 0 else -1.0


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


# Each restatement maps the trained tokens of one sequence to their losses: x is what is differentiated, and
# frozen, equal to it, what is not. All in float64, token by token, from the papers' own equations.


def ppo_clip(x, frozen, old, a, low=0.2, high=0.28, delta=0.0):
    ratios = [math.exp(i - j) for i, j in zip(x, old, strict=True)]
    bounded = [min(r, delta) if delta else r for r in ratios]
    return [-min(b * k, clip(r, 1 - low, 1 + high) * k) for b, r, k in zip(bounded, ratios, a, strict=True)]


def dual_clip(x, frozen, old, a, low=0.2, high=0.28, c=1.5):
    """As arXiv 1912.09729 writes it: for A < 0 the objective is at least c A."""
    plain = [-loss for loss in ppo_clip(x, frozen, old, a, low, high)]
    return [-max(o, c * k) if k < 0 else -o for o, k in zip(plain, a, strict=True)]


def gspo(x, frozen, old, a, low=0.01, high=0.02):
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


def cispo(x, frozen, old, a, low=0.3, high=0.5):
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
    "ppo_clip": (partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28), ppo_clip),
    "two-sided": (partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28, delta=1.5), partial(ppo_clip, delta=1.5)),
    "dual clip": (partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28, delta=1.5), dual_clip),
    "gspo": (partial(losses.gspo, clip_low=0.01, clip_high=0.02), gspo),
    "gspo-token": (partial(losses.gspo, clip_low=0.01, clip_high=0.02, level="token"), gspo_token),
    "gmpo": (losses.gmpo, gmpo),
    "reinforce": (losses.reinforce, reinforce),
    "cispo": (partial(losses.cispo, clip_low=0.3, clip_high=0.5), cispo),
    "sapo": (losses.sapo, sapo),
    "vespo": (losses.vespo, vespo),
    "topr": (losses.topr, topr),
}
BY_TOKEN = {"ppo_clip", "two-sided", "dual clip", "gspo", "gspo-token", "reinforce", "cispo", "sapo", "vespo", "topr"}


def random_batch(g: int, seed: int, *, by_token: bool = False) -> tuple[np.ndarray, Batch]:
    """Completions that are empty, cut short, and with holes where an environment spoke, in float64."""
    rng = np.random.default_rng(seed)
    shape = (3, g, 6)
    real = np.arange(6) < rng.integers(0, 7, (3, g))[:, :, None]
    trained = real & (rng.random(shape) < 0.8)
    logprobs, old = rng.normal(-2, 0.4, (2, *shape))
    advantages = rng.normal(size=shape if by_token else (3, g, 1)) * np.ones(shape)
    columns = dict(zip(("entropy", "ref_logprobs"), rng.random((2, *shape)), strict=True))
    return logprobs, Batch(None, None, None, real, trained, advantages, old_logprobs=old, columns=columns)


def computed(loss_fn: losses.LossFn, logprobs, batch: Batch) -> tuple[jax.Array, losses.Metrics]:
    """The loss and its metrics, with the columns that it asks for."""
    return loss_fn(logprobs, batch, **columns_of(loss_fn, batch))


def columns_of(function: Callable, batch: Batch) -> dict[str, np.ndarray]:
    return {name: x for name, x in batch.columns.items() if name in required_inputs(function)}


def restated(function: Callable, logprobs: np.ndarray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Losses [B, G, C], and the gradient of their sum over trained tokens by central differences."""
    value, gradient = np.zeros(logprobs.shape), np.zeros(logprobs.shape)
    for index in np.ndindex(logprobs.shape[:2]):
        where = np.flatnonzero(batch.loss_mask[index])
        if not len(where):
            continue
        x, old, a = (array[index][where] for array in (logprobs, batch.old_logprobs, batch.advantages))
        columns = {name: array[index][where] for name, array in columns_of(function, batch).items()}
        value[index][where] = function(x, x, old, a, **columns)
        for i, t in enumerate(where):
            step = 1e-6 * (np.arange(len(x)) == i)
            up, down = (sum(function(x + s, x, old, a, **columns)) for s in (step, -step))
            gradient[index][t] = (up - down) / 2e-6
    return value, gradient


@pytest.mark.parametrize("g", [1, 2, 3, 16])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_its_restatement_in_value_and_gradient(name, g):
    loss_fn, function = CASES[name]
    for by_token in {False, name in BY_TOKEN}:
        with jax.enable_x64(True):
            logprobs, batch = random_batch(g, seed=g, by_token=by_token)
            value, gradient = restated(function, logprobs, batch)
            mask = batch.loss_mask
            summed = jax.jit(lambda x, b=batch, m=mask: jnp.sum(jnp.where(m, computed(loss_fn, x, b)[0], 0.0)))
            loss = computed(loss_fn, jnp.asarray(logprobs), batch)[0]
            np.testing.assert_allclose(np.where(mask, loss, 0), value, atol=1e-6)
            np.testing.assert_allclose(jax.grad(summed)(logprobs), gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_ratio_beyond_all_bounds_leaves_loss_and_gradient_finite(name):
    loss_fn, _ = CASES[name]
    mask = np.ones((1, 4, 2), bool)
    old = jnp.broadcast_to(jnp.array([-300.0, -1.0, -300.0, -1.0])[None, :, None], mask.shape)
    logprobs = jnp.broadcast_to(jnp.array([-1.0, -300.0, -1.0, -300.0])[None, :, None], mask.shape)
    advantages = jnp.broadcast_to(jnp.array([1.0, 1.0, -1.0, -1.0])[None, :, None], mask.shape)
    batch = Batch(None, None, None, mask, mask, advantages, old_logprobs=old)
    (value, metrics), gradient = (loss_fn(logprobs, batch), jax.grad(lambda x: loss_fn(x, batch)[0].sum())(logprobs))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, metrics, gradient)))


@pytest.mark.parametrize("name", CASES)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    """GSPO's and GMPO's share the mean over a sequence's tokens: theirs is its sum over the tokens of the sequence."""
    loss_fn, _ = CASES[name]
    logprobs, batch = random_batch(4, seed=0)
    for old in (None, logprobs):
        batch = Batch(None, None, None, batch.completion_mask, batch.loss_mask, batch.advantages, old_logprobs=old)
        trained = lambda x, b=batch: jnp.sum(jnp.where(b.loss_mask, loss_fn(x, b)[0], 0.0))  # noqa: E731
        expected = np.where(batch.loss_mask, -batch.advantages, 0.0)
        np.testing.assert_allclose(jax.grad(trained)(jnp.asarray(logprobs)), expected, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_what_an_environment_wrote_changes_no_loss_and_no_gradient(name):
    loss_fn, _ = CASES[name]
    logprobs, batch = random_batch(4, seed=1)
    trained = lambda x, b=batch: jnp.sum(jnp.where(b.loss_mask, computed(loss_fn, x, b)[0], 0.0))  # noqa: E731
    other = np.where(batch.loss_mask, logprobs, -7.0)
    for f in (trained, jax.grad(trained)):
        np.testing.assert_array_equal(jax.jit(f)(logprobs), jax.jit(f)(other))


@pytest.mark.parametrize("name", losses.__all__)
def test_a_loss_is_the_same_on_a_batch_and_on_its_halves(name):
    """A micro-batch has some prompts, and some completions of a prompt: the rest is not in its masks."""
    loss_fn = getattr(losses, name)
    logprobs, batch = random_batch(4, seed=2)
    value = jax.jit(lambda x, part: computed(loss_fn, x, part)[0])
    whole = np.where(batch.loss_mask, value(logprobs, batch), 0.0)
    for prompts in (slice(0, 2), slice(2, 3)):
        x, part = jax.tree.map(lambda array, at=prompts: array[at], (logprobs, batch))
        np.testing.assert_allclose(np.where(part.loss_mask, value(x, part), 0.0), whole[prompts], rtol=1e-6)
    for completions in (np.arange(4) < 2, np.arange(4) >= 2):
        here = completions[None, :, None]
        part = replace(batch, completion_mask=batch.completion_mask & here, loss_mask=batch.loss_mask & here)
        np.testing.assert_allclose(
            np.where(part.loss_mask, value(logprobs, part), 0.0), np.where(here, whole, 0.0), rtol=1e-6
        )


def numbers(loss_fn: losses.LossFn, log_ratios: list[float], advantage: float) -> list[float]:
    """Losses of one sequence of log-probability -1 each."""
    x = jnp.full((1, 1, len(log_ratios)), -1.0)
    mask = np.ones(x.shape, bool)
    batch = Batch(
        None, None, None, mask, mask, jnp.full(x.shape, advantage), old_logprobs=x - jnp.array(log_ratios)[None, None]
    )
    return [round(float(v), 4) for v in loss_fn(x, batch)[0][0, 0]]


def test_losses_by_hand():
    half, double = math.log(0.5), math.log(2.0)
    assert numbers(losses.ppo_clip, [half, double, 0.0], 1.0) == [-0.5, -1.2, -1.0]
    assert numbers(losses.ppo_clip, [half, double, 0.0], -1.0) == [0.8, 2.0, 1.0]
    assert numbers(partial(losses.ppo_clip, delta=1.5), [half, double, 0.0], -1.0) == [0.8, 1.5, 1.0]
    assert numbers(partial(losses.gspo, clip_low=0.2, clip_high=0.2), [double, double, half, half], 3.0) == [-3.0] * 4
    assert numbers(partial(losses.gspo, clip_low=0.2, clip_high=0.2), [double, double], 3.0) == [-3.6] * 2
    assert numbers(partial(losses.gmpo, clip_low=double, clip_high=double), [2 * double, 0.0], 1.0) == [-1.4142] * 2
    assert numbers(losses.reinforce, [half, double], 2.0) == [2.0, 2.0]
    assert numbers(partial(losses.cispo, clip_high=0.5), [half, double], 2.0) == [1.0, 3.0]
    assert numbers(losses.sapo, [0.0, double], 1.0) == [-2.0, round(-4 / (1 + math.exp(-1)), 4)]
    assert numbers(losses.topr, [double, double], 3.0) == [3.0] * 2
    assert numbers(losses.topr, [half, 0.0], -2.0) == [-1.0] * 2
    assert numbers(losses.vespo, [0.0, double], 1.0) == [round(4 * math.exp(-3), 4)] * 2


@pytest.mark.parametrize("g", [1, 3, 16])
def test_aggregation_equals_its_restatement(g):
    values, batch = random_batch(g, seed=g)
    mask = batch.loss_mask
    sequences = [values[i][mask[i]] for i in np.ndindex(3, g) if mask[i].any()]
    by_mode = {
        "token_mean": np.concatenate(sequences).mean(),
        "sequence_mean": np.mean([s.mean() for s in sequences]),
        "sequence_sum": np.mean([s.sum() for s in sequences]),
        "constant": np.sum([s.sum() for s in sequences]) / (len(sequences) * 10),
    }
    for mode, expected in by_mode.items():
        weights = losses.aggregation_weights(mask, mode=mode, constant_length=10 if mode == "constant" else 0)
        np.testing.assert_allclose(np.sum(weights * values), expected, rtol=1e-5)
        assert not np.any(np.asarray(weights)[~mask])


def test_aggregation_by_hand():
    mask = np.array([[[True, True, True], [True, False, False], [False, False, False]]])
    expected = {"token_mean": [1 / 4, 1 / 4], "sequence_mean": [1 / 6, 1 / 2], "sequence_sum": [1 / 2, 1 / 2]}
    expected |= {"constant": [1 / 20, 1 / 20]}
    for mode, (first, second) in expected.items():
        weights = losses.aggregation_weights(mask, mode=mode, constant_length=10 if mode == "constant" else 0)
        by_hand = [[[first] * 3, [second, 0, 0], [0, 0, 0]]]
        np.testing.assert_allclose(weights, by_hand, rtol=1e-6)


def test_there_is_no_loss_that_these_tests_do_not_know():
    makers = set(_functions(losses, losses)) - {"old_logprobs", "sequence_mean", "ratio_of", "aggregation_weights"}
    assert makers == {name.split(" ")[0].split("-")[0] for name in CASES} - {"two", "dual"}


def test_aggregation_of_nothing_is_zero_and_finite():
    for mode in ("token_mean", "sequence_mean", "sequence_sum", "constant"):
        weights = losses.aggregation_weights(np.zeros((2, 2, 3), bool), mode=mode, constant_length=3)
        np.testing.assert_array_equal(weights, 0)
