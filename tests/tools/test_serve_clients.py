"""Clients that know nothing of this package use `jaxrl serve` as they use every other server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_serve import ADD, CALL, Served, scripted

QUESTION = f"say:I add.\n{CALL}"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with scripted() as server:
        yield server


@pytest.mark.needs("litellm")
def test_litellm_chats_calls_a_tool_and_streams(served, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it downloads a table of prices
    import litellm

    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    server = dict(model="openai/tiny", api_base=f"{served.url}/sessions/litellm/v1", api_key="none", tools=[ADD])
    answer = litellm.completion(messages=talk, **server).choices[0].message
    (call,) = answer.tool_calls
    assert answer.content == "I add." and json.loads(call.function.arguments) == {"a": 1, "b": 2}
    talk += [answer, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    talk += [{"role": "user", "content": "say:three"}]
    stream = litellm.completion(messages=talk, stream=True, **server)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "three"
    trace = served.http.delete("/sessions/litellm").json()
    assert trace["calls"] == 2 and trace["restarts"] == 0


@pytest.mark.needs("pydantic_ai")
def test_an_agent_of_pydantic_ai_uses_its_tool_and_answers(served):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    sums = []

    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        sums.append(a + b)
        return f"say:The sum is {a + b}"

    provider = OpenAIProvider(base_url=f"{served.url}/sessions/agent/v1", api_key="none")
    agent = Agent(OpenAIChatModel("tiny", provider=provider), instructions="Use the tool.", tools=[add])
    answer = agent.run_sync(QUESTION).output
    assert sums == [3] and answer.startswith("The sum is 3")
    trace = served.http.delete("/sessions/agent").json()
    assert trace["calls"] == 2 and trace["restarts"] == 0
