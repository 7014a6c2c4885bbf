"""Runs whose agents own their loop: what they log, that they resume, also with a lag, and that they learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict
from test_agents import MORE, message
from test_steps import SHORT, numbers, tiny

from jaxrl_llm.config import load as configs
from jaxrl_llm.config.names import USER_FUNCTIONS
from jaxrl_llm.tools import replay
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
        records = steps(config, tmp_path / f"run {lag}")
        next(records)  # now step 2 is done, and a lag has sampled the batch of step 3
        with pytest.raises(ValueError, match="stop"):
            records.throw(ValueError("stop"))  # pyright: ignore[reportAttributeAccessIssue]
        (resumed,), (expected,) = numbers(list(steps(config, tmp_path / f"run {lag}")))[-1:], numbers(whole[-1:])
        # The times of requests decide which programs compute them, so log-probabilities may differ in their last bits.
        assert resumed == pytest.approx(expected, rel=1e-4, abs=1e-6)
    replayed = replay.step(tmp_path / "whole 0", 3, with_gradient=False)
    assert replayed.differences == {} and not replayed.exact


def judging(endpoint: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Two calls, of which the second begins anew. Pays for each answer that begins with a thought."""
    answers = message(endpoint, row["prompt"]), message(endpoint, [*row["prompt"], MORE])
    return {"turns": [answer["content"][:1] == "<" for answer in answers]}


def test_a_policy_learns_what_its_agent_pays_for_each_call(tmp_path, monkeypatch):
    monkeypatch.setitem(USER_FUNCTIONS, "mine.judging", judging)
    changes = {"env.agent": "mine.judging", "optim.learning_rate": 1e-3, "advantage.name": "grpo_turns"}
    records = list(steps(agents(num_steps=12, **changes), tmp_path / "run"))
    paid = [record["reward/turns"] for record in records]
    assert paid == pytest.approx([record["episode/turn_rewards"] for record in records])
    assert all(record["episode/restarts"] > 0.5 for record in records)
    assert np.mean(paid[-3:]) > np.mean(paid[:3]) + 0.3, paid
