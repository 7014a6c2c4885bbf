"""Checks a translated config as `jaxrl train` does, with the doctor's rules, but uses no device and reads no data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.errors import UserError, printable
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.recipe import advice
from jaxrl_llm.recipe.missing import collected
from jaxrl_llm.structs import Config, Sizes
from jaxrl_llm.tools.translate.table import read_names


class LintResult(NamedTuple):
    """What the checks of the config and the doctor's rules say."""

    sizes: Sizes | None
    refused: str  # first problem of the checks; "" if they pass
    findings: list[Finding]
    blind: dict[str, str]  # {rule that could not be applied: reason}
    missing: list[str]  # packages and files that the run needs and this machine does not have


def check(text: str, tasks: Mapping[str, str], subject: str) -> bool:
    """Checks the text of a translated config, prints the result, and returns whether the checks pass.

    tasks: {field that the user must complete: task}; subject: beginning of the line about the checks.
    """
    linted = lint(load_text(text), set(tasks))
    if linted.sizes:
        print(printable(f"{subject}pass{', with stand-ins for what is yours to set' * bool(tasks)}"))
        advice.print_config(linted.sizes, linted.findings, linted.blind)
    else:
        print(printable(f"{subject}refuse the config: {linted.refused}"))
    for line in linted.missing:
        print(printable(f"not on this machine, so not checked: {line}"))
    return not linted.refused


def load_text(text: str) -> Config:
    """Runs the text of a translated config, and returns the config that it makes."""
    # The text is written to a file, because a config is loaded as a module, and its errors name a path.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "translated_config.py"
        path.write_text(text, encoding="utf-8")
        return load(path)


def lint(config: Config, tasks: set[str]) -> LintResult:
    """Checks a translated config. tasks: fields that the user must complete, which get stand-ins during the checks."""
    fields = flatten(config)
    has_pairs = "data.rejected_column" in fields
    stand_ins = read_names("stand_ins") | (read_names("pair_stand_ins") if has_pairs else {})
    for name in tasks & stand_ins.keys():
        section, field = name.split(".")
        if config[section] is not None:
            value = stand_ins[name]
            config[section][field] = tuple(value) if isinstance(value, list) else value
    # The stand-in is one function, so the section has one weight.
    if "reward.functions" in tasks:
        config.reward.weights = (1.0,)
    # The config is locked as in `jaxrl train`, so that an unknown field is an error.
    config.lock()
    # A package that is not installed is collected, because a translation does not depend on it.
    with collected() as missing:
        try:
            recipe = recipes.read_either(config)
        except UserError as error:
            return LintResult(None, str(error), [], {}, missing)
    try:
        width, wrong = None if "model.path" in tasks else advice.width_of(recipe), {}
    except UserError as error:
        width, wrong = None, {"learning_rate": str(error)}
    judged = advice.RunSettings(recipe, width)
    # What is wrong with a stand-in is not wrong with the value that the user will set.
    findings = [x for x in advice.findings(judged) if x.evidence.split(" ")[0] not in tasks & stand_ins.keys()]
    return LintResult(recipe.sizes, "", findings, advice.blind(judged) | wrong, missing)
