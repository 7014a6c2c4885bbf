"""GRPO with an agent that owns its loop: it asks the policy twice, and its own code decides what the answers are worth.

pip install -e '.[serve]' openai
jaxrl train --config configs/agent.py

Measured, greedy reward on 64 held-out problems, each asked twice: 14.1 % before and 88.3 % after (seed 0).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every other field


@cache
def client() -> Any:
    """Returns one client for all episodes, because a new one reads certificates for 20 ms."""
    from openai import OpenAI

    return OpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0)


def agent(endpoint: Any, row: dict[str, Any]) -> dict[str, float]:
    """Asks for a + b and for b + a, each in a chat of its own. Returns which answers are right."""
    policy, right = client().with_options(base_url=endpoint.base_url, api_key=endpoint.api_key), {}
    for name, a, b in (("first", row["a"], row["b"]), ("second", row["b"], row["a"])):
        messages = [{"role": "user", "content": f"{a}+{b}"}]
        answer = policy.chat.completions.create(model=endpoint.model, messages=messages).choices[0].message.content
        right[name] = float(answer.rpartition(">")[2] == row["answer"])
    return right


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 40
    c.prompts_per_step = c.prompts_per_update = 16

    # Agents: name is agents.Function, for a function agent(endpoint, row), or agents.Command, for a program in
    # env.command. docs/agents.md explains what both get and return.
    c.env = ConfigDict()
    c.env.name = "agents.Function"
    c.env.agent = agent  # or "my_module.agent"
    c.env.workers = 32  # episodes at a time, each in a thread
    c.env.timeout = 120.0  # seconds of an episode; 0: no limit
    c.env.calls = 4  # completions that an episode may sample

    # What the agents return: a number, or the sum of a dict's values, of which `weights` may set the weights.
    c.reward.functions, c.reward.weights = ("agents.reward(weights={'first': 0.5, 'second': 0.5})",), (1.0,)
    c.eval.function, c.eval.problems = "agents.reward(weights={'first': 0.5, 'second': 0.5})", 64
    c.rollout.max_completion_tokens = 32  # limit of an episode: all tokens after the first prompt, in all branches
    return c
