"""Traits of losses and advantage estimators, which the checks of a config read; declared beside each function."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from jaxrl_llm.config.names import marked

F = TypeVar("F", bound=Callable[..., Any])


class Trait(Enum):
    """A property of an advantage estimator or of a loss."""

    COMPARES_GROUP = "an estimator that compares the completions of a prompt: G >= 2"
    DIVIDES = "an estimator that divides by a deviation of its groups, unless its normalize is 'none'"
    # A completion is a chain if its tokens follow one another; the completion of an agent may be a tree instead.
    NEEDS_CHAINS = "an estimator that passes rewards back to the token before, which must be the one that it follows"
    VARIES_BY_TOKEN = "an estimator whose advantages differ within a completion"
    WITHOUT_RATIO = "a loss that is correct only for samples of the current policy"
    SEQUENCE_ADVANTAGE = "a loss that needs one advantage per completion"
    SEQUENCE_RATIO = "a loss with one importance ratio per completion"
    PAIRS = "a loss that compares a chosen with a rejected completion: G = 2"


def declares(*traits: Trait) -> Callable[[F], F]:
    """Returns a decorator that declares the traits of a loss or an estimator, also of a user's function."""
    return marked(traits=traits)


def traits_of(function: Callable[..., Any]) -> tuple[Trait, ...]:
    """Returns the traits that a function declares."""
    return getattr(function, "traits", ())
