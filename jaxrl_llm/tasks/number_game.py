"""A game of several turns: guess a number. The policy writes `<guess>37</guess>`, and reads higher or lower."""

from __future__ import annotations

import re
from typing import Any

from jaxrl_llm.config.schema import AtLeastOne
from jaxrl_llm.tasks.protocol import Reply

GUESS = re.compile(r"<guess>\s*(-?\d+)\s*</guess>")


class NumberGame:
    """Environment that compares guesses with the number in the row's column `answer`."""

    stops = ("</guess>",)

    def __init__(self, *, most_guesses: AtLeastOne):
        """most_guesses: number of guesses after which the episode ends."""
        self._max_guesses, self._guesses, self._number = most_guesses, 0, 0

    def reset(self, row: dict[str, Any]) -> None:
        """Reads the number to guess from the row."""
        self._number = int(row["answer"])

    def step(self, text: str) -> Reply:
        """Returns whether the number is higher or lower than the last guess of the turn."""
        guesses = GUESS.findall(text)
        if not guesses:
            return Reply("\nWrite <guess>a number</guess>.\n", metrics={"invalid": 1.0})
        guess, self._guesses = int(guesses[-1]), self._guesses + 1
        if guess == self._number:
            return Reply(done=True, metrics={"guesses": 1.0}, reward=1.0)
        if self._guesses >= self._max_guesses:
            return Reply(done=True, metrics={"guesses": 1.0})
        return Reply("\nhigher\n" if guess < self._number else "\nlower\n", metrics={"guesses": 1.0})
