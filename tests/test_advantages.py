"""Advantage estimators: numbers by hand, and plain NumPy restatements over random groups, in float64."""

from __future__ import annotations

import itertools
import statistics
from functools import partial

import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.config.names import _functions, required_inputs
from jaxrl_llm.machine import sharding

GROUPS = [2, 3, 5, 16]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def random_case(g: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rewards [B, G], token rewards and values [B, G, C], and a mask with empty completions and holes."""
    rng = np.random.default_rng(g)
    mask = (np.arange(6) < rng.integers(0, 7, (4, g))[:, :, None]) & (rng.random((4, g, 6)) < 0.8)
    rewards = rng.integers(0, 3, (4, g)).astype(np.float64)
    token_rewards, values = rng.normal(size=(2, 4, g, 6)).astype(np.float64)
    return rewards, np.where(mask, token_rewards, 0), values, mask


def whitened(values: list[float]) -> list[float]:
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / (std + 1e-8) for v in values]


def test_grpo_by_hand():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]], np.float64)
    std = (4 * 0.25 / 3) ** 0.5  # ddof 1
    expected = np.array([[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]])
    np.testing.assert_allclose(advantages.grpo(rewards), expected / (std + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(advantages.grpo(rewards, normalize="none"), expected, rtol=1e-6)
    whole = np.std([1, 0, 0, 1, 1, 1, 1, 1], ddof=1)
    np.testing.assert_allclose(advantages.grpo(rewards, normalize="batch"), expected / (whole + 1e-4), rtol=1e-6)


@pytest.mark.parametrize("normalize", ["group", "batch", "none"])
@pytest.mark.parametrize("g", GROUPS)
def test_grpo_has_mean_zero_in_every_group_and_ignores_a_constant(normalize, g):
    rewards = np.random.default_rng(g).normal(size=(7, g)).astype(np.float64)
    result = advantages.grpo(rewards, normalize=normalize)
    np.testing.assert_allclose(result.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(result, advantages.grpo(rewards + 3, normalize=normalize), atol=1e-4)


def test_rloo_remax_and_opo_by_hand():
    rewards = np.array([[1.0, 0.0, 0.5]], np.float64)
    np.testing.assert_allclose(advantages.rloo(rewards), [[0.75, -0.75, 0.0]], atol=1e-6)
    np.testing.assert_allclose(advantages.remax(rewards, np.array([0.5], np.float64)), [[0.5, -0.5, 0.0]])
    mask = np.array([[[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]], bool)
    np.testing.assert_allclose(advantages.opo(rewards, mask), [[0.2, -0.8, -0.3]], atol=1e-6)


def test_reinforce_pp_gdpo_and_pass_at_k_by_hand():
    mask = np.array([[[True, True], [True, False]]])
    at_the_end = np.array([[[0.0, 1.0], [0.0, 0.0]]])  # returns 1, 1 and 0: mean 2/3, deviation sqrt(1/3)
    expected = np.array([[[1 / 3, 1 / 3], [-2 / 3, 0]]]) / (1 / 3) ** 0.5
    np.testing.assert_allclose(advantages.reinforce_pp(at_the_end, mask), expected, atol=1e-6)
    rewards = np.array([[1.0, 0.0]])  # centered 1/2, 1/2 and -1/2: mean 1/6, deviation sqrt(1/3)
    found = advantages.reinforce_pp_baseline(rewards, mask)
    np.testing.assert_allclose(found, np.array([[[1 / 3, 1 / 3], [-2 / 3, 0]]]) / (1 / 3) ** 0.5, atol=1e-6)
    channels = {"a": np.array([[0.0, 2.0]]), "b": np.array([[50.0, 10.0]])}  # each is -s and s, s = 1 / sqrt(2)
    np.testing.assert_allclose(advantages.gdpo(channels, {"a": 1.0, "b": 0.5}), [[-(0.5**0.5), 0.5**0.5]], atol=1e-3)
    found = advantages.pass_at_k(np.array([[1.0, 0.0, 0.0, 0.0]]), k=2)  # 3 of 6 pairs fail: R = 1/2, s = 1/2
    np.testing.assert_allclose(found, np.array([[0.5, *[0.5 - 2 / 3] * 3]]) / 0.5001, atol=1e-6)


ESTIMATORS = {
    "grpo": {}, "rloo": {}, "reinforce_pp": {}, "reinforce_pp_baseline": {}, "remax": {}, "opo": {}, "gdpo": {},
    "pass_at_k": dict(k=2), "gae": dict(lam=0.9), "distillation": {},
}  # fmt: skip


def test_there_is_no_estimator_that_these_tests_do_not_know():
    assert set(ESTIMATORS) == set(_functions(advantages, advantages))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_gives_the_same_on_a_mesh(name):
    rng, shape = np.random.default_rng(0), (8, 4, 6)
    signals = {
        "rewards": rng.random(shape[:2]), "channels": {"a": rng.random(shape[:2]), "b": rng.random(shape[:2])},
        "greedy_rewards": rng.random(8), "loss_mask": rng.random(shape) < 0.7, "has_reward": rng.random((8, 4)) < 0.8,
    }  # fmt: skip
    signals |= {x: rng.normal(size=shape) for x in ("token_rewards", "values", "old_logprobs", "teacher_logprobs")}
    estimator = getattr(advantages, name)
    fixed = ESTIMATORS[name] | ({"weights": {"a": 1.0, "b": 0.5}} if "weights" in required_inputs(estimator) else {})
    taken = {x: signals[x] for x in required_inputs(estimator) if x in signals}
    placed = sharding.shard_batch(taken, sharding.make_mesh(data=2, fsdp=4, tensor=1))
    one, other = (jax.jit(partial(estimator, **fixed))(**x) for x in (taken, placed))
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp_baseline", "opo", "gdpo", "pass_at_k"])
@pytest.mark.parametrize("there", [[1, 1, 0, 1, 1], [0, 1, 1, 0, 1], [0, 0, 0, 0, 1], [0] * 5])
def test_a_completion_without_a_reward_counts_in_no_statistic(name, there):
    rng, here = np.random.default_rng(1), np.array([there] * 3, bool)
    rewards, mask = rng.normal(size=(3, 5)), rng.random((3, 5, 4)) < 0.8
    arguments = ESTIMATORS[name] | ({"weights": {"a": 1.0, "b": 0.5}} if name == "gdpo" else {})
    estimator = getattr(advantages, name)

    def estimate(rewards, mask, here):
        channels = {"a": np.where(here, rewards, np.nan), "b": np.where(here, rewards**2, np.nan)}
        loss_mask = mask & here[..., None]
        signals = {"rewards": np.where(here, rewards, 0.0), "channels": channels, "loss_mask": loss_mask}
        signals["has_reward"] = here
        found = estimator(**{x: signals[x] for x in required_inputs(estimator) if x != "weights"}, **arguments)
        return np.where(loss_mask, found if found.ndim == 3 else found[..., None], 0.0)

    whole = estimate(rewards, mask, here)
    assert np.isfinite(whole).all()
    assert not whole[~here].any()
    if sum(there) > 1:
        kept = np.array(there, bool)
        some = estimate(rewards[:, kept], mask[:, kept], here[:, kept])
        np.testing.assert_allclose(whole[:, kept], some, rtol=1e-9, atol=1e-12)
    else:
        assert not whole.any() or name in ("pass_at_k",)


@pytest.mark.parametrize("g", GROUPS)
def test_group_baselines_equal_their_restatements(g):
    rewards, _, _, mask = random_case(g)
    for b, group in enumerate(rewards.tolist()):
        others = [statistics.fmean(group[:i] + group[i + 1 :]) for i in range(g)]
        np.testing.assert_allclose(advantages.rloo(rewards)[b], np.subtract(group, others), atol=1e-6)
        lengths = [int(mask[b, i].sum()) for i in range(g)]
        total = sum(lengths)
        baseline = sum(n * r for n, r in zip(lengths, group, strict=True)) / total if total else 0.0
        np.testing.assert_allclose(advantages.opo(rewards, mask)[b], np.array(group) - baseline, atol=1e-6)


def sums_to_go(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """GAE as a double sum over the trained tokens of each sequence: sum_k (gamma lam)^k d_(t + k)."""
    result = np.zeros(rewards.shape)
    for index in np.ndindex(rewards.shape[:2]):
        where = np.flatnonzero(mask[index])
        r, v = rewards[index][where].astype(float), np.append(values[index][where], 0.0).astype(float)
        d = r + gamma * v[1:] - v[:-1]
        for i, t in enumerate(where):
            result[index][t] = sum((gamma * lam) ** k * d[i + k] for k in range(len(d) - i))
    return result


@pytest.mark.parametrize("g", [1, *GROUPS])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_gae_equals_its_restatement(gamma, lam, g):
    _, rewards, values, mask = random_case(g)
    expected = sums_to_go(rewards, values, mask, gamma, lam)
    result = advantages.gae(rewards, values, mask, gamma=gamma, lam=lam, normalize=False)
    np.testing.assert_allclose(result, expected, atol=1e-6)
    result = advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)
    np.testing.assert_allclose(np.asarray(result)[mask], whitened(expected[mask].tolist()), atol=1e-6)
    assert not np.asarray(result)[~mask].any()


def test_gae_by_hand():
    values = np.array([[[0.5, 9.0, 0.25]]], np.float64)
    mask = np.array([[[True, False, True]]])  # an environment wrote the second token
    rewards = np.array([[[0.0, 0.0, 1.0]]], np.float64)
    result = advantages.gae(rewards, values, mask, gamma=1.0, lam=0.5, normalize=False)
    np.testing.assert_allclose(result, [[[-0.25 + 0.5 * 0.75, 0.0, 0.75]]])


@pytest.mark.parametrize("estimator", [advantages.gae, advantages.reinforce_pp])
def test_what_stands_at_an_environments_tokens_changes_nothing(estimator):
    _, rewards, values, mask = random_case(5)
    results = []
    for filler in (0.0, 123.0):
        given = {"token_rewards": np.where(mask, rewards, filler), "values": np.where(mask, values, filler)}
        given["loss_mask"] = mask
        results.append(jax.jit(estimator)(**{name: given[name] for name in required_inputs(estimator)}))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1.0])
def test_equal_rewards_whiten_to_nothing_in_float32(reward):
    """Their mean is off by rounding, which a division by its own size would blow up."""
    with jax.enable_x64(False):
        mask = np.arange(12) < np.random.default_rng(0).integers(1, 13, (64, 1))[..., None]
        at_the_end = np.where(np.cumsum(mask, -1) == mask.sum(-1, keepdims=True), reward, 0) * mask
        for found in (
            advantages.reinforce_pp(at_the_end.astype(np.float32), mask),
            advantages.gae(at_the_end.astype(np.float32), np.zeros(mask.shape, np.float32), mask),
        ):
            assert np.abs(found).max() < 1e-4


@pytest.mark.parametrize("g", GROUPS)
def test_the_reinforce_pp_forms_equal_their_restatements(g):
    rewards, token_rewards, values, mask = random_case(g)
    expected = sums_to_go(token_rewards, 0 * values, mask, 0.9, 1.0)[mask].tolist()
    result = np.asarray(advantages.reinforce_pp(token_rewards, mask, gamma=0.9))
    np.testing.assert_allclose(result[mask], whitened(expected), atol=1e-6)
    centered = [rewards[b, g] - rewards[b].mean() for b, g, _ in np.argwhere(mask)]
    result = np.asarray(advantages.reinforce_pp_baseline(rewards, mask))
    np.testing.assert_allclose(result[mask], whitened([float(x) for x in centered]), atol=1e-6)
    assert not result[~mask].any()


@pytest.mark.parametrize("g", GROUPS)
def test_gdpo_equals_its_restatement_and_no_channel_drowns_another(g):
    rng = np.random.default_rng(g)
    channels = {"right": rng.random((4, g)).astype(np.float64), "short": rng.random((4, g)).astype(np.float64)}
    weights = {"right": 1.0, "short": -0.5}
    total = np.zeros((4, g))
    for b, i in itertools.product(range(4), range(g)):
        for name, weight in weights.items():
            group = channels[name][b].tolist()
            total[b, i] += weight * (group[i] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4)
    result = advantages.gdpo(channels, weights)
    flat = total.reshape(-1).tolist()
    expected = [(x - statistics.fmean(flat)) / (statistics.stdev(flat) + 1e-4) for x in flat]
    np.testing.assert_allclose(np.asarray(result).reshape(-1), expected, atol=1e-6)
    louder = channels | {"short": 1000 * channels["short"]}
    np.testing.assert_allclose(advantages.gdpo(louder, weights), result, atol=1e-3)


@pytest.mark.parametrize(("g", "k"), [(3, 1), (4, 2), (5, 3), (6, 6), (7, 2)])
def test_pass_at_k_equals_the_mean_over_all_sets_of_k(g, k):
    """A reward of 1 to every set of k with a success; mean and deviation over all sets; shared by a set's members."""
    for right in range(g + 1):
        rewards = np.array([[1.0] * right + [0.0] * (g - right)], np.float64)
        sets = list(itertools.combinations(range(g), k))
        scores = [float(any(rewards[0, i] for i in members)) for members in sets]
        mean, std = statistics.fmean(scores), statistics.pstdev(scores)
        expected = []
        for i in range(g):
            mine = [(s - mean) / (std + 1e-4) for s, members in zip(scores, sets, strict=True) if i in members]
            expected.append(statistics.fmean(mine))
        np.testing.assert_allclose(advantages.pass_at_k(rewards, k=k), [expected], atol=1e-6)


def test_distillation_is_the_gap_to_the_teacher_and_its_gradient_that_of_the_reverse_kl():
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(size=(2, 7))
    p, log_q = jax.nn.softmax(logits), jax.nn.log_softmax(teacher)

    def loss(x, token):  # REINFORCE with the advantage of one sampled token
        logprob = jax.nn.log_softmax(x)[None, None, [token]]
        return (-advantages.distillation(log_q[None, None, [token]], jax.lax.stop_gradient(logprob)) * logprob).sum()

    mean = sum(p[token] * jax.grad(loss)(logits, token) for token in range(7))
    reverse_kl = jax.grad(lambda x: (jax.nn.softmax(x) * (jax.nn.log_softmax(x) - log_q)).sum())(logits)
    np.testing.assert_allclose(mean, reverse_kl, atol=1e-9)
    half, quarter = np.log([[[0.5]]]), np.log([[[0.25]]])
    np.testing.assert_allclose(advantages.distillation(half, quarter), np.log([[[2.0]]]))


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1.0])
def test_groups_without_a_signal_have_no_advantage_at_all(reward):
    """In float32 a mean is off by rounding: divided by a deviation of rounding it would be as large as a signal."""
    with jax.enable_x64(False):
        rewards, mask = np.full((16, 7), reward, np.float32), np.ones((16, 7, 3), bool)
        channels = {"right": rewards, "short": 0.3 * rewards}
        for found in (
            advantages.grpo(rewards, epsilon=1e-8),
            advantages.grpo(rewards, normalize="batch", epsilon=1e-8),
            advantages.rloo(rewards),
            advantages.opo(rewards, mask),
            advantages.gdpo(channels, {"right": 1.0, "short": 0.5}),
            advantages.reinforce_pp_baseline(rewards, mask),
        ):
            assert not np.asarray(found).any()
