"""Games with the interface of gymnasium whose actions and observations are text."""

from __future__ import annotations

import importlib
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.protocol import Reply


class Gym:
    """Plays a game with `reset(seed=...)` and `step(action) -> observation, reward, terminated, truncated, info`."""

    def __init__(self, *, make: str, stop: str, seed_column: str):
        """make: `my.module.function`, which returns a game. stop: the string that ends an action, such as "\\n".

        seed_column: the column of a row with the seed of its game.
        Raises: UserError, if the function is not there.
        """
        module, _, name = make.rpartition(".")
        try:
            self._game = getattr(importlib.import_module(module), name)()
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"config.env.make = {make!r}: {error}; give my.module.function, which makes a game"
            ) from error
        self.stops, self._seed_column = (stop,), seed_column

    def reset(self, row: dict[str, Any]) -> None:
        """Begins the game of the row's seed. What the game says first belongs into the prompt."""
        self._game.reset(seed=int(row[self._seed_column]))

    def step(self, text: str) -> Reply:
        """Plays one action. Rewards of the game are summed up in the metric `reward`."""
        action = text.partition(self.stops[0])[0].strip()
        observation, reward, terminated, truncated, _ = self._game.step(action)
        metrics = {"reward": float(reward), "cut": float(bool(truncated))}
        ended = bool(terminated or truncated)
        return Reply("" if ended else str(observation), done=ended, metrics=metrics)
