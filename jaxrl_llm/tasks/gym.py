"""Games with the interface of gymnasium whose actions and observations are text."""

from __future__ import annotations

import importlib
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.protocol import Reply


class Gym:
    """Environment of a text game with the `reset` and `step` of gymnasium."""

    def __init__(self, *, make: str, stop: str, seed_column: str):
        """make: `my.module.function`, which returns a game; stop: string that ends an action, such as "\\n".

        seed_column: column of a row with the seed of its game. Raises: UserError, if the function does not exist.
        """
        module, _, name = make.rpartition(".")
        try:
            self._game = getattr(importlib.import_module(module), name)()
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"config.env.make = {make!r} must be my.module.function, which returns a game: {error}"
            ) from error
        self.stops, self._seed_column = (stop,), seed_column

    def reset(self, row: dict[str, Any]) -> None:
        """Starts the game with the row's seed. The first observation is dropped, so it must be a part of the prompt."""
        self._game.reset(seed=int(row[self._seed_column]))

    def step(self, text: str) -> Reply:
        """Plays one action, whose reward is that of the game."""
        action = text.partition(self.stops[0])[0].strip()
        observation, reward, terminated, truncated, _ = self._game.step(action)
        is_over, metrics = bool(terminated or truncated), {"cut": float(bool(truncated))}
        return Reply("" if is_over else str(observation), done=is_over, metrics=metrics, reward=float(reward))
