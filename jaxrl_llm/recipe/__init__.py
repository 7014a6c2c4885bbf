"""Recipes: `read` turns a config into a checked record of what the run does, without devices, data and weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from jaxrl_llm.config import records
from jaxrl_llm.config.load import flatten, with_names
from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe import checks
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.structs import Config

R = TypeVar("R", Recipe, SftRecipe)
LEARNING = {"train": "reinforcement learning", "sft": "supervised fine-tuning"}  # method of each program, for errors


def read(config: Config) -> Recipe:
    """Returns the recipe of a `train` config. Raises: UserError, naming the wrong field."""
    recipe, fields = _read_record(Recipe, with_names(config).to_dict())
    checks.check_train(recipe, fields)
    return recipe


def read_sft(config: Config) -> SftRecipe:
    """Returns the recipe of an `sft` config. Raises: UserError, naming the wrong field."""
    recipe, fields = _read_record(SftRecipe, with_names(config).to_dict())
    checks.check_sft(recipe, fields)
    return recipe


def read_either(config: Config) -> Recipe | SftRecipe:
    """Returns the recipe of a `train` or an `sft` config, for tools. Raises: UserError, naming the wrong field."""
    return read_sft(config) if _program(flatten(config)) == "sft" else read(config)


def _read_record(kind: type[R], values: dict[str, Any]) -> tuple[R, dict[str, Any]]:
    """Returns a config as a record of this kind, and the values of its fields by their paths, with the defaults."""
    values = records.present(kind, values)
    table, fields = records.table(kind, values), flatten(values)
    program = _program(fields)
    if program not in ("", kind.program):
        raise UserError(
            f"this config is for {LEARNING[program]}: run it with jaxrl {program} (in a script, {program}.steps)"
        )
    records.check_fields(table, values, fields)
    return records.read(kind, values), table.defaults | fields


def _program(fields: Collection[str]) -> str:
    """Returns the program that a config with these fields is for; "" if the fields do not tell."""
    if "data.completion_column" in fields:
        return "sft"
    return "train" if "loss.name" in fields else ""
