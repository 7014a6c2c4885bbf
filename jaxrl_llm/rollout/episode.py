"""One episode: its environment, its row and its metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm.data import formats
from jaxrl_llm.errors import UserError, describe
from jaxrl_llm.rollout.time_limit import TimeLimit
from jaxrl_llm.tasks.protocol import FINAL_SCORE, Environment, Reply, checked

T = TypeVar("T")


@dataclass
class Episode:
    """An episode's environment and its metrics."""

    environment: Environment
    row: dict[str, Any]
    metric_sums: dict[str, np.float32] = field(default_factory=dict)  # sums of metrics over the turns
    reached_limit: bool = False  # whether a limit of turns, observation tokens or time ended it
    is_late: bool = False  # whether its environment may still run a call, so that no other call may start
    is_finished: bool = False  # whether the environment has given its last metrics
    length: int = 0  # tokens of the turns and observations so far
    turn_rewards: dict[int, np.float32] = field(default_factory=dict)  # {index of the last token of a turn: its reward}

    def add_metrics(self, measured: Mapping[str, float]) -> None:
        """Adds the metrics of a turn."""
        # The sums are float32 as in a checkpoint, so that a resumed run computes the same sums.
        sums = {name: self.metric_sums.get(name, np.float32(0)) + np.float32(value) for name, value in measured.items()}
        self.metric_sums.update(sums)

    def end_turn(self, tokens: int, reply: Reply) -> None:
        """Adds the tokens, the metrics and the reward of a turn. A score counts by its change."""
        measured = {} if reply.reward is None else {"reward": reply.reward + reply.metrics.get("reward", 0.0)}
        self.add_metrics({"errors": 0.0} | reply.metrics | measured | {"turns": 1.0})
        turn_reward = np.float32(reply.reward or 0.0)
        if reply.score is not None:
            # No sum, but the last score itself, so that episodes with equal last scores have equal rewards.
            last_score, score = self.metric_sums.get(FINAL_SCORE, np.float32(0)), np.float32(reply.score)
            turn_reward += score - last_score
            self.metric_sums[FINAL_SCORE] = score
        self.length += tokens
        self.turn_rewards[self.length - 1] = turn_reward

    def start(self, time_limit: TimeLimit) -> UserError | None:
        """Resets the environment. Returns the error of an environment that refuses its row."""

        def reset() -> UserError | None:
            try:
                reset_environment(self.environment, self.row)
            except UserError as error:
                return error
            return None

        try:
            return time_limit.call(reset)
        except TimeoutError:
            self.is_late = True
            return None

    def finish(self, time_limit: TimeLimit) -> None:
        """Adds the last metrics of the environment, if it has any."""
        self.is_finished = True
        if not (finish := getattr(self.environment, "finish", None)):
            return

        def call() -> Mapping[str, float]:
            try:
                return checked(Reply(metrics=finish())).metrics
            except (Exception, SystemExit) as error:
                warn_of(error)
                return {"errors": 1.0, "unscored": 1.0}

        try:
            if self.is_late:
                raise TimeoutError
            self.add_metrics(time_limit.call(call))
        except TimeoutError:
            self.add_metrics({"errors": 1.0, "unscored": 1.0})


def reset_environment(environment: Environment, row: dict[str, Any]) -> None:
    """Starts the episode of a row. Raises: UserError, if the environment does not accept the row."""
    _call_with_row(environment, environment.reset, row)


def prepare_row(environment: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with what the environment adds. Raises: UserError, if the environment does not accept the row."""
    return _call_with_row(environment, environment.prepare_row, row)


def _call_with_row(environment: Any, method: Callable[[dict[str, Any]], T], row: dict[str, Any]) -> T:
    try:
        return method(row)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"config.env: {type(environment).__name__}.reset does not accept a row ({formats.columns_text(row)}): "
            f"{describe(error)}; fix the data or the environment"
        ) from error


def warn_of(error: BaseException) -> None:
    """Warns the user of an environment's error, which the policy reads too. Python shows equal warnings once."""
    warnings.warn(f"an environment failed: {describe(error)}; episode/errors counts it", stacklevel=2)
