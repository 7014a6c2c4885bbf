"""Credit by the turn: NumPy restatements, and a group's baseline that pays for no number of turns."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms import advantages

B, G, C = 3, 5, 12


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(name="turns")
def random_turns() -> tuple[np.ndarray, np.ndarray]:
    """Numbers of turns [B, G, C] with observations between some turns, and rewards on their last tokens."""
    rng = np.random.default_rng(3)
    numbers, rewards = np.full((B, G, C), -1), np.zeros((B, G, C))
    for b, g in np.ndindex(B, G):
        end = 0
        for turn in range(rng.integers(1, 5)):
            start, end = end + rng.integers(0, 2), min(end + 1 + rng.integers(1, 3), C)
            numbers[b, g, start:end] = turn
            rewards[b, g, end - 1] = rng.normal()
    return numbers, rewards


GRPO_TURNS = {x: jax.jit(partial(advantages.grpo_turns, normalize=x)) for x in ("group", "none")}


def restated(total: np.ndarray, numbers: np.ndarray, rewards: np.ndarray, normalize: str) -> np.ndarray:
    """`grpo_turns` of one group, by loops over the turns."""
    count = [int(x.max()) + 1 for x in numbers]
    to_go = [[rewards[i][numbers[i] >= t].sum() for t in range(count[i])] for i in range(len(total))]
    outcome = total - rewards.sum(axis=-1)
    centered = [
        [outcome[i] - outcome.mean() + z - np.mean([x[t] for x in to_go if len(x) > t]) for t, z in enumerate(to_go[i])]
        for i in range(len(total))
    ]
    deviation = np.sqrt(sum(np.mean(np.square(x)) for x in centered) / (len(total) - 1)) + 1e-4
    found = [np.array(x)[numbers[i]] for i, x in enumerate(centered)]
    return np.array(found) / (deviation if normalize == "group" else 1.0)


@pytest.mark.parametrize("normalize", ["group", "none"])
def test_group_relative_turns_equal_their_restatement(turns, normalize):
    numbers, rewards = turns
    total = np.random.default_rng(0).normal(size=(B, G))
    found = np.asarray(GRPO_TURNS[normalize](total, rewards, numbers))
    for b in range(B):
        expected = restated(total[b], numbers[b], rewards[b], normalize)
        np.testing.assert_allclose(found[b][numbers[b] >= 0], expected[numbers[b] >= 0], rtol=1e-9)


def test_without_rewards_of_turns_the_advantages_are_those_of_grpo(turns):
    total = np.random.default_rng(1).normal(size=(B, G))
    total[0] = 0.3  # a group without a signal
    for normalize, compute in GRPO_TURNS.items():
        expected = advantages.grpo(total, normalize=normalize)
        found = compute(total, 0 * turns[1], turns[0])
        np.testing.assert_allclose(found, np.broadcast_to(expected[..., None], found.shape), rtol=1e-9)


def test_a_completion_without_a_reward_changes_no_turn_of_the_others(turns):
    numbers, rewards = turns
    total, here = np.random.default_rng(2).normal(size=(B, G)), np.array([True, False, True, True, False])
    whole = np.asarray(GRPO_TURNS["group"](total, rewards, numbers, np.tile(here, (B, 1)), total))
    some = advantages.grpo_turns(total[:, here], rewards[:, here], numbers[:, here])
    assert not whole[:, ~here].any()
    np.testing.assert_allclose(whole[:, here], some, rtol=1e-9)


def by_turn_index(total: np.ndarray, rewards: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The natural form: the rewards of later turns, each minus the mean of its own turn in the group.

    One token is one turn here.
    """
    has_turn = numbers >= 0
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(has_turn.sum(axis=1, keepdims=True), 1)
    centered = np.where(has_turn, rewards - mean, 0.0)
    return np.cumsum(centered[..., ::-1], axis=-1)[..., ::-1]


def test_the_gradient_of_a_stopping_policy_is_unbiased():
    """A policy with one parameter stops with probability p. The exact gradient follows from all episodes of a group."""
    p, reward, final = 0.4, 0.7, 1.0
    episodes = [(1, p), (2, (1 - p) * p), (3, (1 - p) ** 2)]  # number of turns, probability
    groups = list(itertools.product(episodes, repeat=3))
    lengths = np.array([[t for t, _ in group] for group in groups])
    chances = np.prod([[chance for _, chance in group] for group in groups], axis=1)
    index = np.arange(3)
    numbers = np.where(index < lengths[..., None], index, -1)
    is_last = index == lengths[..., None] - 1
    rewards = np.where(is_last, final, reward) * (numbers >= 0)
    # d log pi / dp of each turn: it stops or goes on, and turn 2 always stops.
    scores = np.where(is_last, 1 / p, -1 / (1 - p)) * (index < 2) * (numbers >= 0)

    def gradient(found: np.ndarray) -> float:
        # With n completions that have a turn, the baseline contains the completion itself, a factor of (n - 1) / n.
        others = (numbers >= 0).sum(axis=1, keepdims=True)
        factor = np.where(others > 1, others / np.maximum(others - 1, 1), 0.0)
        return float(np.sum(chances[:, None, None] * found * factor * scores)) / 3

    # d return / dp: to stop at turn 0 loses the turns that would follow; to stop at turn 1 loses one turn. A turn 1
    # that none of the two other completions has does not count.
    first, second = -reward * (1 + (1 - p)), -reward * (1 - p) * (1 - p**2)
    total = rewards.sum(axis=-1)
    assert gradient(np.asarray(GRPO_TURNS["none"](total, rewards, numbers))) == pytest.approx(first + second)
    assert gradient(by_turn_index(total, rewards, numbers)) > first + second + 0.1  # it pays for stopping


def test_gae_of_turns_without_discounts_is_gae(turns):
    rewards, values = np.random.default_rng(6).normal(size=(2, B, G, C))
    found = advantages.gae_turns(rewards, turns[0], values, turns[0] >= 0)
    np.testing.assert_allclose(found, advantages.gae(rewards, values, turns[0] >= 0), atol=1e-9)


def test_gae_of_turns_equals_its_restatement(turns):
    numbers, mask = turns[0], turns[0] >= 0
    rewards, values = np.random.default_rng(7).normal(size=(2, B, G, C))
    gamma, lam, token_gamma, token_lam = 0.9, 0.8, 0.95, 0.7
    expected = np.zeros((B, G, C))
    for b, g in np.ndindex(B, G):
        r, v = rewards[b, g], values[b, g]
        places = [np.flatnonzero(numbers[b, g] == t) for t in range(numbers[b, g].max() + 1)]
        later = 0.0
        for turn, tokens in reversed([*enumerate(places)]):
            end, following = tokens[-1], places[turn + 1] if turn + 1 < len(places) else []
            q, next_value = (r[following[:-1]].sum(), v[following[-1]]) if len(following) else (0.0, 0.0)
            later = r[end] + gamma * (q + next_value) - v[end] + gamma * lam * later
            expected[b, g, end] = later
            for i, j in zip(tokens[-2::-1], tokens[:0:-1], strict=True):
                delta = r[i] + token_gamma * v[j] - v[i]
                expected[b, g, i] = delta + token_gamma * token_lam * expected[b, g, j]
    fixed = dict(gamma=gamma, lam=lam, token_gamma=token_gamma, token_lam=token_lam, normalize=False)
    filled = [np.where(mask, x, 123.0) for x in (rewards, values)]
    found = advantages.gae_turns(filled[0], numbers, filled[1], mask, **fixed)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_an_estimator_that_reads_only_rewards_of_turns_needs_a_reward():
    # Otherwise completions without a verdict would count in its baselines.
    estimator = advantages.Estimator("", lambda turn_rewards: turn_rewards, ("turn_rewards", "turn_numbers"))
    assert estimator.needs_reward and estimator.needs_turns and not estimator.uses_penalties
