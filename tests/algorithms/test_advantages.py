"""Advantage estimators: plain NumPy restatements over random groups, in float64."""

from __future__ import annotations

import itertools
import statistics
from functools import partial

import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.config.names import _functions, required_inputs

SHAPE = (4, 5, 6)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def compiled(name: str, **fixed):
    return jax.jit(partial(getattr(advantages, name), **fixed))


COMPILED = {name: compiled(name) for name in ("rloo", "remax", "opo", "reinforce_pp_baseline")}
COMPILED |= {"gdpo": jax.jit(lambda channels: advantages.gdpo(channels, {"a": 1.0, "b": -0.5}))}
COMPILED |= {"grpo": compiled("grpo"), "pass_at_k": compiled("pass_at_k", k=2)}
COMPILED |= {"gae": compiled("gae"), "reinforce_pp": compiled("reinforce_pp"), "distillation": compiled("distillation")}


def test_there_is_no_estimator_that_these_tests_do_not_know():
    in_test_turns = {"grpo_turns", "gae_turns"}
    assert {*COMPILED, *in_test_turns} == set(_functions(advantages, advantages))


def random_case() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rewards [B, G], token rewards and values [B, G, C], and a mask with empty completions and holes."""
    rng = np.random.default_rng(5)
    mask = (np.arange(6) < rng.integers(0, 7, SHAPE[:2])[:, :, None]) & (rng.random(SHAPE) < 0.8)
    rewards = rng.normal(size=SHAPE[:2])
    token_rewards, values = rng.normal(size=(2, *SHAPE))
    return rewards, np.where(mask, token_rewards, 0), values, mask


def whitened(values: list[float]) -> list[float]:
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / (std + 1e-8) for v in values]


def test_grpo_by_hand():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    centered, std = np.array([[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]]), (4 * 0.25 / 3) ** 0.5  # ddof 1
    of_batch = np.std(rewards, ddof=1) + 1e-4
    for normalize, divisor in {"group": std + 1e-4, "none": 1.0, "batch": of_batch}.items():
        found = compiled("grpo", normalize=normalize)(rewards)
        np.testing.assert_allclose(found, centered / divisor, rtol=1e-6)


@pytest.mark.parametrize("g", [2, 5])
def test_group_baselines_equal_their_restatements(g):
    rewards, _, _, mask = (x[:, :g] for x in random_case())
    greedy = np.arange(4.0)
    found = {name: COMPILED[name](rewards, *x) for name, x in (("rloo", ()), ("opo", (mask,)), ("remax", (greedy,)))}
    np.testing.assert_allclose(found["remax"], rewards - greedy[:, None])
    for b, group in enumerate(rewards.tolist()):
        others = [statistics.fmean(group[:i] + group[i + 1 :]) for i in range(g)]
        np.testing.assert_allclose(found["rloo"][b], np.subtract(group, others), atol=1e-6)
        lengths = [int(mask[b, i].sum()) for i in range(g)]
        if sum(lengths):  # else no advantage reaches a token
            baseline = sum(n * r for n, r in zip(lengths, group, strict=True)) / sum(lengths)
            np.testing.assert_allclose(found["opo"][b], np.array(group) - baseline, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp_baseline", "opo", "gdpo", "pass_at_k"])
def test_a_completion_without_a_reward_counts_in_no_statistic(name):
    rng = np.random.default_rng(1)
    rewards, mask = rng.normal(size=(3, 5)), rng.random((3, 5, 4)) < 0.8

    def estimate(rewards, mask, here):
        here = np.tile(here, (3, 1))
        loss_mask, channels = mask & here[..., None], {"a": rewards, "b": rewards**2}
        signals = {"rewards": np.where(here, rewards, 0.0), "loss_mask": loss_mask, "has_reward": here}
        signals["task_rewards"] = signals["rewards"]
        signals["channels"] = {name: np.where(here, x, np.nan) for name, x in channels.items()}
        estimator = getattr(advantages, name)
        found = COMPILED[name](**{x: signals[x] for x in required_inputs(estimator) if x not in ("weights", "k")})
        return np.where(loss_mask, found if found.ndim == 3 else found[..., None], 0.0)

    for there in ([0, 1, 1, 0, 1], [0, 0, 0, 0, 1], [0] * 5):
        here = np.array(there, bool)
        whole = estimate(rewards, mask, here)
        assert np.isfinite(whole).all()
        assert not whole[:, ~here].any()
        if sum(there) > 1:
            some = estimate(rewards[:, here], mask[:, here], here[here])
            np.testing.assert_allclose(whole[:, here], some, rtol=1e-9, atol=1e-12)
        else:
            assert not whole.any()


def sums_to_go(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """GAE as a double sum over the trained tokens of each sequence: sum_k (gamma lam)^k d_(t + k)."""
    result = np.zeros(rewards.shape)
    for index in np.ndindex(rewards.shape[:2]):
        where = np.flatnonzero(mask[index])
        r, v = rewards[index][where], np.append(values[index][where], 0.0)
        d = r + gamma * v[1:] - v[:-1]
        for i, t in enumerate(where):
            result[index][t] = sum((gamma * lam) ** k * d[i + k] for k in range(len(d) - i))
    return result


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5)])
def test_gae_equals_its_restatement(gamma, lam):
    """What stands at an environment's tokens changes nothing."""
    _, rewards, values, mask = random_case()
    expected = sums_to_go(rewards, values, mask, gamma, lam)
    fixed = {} if gamma == lam == 1 else dict(gamma=gamma, lam=lam)  # the defaults
    filled = [np.where(mask, x, 123.0) for x in (rewards, values)]
    found = compiled("gae", normalize=False, **fixed)(*filled, mask)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    if not fixed:
        found = np.asarray(COMPILED["gae"](*filled, mask))
        np.testing.assert_allclose(found[mask], whitened(expected[mask].tolist()), atol=1e-6)
        assert not found[~mask].any()


def test_equal_rewards_whiten_to_nothing_in_float32():
    """Their mean is off by rounding, which a division by its own size would blow up."""
    with jax.enable_x64(False):
        mask = np.arange(12) < np.random.default_rng(0).integers(1, 13, (64, 1))[..., None]
        last = mask & (np.cumsum(mask, -1) == mask.sum(-1, keepdims=True))
        for reward in (0.1, 0.3, 0.7, 1.0):
            at_the_end = (reward * last).astype(np.float32)
            assert np.abs(COMPILED["reinforce_pp"](at_the_end, mask)).max() < 1e-4
            assert np.abs(COMPILED["gae"](at_the_end, 0 * at_the_end, mask)).max() < 1e-4


def test_the_reinforce_pp_forms_equal_their_restatements():
    """What stands at an environment's tokens changes nothing."""
    rewards, token_rewards, values, mask = random_case()
    for gamma, found in {1.0: COMPILED["reinforce_pp"], 0.9: compiled("reinforce_pp", gamma=0.9)}.items():
        expected = sums_to_go(token_rewards, 0 * values, mask, gamma, 1.0)[mask].tolist()
        result = np.asarray(found(np.where(mask, token_rewards, 123.0), mask))
        np.testing.assert_allclose(result[mask], whitened(expected), atol=1e-6)
    centered = [rewards[b, g] - rewards[b].mean() for b, g, _ in np.argwhere(mask)]
    result = np.asarray(COMPILED["reinforce_pp_baseline"](rewards, mask))
    np.testing.assert_allclose(result[mask], whitened([float(x) for x in centered]), atol=1e-6)
    assert not result[~mask].any()


@pytest.mark.parametrize("g", [2, 5])
def test_gdpo_equals_its_restatement_and_no_channel_drowns_another(g):
    rng = np.random.default_rng(g)
    channels, total = {"a": rng.random((4, g)), "b": rng.random((4, g))}, np.zeros((4, g))
    for b, i in itertools.product(range(4), range(g)):
        for name, weight in {"a": 1.0, "b": -0.5}.items():
            group = channels[name][b].tolist()
            total[b, i] += weight * (group[i] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4)
    result = COMPILED["gdpo"](channels)
    flat = total.reshape(-1).tolist()
    expected = [(x - statistics.fmean(flat)) / (statistics.stdev(flat) + 1e-4) for x in flat]
    np.testing.assert_allclose(np.asarray(result).reshape(-1), expected, atol=1e-6)
    np.testing.assert_allclose(COMPILED["gdpo"](channels | {"b": 1000 * channels["b"]}), result, atol=1e-3)


@pytest.mark.parametrize(("g", "k"), [(3, 1), (5, 3), (4, 4)])
def test_pass_at_k_equals_the_mean_over_all_sets_of_k(g, k):
    """A reward of 1 to every set of k with a success; mean and deviation over all sets; shared by a set's members."""
    groups, expected = np.tril(np.ones((g + 1, g)), -1), []  # from no success to g of them
    for rewards in groups:
        sets = list(itertools.combinations(range(g), k))
        scores = [float(any(rewards[i] for i in members)) for members in sets]
        mean, std = statistics.fmean(scores), statistics.pstdev(scores)
        for i in range(g):
            mine = [(s - mean) / (std + 1e-4) for s, members in zip(scores, sets, strict=True) if i in members]
            expected.append(statistics.fmean(mine))
    found = compiled("pass_at_k", k=k)(groups)
    np.testing.assert_allclose(np.asarray(found).reshape(-1), expected, atol=1e-6)


def test_distillation_is_the_gap_to_the_teacher():
    logprobs, teacher = np.random.default_rng(0).normal(-2, 1, (2, *SHAPE))
    np.testing.assert_allclose(COMPILED["distillation"](teacher, logprobs), teacher - logprobs, rtol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_pp_baseline"])
@pytest.mark.parametrize(("offset", "scale"), [(1e7, 1.0), (-1e7, 1.0), (0.0, 1e14)])
def test_a_large_offset_or_scale_of_rewards_is_no_advantage(name, offset, scale):
    with jax.enable_x64(False):
        rewards = np.float32([[0, 1, 1, 1], [0, 0, 3, 0]])
        given = {"loss_mask": np.ones((2, 4, 3), bool)} if name in ("opo", "reinforce_pp_baseline") else {}
        moved, plain = (compiled(name)(rewards=np.float32(x), **given) for x in (offset + scale * rewards, rewards))
        kept = 1.0 if name in ("grpo", "reinforce_pp_baseline") else scale  # the others do not divide
        np.testing.assert_allclose(moved, kept * plain, rtol=1e-3)


def test_groups_without_a_signal_have_no_advantage_at_all():
    """In float32 a mean is off by rounding: divided by a deviation of rounding it would be as large as a signal."""
    with jax.enable_x64(False):
        rewards = np.repeat(np.float32([[0.1], [0.3], [0.7], [1.0]] * 4), 7, axis=1)
        mask = np.ones((16, 7, 3), bool)
        for name, inputs, fixed in (
            ("grpo", (rewards,), dict(epsilon=1e-8)),
            ("grpo", (rewards,), dict(normalize="batch", epsilon=1e-8)),
            ("rloo", (rewards,), {}),
            ("opo", (rewards, mask), {}),
            ("gdpo", ({"a": rewards, "b": 0.3 * rewards},), dict(weights={"a": 1.0, "b": 0.5})),
            ("reinforce_pp_baseline", (rewards, mask), {}),
        ):
            assert not np.asarray(compiled(name, **fixed)(*inputs)).any(), name
