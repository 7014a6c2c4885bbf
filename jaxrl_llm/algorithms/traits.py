"""Traits: what the checks of a config must know of a loss or an advantage estimator, declared where it is defined."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from jaxrl_llm.config.names import marked

F = TypeVar("F", bound=Callable[..., Any])


class Trait(Enum):
    """What holds of an advantage estimator or of a loss."""

    COMPARES_GROUP = "an estimator that compares the completions of a prompt: G >= 2"
    DIVIDES = "an estimator that divides by a deviation of its groups, unless its normalize is 'none'"
    VARIES_BY_TOKEN = "an estimator whose advantages differ within a completion"
    WITHOUT_RATIO = "a loss that is correct only for samples of the current policy"
    SEQUENCE_ADVANTAGE = "a loss that needs one advantage per completion"
    SEQUENCE_RATIO = "a loss with one importance ratio per completion"
    PAIRS = "a loss that compares a chosen with a rejected completion: G = 2"


def declares(*traits: Trait) -> Callable[[F], F]:
    """Returns a decorator that gives a function traits; also for functions of a user."""
    return marked(traits=traits)


def traits_of(function: Callable[..., Any]) -> tuple[Trait, ...]:
    """Returns the traits that a function declares."""
    return getattr(function, "traits", ())
