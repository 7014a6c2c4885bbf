"""Games with the interface of gymnasium whose actions and observations are text."""

from __future__ import annotations

import importlib
from typing import Any

from jaxrl_llm.config.schema import AtLeastOne, Count, checked_by
from jaxrl_llm.errors import UserError, describe
from jaxrl_llm.tasks.protocol import Reply


@checked_by(lambda make, size, seed: _game(make, "gym.rows: make"))
def rows(*, make: str, size: AtLeastOne, seed: Count = 0) -> list[dict[str, Any]]:
    """Returns rows for `Gym` with the seed_column "seed": each asks with the first observation of the seed's game.

    make: `my.module.function`, which returns a game; size: number of rows; seed: seed of the first row's
    game, to which each next row adds 1.
    """
    game, made = _game(make, "gym.rows: make"), []
    for number in range(seed, seed + size):
        observation, _ = game.reset(seed=number)
        made.append({"prompt": [{"role": "user", "content": str(observation)}], "seed": number})
    return made


class Gym:
    """Environment of a text game with the `reset` and `step` of gymnasium."""

    def __init__(self, *, make: str, stop: str, seed_column: str):
        """make: `my.module.function`, which returns a game; stop: string that ends an action, such as "\\n".

        seed_column: column of a row with the seed of its game. Raises: UserError, if the function does not exist.
        """
        self._game = _game(make, "config.env.make")
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


def _game(make: str, field: str) -> Any:
    """Returns a new game. make: `my.module.function`, which makes it; field: place of this name, for errors."""
    module, _, name = make.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)()
    except Exception as error:  # the user's code
        problem = describe(error)
        raise UserError(f"{field} = {make!r} must be my.module.function, which returns a game: {problem}") from error
