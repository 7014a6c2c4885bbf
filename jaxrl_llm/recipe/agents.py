"""Checks what does not go together with agents that own their loop."""

from __future__ import annotations

import shlex

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras
from jaxrl_llm.recipe.missing import tried
from jaxrl_llm.recipe.recipe import Recipe
from jaxrl_llm.recipe.trees import check_trees
from jaxrl_llm.rollout.agents.pool import agent_function
from jaxrl_llm.tasks.agents import Command, Function


def check_agents(recipe: Recipe) -> None:
    """Raises: UserError, naming the field that does not fit the agents of a run."""
    if not recipe.agents or not recipe.env:
        return
    name = recipe.env.name
    if recipe.engine.name != "jax":
        raise UserError(
            f"config.engine.name = {recipe.engine.name!r}: {name} calls the in-JAX engine: set engine.name to 'jax'"
        )
    check_trees(recipe)
    if rounds := recipe.rollout.resample_rounds:
        raise UserError(
            f"config.rollout.resample_rounds = {rounds}: groups are replaced with their prompts in the data, but the "
            f"agents of {name} write prompts of their own: set resample_rounds to 0"
        )
    if recipe.log.keep_samples:
        raise UserError(
            f"config.log.keep_samples = {recipe.log.keep_samples}: the files name prompts of the data, but the agents "
            f"of {name} write prompts of their own: set keep_samples to 0"
        )
    with tried():
        for package in ("fastapi", "uvicorn"):
            extras.require(package, "serve", f"config.env.name = {name!r}")
        if isinstance(recipe.agents, Function):
            agent_function(recipe.agents.agent)
    if isinstance(recipe.agents, Command):
        check_command(recipe.agents.command)


def check_command(command: str) -> None:
    """Raises: UserError, if a command has no program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"config.env.command = {command!r}: {error}: close the quotation") from None
    if not words:
        raise UserError("config.env.command = '' must be the command of an agent, such as 'python my_agent.py'")
