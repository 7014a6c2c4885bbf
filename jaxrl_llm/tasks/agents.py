"""Agents that own their loop: they call the policy at an OpenAI-compatible address, and return a reward or None.

A config names `agents.Function` or `agents.Command` in its section `env`. docs/agents.md shows both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from jaxrl_llm.config.names import marked
from jaxrl_llm.config.schema import AtLeastOne, Field, MayChange, NotNegative
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.protocol import MAX_REWARD

NUMBER = "reward"  # metric of an episode with the number that an agent has returned
CHANNEL = "reward_"  # beginning of the metrics with the values of a dict that an agent has returned
TURNS = "turns"  # key of a dict that an agent has returned: the rewards of its calls
TURN_SUM = "turn_rewards"  # metric of an episode: sum of the rewards of its calls
UNSCORED = "unscored"  # metric of an episode: 1 if its agent has returned no number


class AgentEndpoint(NamedTuple):
    """Where an agent reaches the policy in its episode."""

    base_url: str  # for `openai.OpenAI(base_url=..., api_key=...)`
    api_key: str
    model: str  # name of the model in requests


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """The limits of all agents."""

    workers: AtLeastOne
    timeout: MayChange[NotNegative]
    calls: Annotated[int, Field(int, low=1, high=10_000)]


@marked(owns_loop=True)
@dataclass(frozen=True, kw_only=True)
class Function(AgentSettings):
    """An agent that is a function (endpoint, row) of the user, plain or async."""

    agent: str


@marked(owns_loop=True)
@dataclass(frozen=True, kw_only=True)
class Command(AgentSettings):
    """An agent that is a program. It reads OPENAI_BASE_URL, OPENAI_API_KEY and the file JAXRL_ROW."""

    command: str


def reward(
    completions: list[Any],
    episode: list[dict[str, float]] | None = None,
    *,
    weights: dict[str, float] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Returns what the agents have returned: a number, the weighted sum of a dict's values, or None.

    weights: weight of each key of the dicts; a key without a weight is only logged. None: each key has the weight 1.
    The rewards of calls (`turns`) always have the weight 1.
    """
    if episode is None:
        return [None] * len(completions)
    keys = {name.removeprefix(CHANNEL) for metrics in episode for name in metrics if name.startswith(CHANNEL)}
    if weights and keys and not keys & weights.keys():
        raise UserError(
            f"config.reward.functions: agents.reward has weights for {', '.join(weights)}, but the agents return "
            f"{', '.join(sorted(keys))}: name these keys in the weights"
        )
    return [_reward(metrics, weights) for metrics in episode]


def _reward(metrics: Mapping[str, float], weights: Mapping[str, float] | None) -> float | None:
    """Returns the reward of an episode from the metrics of its agent, None without a verdict."""
    if UNSCORED not in metrics or metrics[UNSCORED]:
        return None
    weighed = {NUMBER: 1.0, TURN_SUM: 1.0} | {
        name: 1.0 if weights is None else weights.get(name.removeprefix(CHANNEL), 0.0)
        for name in metrics
        if name.startswith(CHANNEL)
    }
    return sum(weight * metrics[name] for name, weight in weighed.items() if math.isfinite(metrics.get(name, math.nan)))


def verdict_metrics(verdict: Any) -> dict[str, float]:
    """Returns the metrics of a verdict: a number, a dict of numbers, or None. A value None of a dict is left out.

    The value of `turns` may be a list, whose sum is a metric.

    Raises: TypeError, ValueError, for any other value.
    """
    if isinstance(verdict, Mapping):
        turns = {TURN_SUM: sum(turn_rewards(verdict))} if _has_turns(verdict) else {}
        others = {key: value for key, value in verdict.items() if not (turns and key == TURNS)}
        numbers = {f"{CHANNEL}{key}": value for key, value in others.items() if value is not None} | turns
    else:
        numbers = {} if verdict is None else {NUMBER: verdict}
    return {name: _number(value, verdict) for name, value in numbers.items()}


def turn_rewards(verdict: Any) -> tuple[float, ...]:
    """Returns the rewards of an agent's calls, in the order in which the calls ended: `turns` of a dict; () without it.

    None in the list counts as 0. Raises: TypeError, ValueError, for any other value that is no number.
    """
    rewards = verdict[TURNS] if _has_turns(verdict) else ()
    return tuple(0.0 if reward is None else _number(reward, verdict) for reward in rewards)


def _has_turns(verdict: Any) -> bool:
    return isinstance(verdict, Mapping) and hasattr(verdict.get(TURNS), "__len__")


def _number(value: Any, verdict: Any) -> float:
    # NumPy's and JAX's numbers have this method too. Text has none, so float("1") does not pass.
    if not hasattr(value, "__float__"):
        raise TypeError(f"the agent returned {verdict!r:.80}: it must return a number, a dict of numbers, or None")
    if not abs(float(value)) <= MAX_REWARD:
        raise ValueError(f"the agent returned {verdict!r:.80}: a reward must be finite, at most {MAX_REWARD:g}")
    return float(value)
