"""Runs whose agents own their loop: what they log, that they resume, also with a lag, and that they learn."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_agents import MORE, message
from test_steps import SHORT, numbers, tiny
from tiny import SMALL

from jaxrl_llm.config import load as configs
from jaxrl_llm.config.names import USER_FUNCTIONS
from jaxrl_llm.train import steps

pytestmark = [pytest.mark.needs("fastapi", "uvicorn", "openai"), pytest.mark.slow]


def agents(**changes: Any) -> ConfigDict:
    """configs/agent.py, made small."""
    shipped = configs.load("agent")
    c = tiny(**SHORT, **{"rollout.max_completion_tokens": 40, "optim.learning_rate": 3e-4})
    with c.unlocked():
        c.env, c.reward.functions, c.reward.weights = shipped.env, shipped.reward.functions, (1.0,)
    c.update_from_flattened_dict(changes)
    return c


def branching(endpoint: Any, row: dict[str, Any]) -> float | None:
    """Three calls, of which the last begins anew. No number for some rows."""
    first = message(endpoint, row["prompt"])
    second = message(endpoint, [*row["prompt"], first, MORE])
    third = message(endpoint, [*row["prompt"], MORE], max_tokens=4)
    return None if row["a"] % 4 == 0 else float(sum(len(x["content"]) % 3 for x in (first, second, third)))


def test_a_run_with_agents_resumes_with_the_numbers_of_one_without_a_stop(tmp_path, monkeypatch):
    configs.load("agent")  # which names its function
    monkeypatch.setitem(USER_FUNCTIONS, "mine.branching", branching)
    for lag in (0, 1):
        config = agents(**{"env.agent": "mine.branching", "num_steps": 3, "rollout.max_lag": lag})
        whole = list(steps(config, tmp_path / f"whole {lag}"))
        for record in whole:
            assert record["sampler/gap_max"] <= 1e-5 or lag
            assert record["episode/calls"] > 2.5 and record["episode/restarts"] > 0.5
            assert 0 < record["episode/unscored"] < 1 and record["episode/errors"] == 0 and record["grad_norm"] > 0
        first = agents(**{"env.agent": "mine.branching", "num_steps": 2, "schedule_steps": 3, "rollout.max_lag": lag})
        config = agents(**{"env.agent": "mine.branching", "num_steps": 3, "schedule_steps": 3, "rollout.max_lag": lag})
        list(steps(first, tmp_path / f"run {lag}"))
        (last,) = steps(config, tmp_path / f"run {lag}")
        assert numbers([last]) == numbers(whole[-1:])


def test_an_agent_of_two_calls_learns_both_answers(tmp_path):
    config = agents(num_steps=40, prompts_per_step=16, prompts_per_update=16, **{"optim.warmup_steps": 2})
    records = list(steps(config, tmp_path / "run"))
    rewards = [record["reward/mean"] for record in records]
    assert np.mean(rewards[-5:]) > 3 * np.mean(rewards[:5]), json.dumps(rewards)
    assert all(record["episode/errors"] == 0 for record in records)
    assert str(config.model.path) == str(SMALL)
