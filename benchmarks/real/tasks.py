"""Tasks of the real models: sources of rows and rewards, which TRL's process also uses. Imports no JAX."""

from __future__ import annotations

import random
from typing import Any

from jaxrl_llm.tasks import text_of

BELOW, HELD_OUT = 50, 256
# It shows the form of an answer and its end, so that few steps teach them, and it has few tokens (docs/LOG.md).
EXAMPLE = "2 + 2 = 4<|im_end|>\n"
GEMMA_EXAMPLE = "<bos>2 + 2 = 4<eos>\n"
TARGET, NEAR = 20, 5  # characters
# Of the posts.
RELATIVES = ("sister", "brother", "mother", "father", "cousin", "aunt", "uncle", "neighbour", "boss", "flatmate")
WANTS = (
    "borrow my car for a week", "move into my flat", "lend the dog to a stranger", "sell the piano", "cancel the trip",
    "paint the kitchen black", "start a band", "keep bees on the balcony", "cook for forty people", "quit a good job",
)  # fmt: skip
REASONS = (
    "I said no at first, and now nobody talks to me.",
    "I do not mind, but last time it ended badly.",
    "We agreed on something else in March.",
    "I only heard of it from a friend.",
    "It would cost me more than I have.",
)


def _sums(example: str, below: int = BELOW) -> list[dict[str, Any]]:
    """Returns all sums of two numbers below a bound, in an order that is always the same."""
    pairs = [(a, b) for a in range(below) for b in range(below)]
    random.Random(0).shuffle(pairs)
    return [{"prompt": f"{example}{a} + {b} =", "answer": str(a + b)} for a, b in pairs]


def addition() -> list[dict[str, Any]]:
    """Returns the sums to learn from."""
    return _sums(EXAMPLE)[HELD_OUT:]


def addition_held_out() -> list[dict[str, Any]]:
    """Returns 256 other sums."""
    return _sums(EXAMPLE)[:HELD_OUT]


def small_sums() -> list[dict[str, Any]]:
    """Returns the 100 sums of two numbers below 10."""
    return _sums(EXAMPLE, below=10)


def addition_demonstrations() -> list[dict[str, Any]]:
    """Returns the sums to learn from, each with what is to be said."""
    return [row | {"completion": f" {row['answer']}"} for row in addition()]


def gemma_addition() -> list[dict[str, Any]]:
    """Returns the same sums with the tokens of Gemma."""
    return _sums(GEMMA_EXAMPLE)[HELD_OUT:]


def gemma_addition_held_out() -> list[dict[str, Any]]:
    """Returns the same 256 others."""
    return _sums(GEMMA_EXAMPLE)[:HELD_OUT]


def exact(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where a completion is the answer and nothing else."""
    return [float(text_of(text).strip() == right) for text, right in zip(completions, answer, strict=True)]


def _posts() -> list[dict[str, Any]]:
    """Returns posts in the form of the data set TL;DR, whose text no hub is asked for here."""
    parts = [(who, what, why) for who in RELATIVES for what in WANTS for why in REASONS]
    random.Random(0).shuffle(parts)
    form = "SUBREDDIT: r/relationships\n\nTITLE: My {} wants to {}\n\nPOST: {} What should I do?\n\nTL;DR:"
    return [{"prompt": form.format(*each)} for each in parts]


def posts() -> list[dict[str, Any]]:
    """Returns the posts to learn from."""
    return _posts()[HELD_OUT:]


def posts_held_out() -> list[dict[str, Any]]:
    """Returns 256 other posts."""
    return _posts()[:HELD_OUT]


def length(completions: list[Any], **columns: Any) -> list[float]:
    """The negative distance of the length from 20 characters: the reward of TRL's example."""
    return [-float(abs(TARGET - len(text_of(completion)))) for completion in completions]


def is_near(completions: list[Any], **columns: Any) -> list[float]:
    """1 where the length is 15 to 25 characters."""
    return [float(value >= -NEAR) for value in length(completions)]
