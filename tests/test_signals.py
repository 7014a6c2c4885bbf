"""From rewards to advantages on every token, and what the log says of it: by hand."""

from __future__ import annotations

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxrl_llm import metrics, signals
from jaxrl_llm.structs import Rollouts

MASK = np.array([[[True, True, True], [True, False, False]]])
CHANNELS = {
    "a": np.array([[1.0, np.nan]], np.float32),
    "b": np.array([[0.0, 1.0]], np.float32),
    "total": np.array([[1.0, 0.5]], np.float32),
}
PENALTY = np.array([[[0.1, 0.0, -0.3], [0.4, 0.0, 0.0]]], np.float32)


def test_a_penalty_is_taken_off_the_reward_where_it_arose_and_none_counts_as_zero():
    found = signals.of_rewards(CHANNELS, PENALTY, MASK, ("a", "b"))
    np.testing.assert_allclose(found["rewards"], [[1.2, 0.1]], rtol=1e-6)
    np.testing.assert_allclose(found["token_rewards"], [[[-0.1, 0.0, 1.3], [0.1, 0.0, 0.0]]], atol=1e-6)
    np.testing.assert_array_equal(found["channels"]["a"], [[1.0, 0.0]])
    assert set(found["channels"]) == {"a", "b"}


def test_advantages_reach_every_trained_token_and_no_other():
    reward = ConfigDict(dict(functions=("a", "b"), weights=(1.0, 0.5)))
    found = signals.of_rewards(CHANNELS, 0 * PENALTY, MASK, ("a", "b"))
    config = ConfigDict(dict(advantage=dict(name="grpo", normalise="none", epsilon=0.0), reward=reward))
    asked, estimate = signals.make_estimate(config)
    assert asked == ("rewards",)
    np.testing.assert_allclose(estimate(found), [[[0.25] * 3, [-0.25, 0.0, 0.0]]])
    config.advantage = ConfigDict(dict(name="gdpo", epsilon=1e-4))
    asked, estimate = signals.make_estimate(config)
    assert asked == ("channels", "weights")
    np.testing.assert_allclose(estimate(found), [[[0.5**0.5] * 3, [-(0.5**0.5), 0.0, 0.0]]], atol=1e-3)


def test_a_summary_says_task_and_kl_apart_and_takes_each_metric_from_the_right_update():
    rollouts = Rollouts(MASK, MASK, MASK, PENALTY, np.array([[True, False]]), 1 * MASK)
    updates = [
        {
            "loss/total": 1.0,
            "sampler/gap_max": 0.1,
            "learning_rate": 0.1,
            "correction/mean": 0.5,
            "correction/square": 0.5,
        },
        {
            "loss/total": 3.0,
            "sampler/gap_max": 0.9,
            "learning_rate": 0.2,
            "correction/mean": 0.9,
            "correction/square": 0.9,
        },
    ]
    timer = metrics.Timer()
    timer.lap("rollout")
    record = metrics.summary(3, rollouts, CHANNELS, PENALTY, updates, timer)
    assert record["reward/mean"] == pytest.approx(0.75)
    assert record["reward/kl"] == pytest.approx(-(-0.2 + 0.4) / 2)
    assert record["reward/kl_pays"] == pytest.approx(0.5)
    assert (record["reward/a"], record["groups/no_signal"]) == (1.0, 0.0)
    assert (record["completion/length"], record["completion/truncated"]) == (2.0, 0.5)
    assert (record["loss/total"], record["sampler/gap_max"], record["learning_rate"]) == (2.0, 0.1, 0.2)
    assert (record["rollout/lag"], record["rollout/lag_p95"]) == (1.0, 1.0)
    assert record["correction/ess"] == pytest.approx(0.5)
    assert "correction/square" not in record
    assert "reward/kl" not in metrics.summary(3, rollouts, CHANNELS, 0 * PENALTY, updates, timer)
