"""Checks what does not go together with agents that own their loop."""

from __future__ import annotations

import shlex

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras
from jaxrl_llm.recipe.missing import tried
from jaxrl_llm.recipe.recipe import Recipe
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
    for field in ("partial", "resample_rounds"):
        if value := getattr(recipe.rollout, field):
            raise UserError(
                f"config.rollout.{field} = {value}: {name} ends all episodes of a step in this step: set {field} to 0"
            )
    if recipe.critic:
        raise UserError(
            f"config.critic: returns follow one chain of tokens, but an episode of {name} may have branches: remove "
            "the section, and choose an advantage without a critic"
        )
    if recipe.log.keep_samples:
        raise UserError(
            f"config.log.keep_samples = {recipe.log.keep_samples}: the files hold no trees, which {name} samples: set "
            "keep_samples to 0"
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
