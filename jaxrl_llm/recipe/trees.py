"""Checks of a run whose completions are trees, because its agents own their loops."""

from __future__ import annotations

from jaxrl_llm.algorithms.traits import Trait, traits_of
from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe.recipe import Recipe


def check_trees(recipe: Recipe) -> None:
    """Checks that no setting needs completions whose tokens all follow each other."""
    advantage = recipe.advantage
    reason = "the calls of an agent form a tree, in which several tokens may follow a token"
    if Trait.NEEDS_CHAINS in traits_of(advantage.function):
        raise UserError(
            f"config.advantage.name = {advantage.name!r} passes rewards back from the next token of a completion, but "
            f"{reason}: choose an advantage with one number per completion, such as 'grpo'"
        )
    if recipe.critic:
        raise UserError(
            f"config.critic learns returns that are passed back from the next token of a completion, but {reason}: "
            "remove the section"
        )
    if recipe.reward_model:
        raise UserError(
            f"config.reward_model scores the text up to the last token of a completion, but {reason}, so this text is "
            "only one of several: remove the section"
        )
    if recipe.rollout.partial:
        raise UserError(
            f"config.rollout.partial = {recipe.rollout.partial} continues a completion after its last token, but "
            f"{reason}: set partial = 0"
        )
