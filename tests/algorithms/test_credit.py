"""From rewards to advantages on every token, and what the log says of it: by hand."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import advantages, credit, kl
from jaxrl_llm.config.names import own_name, required_inputs, resolve
from jaxrl_llm.machine import meshes
from jaxrl_llm.session.record import Record, Timer, rollout_metrics, standard_error, update_metrics
from jaxrl_llm.structs import Batch, Rewards, Rollouts

MASK = np.array([[[True, True, True], [True, False, False]]])
REWARDS = Rewards(
    np.array([[1.0, 0.5]], np.float32),
    {"a": np.array([[1.0, np.nan]], np.float32), "b": np.array([[0.0, 1.0]], np.float32)},
)
BATCH = Batch(None, None, MASK, MASK, MASK)
PENALTY = np.array([[[0.1, 0.0, -0.3], [0.4, 9.0, 9.0]]], np.float32)  # of k1, and anything where nothing is trained


def total(rewards):
    """An estimator that gives what it is given."""
    return rewards


def at_each_token(token_rewards):
    return token_rewards


def at_each_token_of_turns(token_rewards, turn_numbers):
    return token_rewards


def of_lengths(loss_mask):
    return jnp.where(loss_mask, 1.0, 0.0)


def of_channel(channels):
    return jnp.nan_to_num(channels["a"], nan=-1.0)  # the function returned None


def assign(
    advantage: dict, *, placement: str = "none", updates: int = 1, rewards: Rewards = REWARDS, batch=BATCH, **changes
):
    """A batch of one group after credit, and the metrics."""
    function, given = resolve(advantage["name"], advantages), {k: x for k, x in advantage.items() if k != "name"}
    rule = credit.Credit(
        estimator=advantages.Estimator(
            own_name(function, advantages), partial(function, **given), required_inputs(function)
        ),
        weights={"a": 1.0, "b": 0.5},
        model_weight=None,
        overlong_tokens=0,
        kl=kl.k1 if placement == "reward" else None,
        returns=None,
        top_entropy=1.0,
        updates=updates,
    )
    scores = {"old_logprobs": PENALTY, "ref_logprobs": 0 * PENALTY}
    made = credit.make_credit(replace(rule, **changes), meshes.make_mesh(data=1, fsdp=1, tensor=1))
    return made(batch, scores, rewards, {"kl/coef": jnp.float32(1.0)})


def test_a_penalty_is_taken_off_the_reward_where_it_arose():
    batch, metrics = assign({"name": "test_credit.total"}, placement="reward")
    np.testing.assert_allclose(batch.advantages, [[[1.2] * 3, [0.1, 0.0, 0.0]]], rtol=1e-5)
    np.testing.assert_allclose(batch.rewards, [[1.0, 0.5]])  # of the task
    batch, _ = assign({"name": "test_credit.at_each_token"}, placement="reward")
    np.testing.assert_allclose(batch.advantages, [[[-0.1, 0.0, 1.3], [0.1, 0.0, 0.0]]], atol=1e-6)
    batch, _ = assign({"name": "test_credit.of_channel"})
    np.testing.assert_array_equal(batch.advantages, [[[1.0] * 3, [-1.0, 0.0, 0.0]]])
    assert metrics["reward/mean"] == pytest.approx(0.75)
    assert metrics["reward/kl"] == pytest.approx(-(-0.2 + 0.4) / 2)
    assert metrics["reward/kl_pays"] == pytest.approx(0.5)
    assert (metrics["reward/a"], metrics["groups/no_signal"]) == (1.0, 0.0)
    assert "reward/kl" not in assign({"name": "test_credit.total"})[1]


def test_a_penalty_of_rounding_pays_nobody_and_untrained_completions_have_none():
    trained = MASK & [[[True], [False]]]
    for scale, mask, pays, cost in (
        (1.0, MASK, 0.5, 0.1), (1e-6, MASK, 0.0, 1e-7), (1.0, trained, 1.0, -0.2), (1.0, MASK & False, np.nan, np.nan),
    ):  # fmt: skip
        found = credit.penalty_metrics(np.where(mask, scale * PENALTY, 0.0), mask, jnp.float32(1.0))
        assert [found["reward/kl_pays"], -found["reward/kl"]] == pytest.approx([pays, cost], nan_ok=True)


def test_advantages_reach_every_trained_token_and_no_other():
    batch, _ = assign(dict(name="grpo", normalize="none", epsilon=0.0))
    np.testing.assert_allclose(batch.advantages, [[[0.25] * 3, [-0.25, 0.0, 0.0]]])
    batch, _ = assign(dict(name="gdpo", epsilon=1e-4))
    np.testing.assert_allclose(batch.advantages, [[[-(0.5**0.5)] * 3, [0.5**0.5, 0.0, 0.0]]], atol=1e-3)  # only b


def test_a_solved_task_is_solved_for_pass_at_k_whatever_the_penalties():
    for more in ({}, {"placement": "reward"}, {"overlong_tokens": 3}):
        batch, _ = assign({"name": "pass_at_k", "k": 1, "threshold": 0.5}, **more)
        assert not batch.advantages.any()  # both completions are successes


def test_a_completion_without_a_verdict_is_not_trained_and_changes_no_other():
    mask = np.broadcast_to(MASK[:, :1], (1, 3, 3))
    total = np.array([[1.0, np.nan, 0.0]], np.float32)
    rewards = Rewards(total, {"a": total, "b": np.zeros_like(total)})
    weights = {"a": 1.0, "b": 0.0}
    for advantage, least in ((dict(name="test_credit.total"), 0.0), (dict(name="grpo", normalize="none"), -0.5)):
        batch, metrics = assign(advantage, rewards=rewards, weights=weights, batch=Batch(None, None, mask, mask, mask))
        np.testing.assert_array_equal(batch.loss_mask, mask & ~np.isnan(total)[..., None])
        np.testing.assert_array_equal(batch.advantages[0, :, 0], [1.0 + least, 0.0, least])
    assert metrics["reward/no_verdict"] == pytest.approx(1 / 3)
    assert (metrics["reward/mean"], metrics["reward/std"], metrics["groups/no_signal"]) == (0.5, 0.5, 0.0)
    silent = Rewards(np.full((1, 2), np.nan, np.float32), REWARDS.channels)
    batch, metrics = assign(dict(name="grpo", normalize="group", epsilon=1e-4), rewards=silent)
    assert not batch.loss_mask.any() and not np.asarray(batch.advantages).any()
    assert metrics["groups/no_signal"] == 1.0


def test_an_estimator_without_rewards_needs_no_verdict():
    silent = Rewards(np.full((1, 2), np.nan, np.float32), REWARDS.channels)
    batch, metrics = assign({"name": "test_credit.of_lengths"}, rewards=silent)
    np.testing.assert_array_equal(batch.loss_mask, MASK)
    np.testing.assert_array_equal(batch.advantages, 1.0 * MASK)
    assert metrics["reward/no_verdict"] == 0.0


def test_a_group_whose_greedy_completion_has_no_verdict_has_no_baseline():
    rewards = Rewards(REWARDS.total, REWARDS.channels, np.array([[np.nan]], np.float32), np.array([[2]]))
    batch, metrics = assign({"name": "remax"}, rewards=rewards)
    assert not batch.loss_mask.any() and not np.asarray(batch.advantages).any()
    assert metrics["reward/no_verdict"] == 1.0


def test_old_logprobs_are_kept_for_several_updates_only():
    assert assign({"name": "test_credit.total"})[0].old_logprobs is None
    np.testing.assert_array_equal(assign({"name": "test_credit.total"}, updates=2)[0].old_logprobs, PENALTY)


def test_a_loss_gets_the_columns_that_it_asks_for_and_no_others():
    assert assign({"name": "test_credit.total"})[0].columns == {}
    batch, _ = assign({"name": "test_credit.total"}, loss_columns=("old_logprobs",))
    assert (list(batch.columns), batch.old_logprobs) == (["old_logprobs"], None)
    np.testing.assert_array_equal(batch.columns["old_logprobs"], PENALTY)


def test_rewards_lie_on_the_ends_of_turns_and_their_sum_stays_the_total():
    mask = np.array([[[True, True, False, True, True], [True, True, True, False, False]]])
    nan = np.nan
    channel, right = np.float32([[0.75, nan]]), np.float32([[2.0, 4.0]])  # the second episode is unscored
    total = np.float32([[2 * 0.75 + 2.0, 4.0]])
    rewards = Rewards(
        total,
        {"environment.reward": channel, "right": right},
        turn_numbers=np.int32([[[0, 0, -1, 1, 1], [0, 0, 1, -1, -1]]]),
        turn_rewards=np.float32([[[nan, 0.5, nan, nan, 0.25], [nan, 1.0, 3.0, nan, nan]]]),
    )
    batch, metrics = assign(
        {"name": "test_credit.at_each_token_of_turns"}, rewards=rewards, batch=Batch(None, None, mask, mask, mask),
        weights={"environment.reward": 2.0, "right": 1.0}, turn_channel="environment.reward",
    )  # fmt: skip
    np.testing.assert_allclose(batch.advantages, [[[0, 1.0, 0, 0, 2.5], [0, 0, 4.0, 0, 0]]])
    np.testing.assert_allclose(batch.advantages.sum(axis=-1), total)
    assert metrics["reward/turns"] == pytest.approx(0.75)


def test_the_error_of_the_mean_reward_is_that_of_groups():
    rewards = np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, np.nan]], np.float32)
    found = credit.reward_metrics(rewards, {})
    assert (found["reward/min"], found["reward/max"], found["groups/no_signal"]) == (0.0, 1.0, 0.75)
    assert found["reward/without_signal"] == pytest.approx(2 / 3)  # one is all wrong, two are all right
    assert found["reward/error"] == pytest.approx(np.std([1.0, 0.0, 0.5, 1.0], ddof=1) / 2)


def test_the_error_of_a_mean_is_that_of_its_simulation():
    rng = np.random.default_rng(0)
    shares = rng.beta(0.5, 0.5, (2000, 16, 1))  # each prompt has its own: completions of a group are alike
    batches = (rng.random((2000, 16, 8)) < shares).astype(float)
    errors = [standard_error(batch) for batch in batches]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(batches.mean(axis=(1, 2)).std(), rel=0.05)


def test_rewards_lie_on_the_last_trained_token_and_the_penalty_grows_to_one():
    mask = np.array([[[True, True, False], [False, False, False]]])
    np.testing.assert_array_equal(credit.put_on_last_token(np.array([[2.0, 5.0]]), mask), [[[0, 2, 0], [0, 0, 0]]])
    lengths = np.array([[5, 6, 7, 8, 10]])
    np.testing.assert_allclose(credit.overlong_penalty(lengths, 10, 4), [[0, 0, -0.25, -0.5, -1]])


def test_the_overlong_penalty_is_a_channel_also_of_greedy_completions():
    rewards = Rewards(REWARDS.total, REWARDS.channels, np.array([[0.5]], np.float32), np.array([[2]]))
    batch, metrics = assign({"name": "remax"}, rewards=rewards, overlong_tokens=2)
    np.testing.assert_allclose(batch.rewards, REWARDS.total)  # of the task
    np.testing.assert_allclose(batch.advantages, [[[0.0] * 3, [0.5, 0.0, 0.0]]])  # the greedy one earned 0.5 - 0.5
    assert metrics["reward/overlong"] == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("advantage", "learned"),
    [
        ({"name": "grpo"}, 0.0),
        ({"name": "grpo", "normalize": "batch"}, 0.0),
        ({"name": "reinforce_pp_baseline"}, 0.0),
        ({"name": "grpo", "normalize": "none"}, 0.005),
        ({"name": "rloo"}, 0.01),
    ],
)
def test_a_penalty_where_the_task_has_no_signal_is_never_of_full_size(advantage, learned):
    """Completions of 3 tokens and of 1, whose penalties are 1 and 0.99."""
    equal = Rewards(np.float32([[1.0, 1.0]]), {"a": np.float32([[1.0, 1.0]]), "b": np.float32([[0.0, 0.0]])})
    batch, metrics = assign(advantage, rewards=equal, overlong_tokens=200)
    np.testing.assert_allclose(batch.advantages, [[[-learned] * 3, [learned, 0, 0]]], atol=1e-6)
    assert (metrics["groups/no_signal"], metrics["reward/without_signal"], metrics["reward/std"]) == (1.0, 1.0, 0.0)
    assert metrics["reward/overlong"] < 0
    batch, metrics = assign(advantage, overlong_tokens=200)
    assert metrics["groups/no_signal"] == 0.0
    assert batch.advantages.any()


def test_a_record_takes_each_metric_from_the_right_update():
    first = {"loss/total": 1.0, "sampler/gap_max": 0.1, "learning_rate": 0.1, "tokens/trained": 4}
    last = {"loss/total": 3.0, "sampler/gap_max": 0.9, "learning_rate": 0.2, "tokens/trained": 4}
    mismatch = lambda *means: dict(zip(("mean", "square", "raw_mean", "raw_square"), means, strict=True))  # noqa: E731
    updates = [
        first | {f"importance/{name}": x for name, x in mismatch(0.5, 0.5, 2, 8).items()},
        last | {f"importance/{name}": x for name, x in mismatch(0.9, 0.9, 3, 9).items()},
    ]
    timer, updated = Timer(), Future()
    timer.lap("reward")
    updated.set_result(timer.start_time + 2.0)
    metrics = {"reward/a": np.float32("nan"), "reward/mean": 0.5}
    found = Record(3, timer, tokens=4, updates=updates, metrics=metrics, updated=updated).summary()
    assert (found["loss/total"], found["sampler/gap_max"], found["learning_rate"]) == (2.0, 0.1, 0.2)
    assert found["importance/ess"] == pytest.approx(0.5)
    assert (found["importance/raw_mean"], found["importance/raw_ess"]) == (2, 0.5)
    assert not {"importance/square", "importance/raw_square"} & found.keys()
    assert "reward/a" not in found  # its function abstained from all
    assert found["tokens_per_second"] == pytest.approx(2.0)


def test_a_mean_over_updates_is_that_of_their_tokens_and_knows_no_empty_update():
    """The updates train 0, 6, 0 and 2 tokens, whose entropies are 1 and 5."""

    def updated(tokens: int, entropy: float, norm: float, rate: float, **more: float) -> dict:
        usual = {"tokens/trained": tokens, "entropy": entropy, "grad_norm": norm, "learning_rate": rate}
        gap = {"importance/mean": entropy, "sampler/gap_max": norm, "clip/fraction": norm}
        return usual | gap | {f"{name}_max": x for name, x in more.items()}

    empty = updated(0, 0.0, 0.0, 0.1, my=-np.inf)
    updates = [empty, updated(6, 1.0, 3.0, 0.2, my=7.0), empty, updated(2, 5.0, 4.0, 0.3, my=2.0)]
    found = update_metrics([u | {"skip/a": float(not u["tokens/trained"])} for u in updates])
    assert (found["entropy"], found["grad_norm"], found["my_max"]) == (2.0, 3.5, 7.0)
    assert (found["importance/mean"], found["sampler/gap_max"], found["clip/first"]) == (1.0, 3.0, 3.0)
    assert (found["learning_rate"], found["skip/a"]) == (0.3, 0.5)
    assert update_metrics([{f"critic/{name}": x for name, x in u.items()} for u in updates])["critic/entropy"] == 2.0
    assert update_metrics([empty, empty]) == {"learning_rate": 0.1}


def test_a_critic_without_a_trained_token_explains_no_variance():
    of = lambda mask: credit.explained_variance(PENALTY, PENALTY, mask)  # noqa: E731
    assert (of(MASK), of(MASK & [True, False, False])) == (1.0, 1.0)
    assert np.isnan(of(MASK & False))


def test_a_record_says_how_long_completions_are_and_how_old_their_weights():
    rollouts = Rollouts(MASK, MASK, MASK, PENALTY, np.array([[True, False]]), 1 * MASK)
    record = rollout_metrics(rollouts, 3)
    assert (record["completion/length"], record["completion/truncated"]) == (2.0, 0.5)
    assert (record["rollout/lag"], record["rollout/lag_p95"]) == (1.0, 1.0)
