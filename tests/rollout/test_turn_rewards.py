"""Rewards of turns: from environments and agents to the last tokens of their turns, and through a run."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import test_episodes
from model_parts import parts, prompts
from test_agents import call, trace

from jaxrl_llm import recipe as recipes
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.load import load
from jaxrl_llm.rollout.agents.trees import episode_trees, place_rewards
from jaxrl_llm.rollout.agents.verdicts import AgentResult
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.samples import CompletionTask
from jaxrl_llm.tasks import environment
from jaxrl_llm.tasks.agents import reward
from jaxrl_llm.tasks.protocol import Reply, checked
from jaxrl_llm.train import steps


class Judged(test_episodes.Echo):
    """Pays for a turn by its length, but for no turn of three letters."""

    def step(self, text: str) -> Reply:
        return replace(super().step(text), reward=None if len(text) == 3 else float(len(text)))


class Thoughtful(test_episodes.Echo):
    """Pays for each turn that begins with a thought."""

    def step(self, text: str) -> Reply:
        return replace(super().step(text), reward=float(text[:1] == "<"))


def test_each_turn_of_an_episode_has_its_reward_on_its_last_token():
    tokenizer = parts()[2]
    pool = EnvironmentPool(tokenizer, partial(Judged, length=0), **test_episodes.LIMITS)
    with closing(pool):
        task = CompletionTask(tokenizer, None, pool, keeps_turns=True)
        arguments = test_episodes.sampler(), prompts(), jax.random.key(0), 4, Sampling(1.5), "test"
        _, rollouts = task.sample(*arguments)
        _, plain = replace(task, keeps_turns=False).sample(*arguments)
    assert plain.turn_numbers is None and plain.turn_rewards is None
    ends, judged = ~np.isnan(rollouts.turn_rewards), 0
    np.testing.assert_array_equal(ends.sum(axis=-1), rollouts.episodes["turns"])
    np.testing.assert_array_equal(rollouts.turn_numbers >= 0, rollouts.loss_mask)
    for place in np.ndindex(ends.shape[:2]):
        turns, tokens = rollouts.turn_numbers[place], rollouts.completions[place]
        for number, end in enumerate(np.flatnonzero(ends[place])):
            turn_tokens = np.flatnonzero(turns == number)
            assert end == turn_tokens[-1] and (np.diff(turn_tokens) == 1).all()
            length = len(tokenizer.decode(tokens[turn_tokens], skip_special_tokens=True))
            assert rollouts.turn_rewards[place][end] == (0 if length == 3 else length)
            judged += length != 3
        assert np.diff(turns[turns >= 0]).max(initial=0) <= 1
    assert judged > 20
    np.testing.assert_array_equal(np.nansum(rollouts.turn_rewards, axis=-1), rollouts.episodes["reward"])


def test_scores_count_by_their_differences_whose_sum_is_the_last_score():
    scores, bonus = [0.5, None, 0.25, 1.0], [None, 2.0, 1.0, None]
    episode = Episode(test_episodes.Echo(), {})
    for score, more in zip(scores, bonus, strict=True):
        episode.end_turn(3, checked(Reply(score=score, reward=more)))
    assert episode.turn_rewards == {2: 0.5, 5: 2.0, 8: 0.75, 11: 0.75}
    assert (episode.metric_sums["final_score"], episode.metric_sums["reward"]) == (1.0, 3.0)
    assert environment.reward([""], [{name: float(x) for name, x in episode.metric_sums.items()}]) == [4.0]


def test_episodes_with_equal_last_scores_have_equal_rewards_to_the_last_bit():
    rng = np.random.default_rng(0)
    for _ in range(50):
        episode = Episode(test_episodes.Echo(), {})
        for score in (*rng.random(4).round(2), 0.7, 0.7):
            episode.end_turn(3, checked(Reply(score=float(score))))
        assert environment.reward([""], [episode.metric_sums]) == [np.float32(0.7)]
        assert episode.turn_rewards[17] == 0


@pytest.mark.parametrize(
    "changes",
    [
        dict(reward=float("nan")),
        dict(score=float("inf")),
        dict(reward="much"),
        dict(reward=1e300),
        dict(metrics={"final_score": 1.0}),
    ],
)
def test_a_reward_of_a_turn_that_is_no_number_is_an_error_of_the_environment(changes):
    with pytest.raises((TypeError, ValueError)):
        checked(Reply(**changes))


def test_a_reward_of_an_agent_lies_on_the_last_token_of_its_call_in_a_tree():
    rows = replace(prompts().take([0]), tokens=np.full((1, 4), 7), mask=np.ones((1, 4), bool))
    # The second call begins anew, the third one continues the first, and the fourth one cuts its answer short.
    calls = [call("ab", "xyz"), call("aq", "uv"), call("abxyzc", "w"), call("abxd", "t")]
    trees = episode_trees(rows, [trace(*calls), trace()], 2, 20, pad_id=0)
    turns, text = trees.rollouts.turn_numbers, trees.rollouts.completions
    placed = place_rewards(turns, [(1.0, 2.0, 3.0, 4.0), ()])
    np.testing.assert_array_equal(turns >= 0, trees.rollouts.loss_mask)
    found = {int(turns[place]): (chr(text[place]), placed[place]) for place in zip(*np.nonzero(~np.isnan(placed)))}  # noqa: B905
    assert found == {0: ("z", 1.0), 1: ("v", 2.0), 2: ("w", 3.0), 3: ("t", 4.0)}
    # A call that has no place in the tree has no place for its reward, which stays in the sum of the episode.
    short = episode_trees(rows, [trace(*calls), trace()], 2, 9, pad_id=0)
    placed = place_rewards(short.rollouts.turn_numbers, [(1.0, 2.0, 3.0, 4.0), ()])
    assert short.lost_calls.tolist() == [[1, 0]] and np.nansum(placed) == 6.0


def test_the_rewards_of_calls_count_in_the_reward_of_the_agent():
    result = AgentResult.from_verdict({"right": 2.0, "turns": [1.0, None, 0.5]})
    assert result.turn_rewards == (1.0, 0.0, 0.5)
    episode = result.metrics | {"unscored": 0.0}
    assert reward([""], [episode]) == [3.5]
    assert reward([""], [episode], weights={"right": 0.5}) == [2.5]
    assert AgentResult.from_verdict(2.0).turn_rewards == AgentResult.from_verdict(None).turn_rewards == ()
    assert AgentResult.from_verdict({"turns": 3}).metrics == {"reward_turns": 3.0}  # a number is like any other key
    for wrong in ("abc", [float("nan")], [[1.0]]):
        with pytest.raises((TypeError, ValueError)):
            AgentResult.from_verdict({"turns": wrong})


def by_turns(kind: str = "Thoughtful", **changes: Any) -> Any:
    rewards = {"reward.functions": ("environment.reward",), "advantage.name": "grpo_turns"}
    return test_episodes.config_with_turns(
        **{"env.name": f"tests.rollout.test_turn_rewards.{kind}", "eval": None, **rewards, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"turns.most": 1}, "turns.most"), ({"reward.functions": ("arithmetic.thought",)}, "reward.functions")],
)
def test_credit_by_the_turn_needs_turns_and_their_rewards(changes, field, refused):
    recipes.read(by_turns())
    with refused("config.advantage.name", f"config.{field}"):
        recipes.read(by_turns(**changes))


@pytest.mark.slow
def test_a_policy_learns_what_turns_pay(tmp_path):
    config = by_turns(**{"num_steps": 12, "optim.learning_rate": 1e-3, "health.self_test": True})
    whole = list(steps(config, tmp_path / "whole"))
    paid = [record["reward/turns"] for record in whole]
    assert paid == pytest.approx([record["reward/mean"] for record in whole])
    assert np.mean(paid[-3:]) > np.mean(paid[:3]) + 0.3, paid


@pytest.mark.slow
def test_turns_of_partial_rollouts_with_a_lag_survive_a_resume(tmp_path):
    changes = {"rollout.partial": 4, "rollout.max_lag": 1, "num_steps": 5, "checkpoint.every": 1}
    config = by_turns(**changes)
    whole = test_episodes.run_records(config, tmp_path / "whole")
    assert any(record["rollout/carried"] for record in whole)
    assert test_episodes.run_records(config, tmp_path / "run", stop=2) == whole


@pytest.mark.slow
def test_a_critic_learns_the_rewards_that_follow_a_turn(tmp_path):
    config, ppo = by_turns(num_steps=2), load("ppo")
    with config.unlocked():
        config.critic, config.advantage = ppo.critic, ppo.advantage
        config.advantage.name, config.critic.warmup_steps = "gae_turns", 0
    config.critic.optim.warmup_steps = 0
    for record in steps(config, tmp_path / "run"):
        assert record["reward/turns"] == pytest.approx(record["reward/mean"])
        assert np.isfinite([record["grad_norm"], record["critic/explained_variance"], record["loss/total"]]).all()
