"""Checks a translated config, and applies the rules of the doctor to it. Uses no device, and reads no data."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.errors import UserError
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.recipe import advice
from jaxrl_llm.recipe.missing import collected
from jaxrl_llm.structs import Config, Sizes
from jaxrl_llm.tools.translate import ours

STAND_INS = {  # for what the user must complete, so that all the rest is checked
    "data.source": "arithmetic.train",
    "eval.source": "arithmetic.held_out",
    "data.convert": "",
    "eval.convert": "",
    "reward.functions": (ours.STAND_IN,),
    "reward.weights": (1.0,),
    "eval.function": ours.STAND_IN,
    "data.format_prompt": "",
    "env.functions": ("tools.calculate",),
}
OF_PAIRS = {"data.source": "arithmetic.pairs", "eval.source": "arithmetic.pairs"}


class Linted(NamedTuple):
    """What the checks and the rules say."""

    sizes: Sizes | None
    refused: str  # the first problem of the checks; "": none
    findings: list[Finding]
    blind: dict[str, str]  # {rule that could not look: why}
    missing: list[str]  # what the run needs and this machine does not have


def load_text(text: str) -> Config:
    """Runs the text of a config, and returns what it makes."""
    # The text is written to a file, because a config is loaded as a module, and its errors name a path.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "translated_config.py"
        path.write_text(text, encoding="utf-8")
        return load(path)


def lint(config: Config, yours: set[str]) -> Linted:
    """Checks a config. Fields in `yours` have a stand-in meanwhile."""
    fields = flatten(config)
    pairs = "data.rejected_column" in fields  # of `sft`, whose rows are others, and have no mixture
    stand_ins = STAND_INS | (OF_PAIRS if pairs else {})
    for name in yours & stand_ins.keys():
        section, field = name.split(".")
        if config[section] is not None:
            config[section][field] = stand_ins[name]
    # One stand-in has one weight, whatever number of functions the file has.
    if "reward.functions" in yours:
        config.reward.weights = (1.0,)
    # Locked, as `jaxrl train` gets it: a field that does not exist is an error.
    config.lock()
    # A package that is not installed here changes nothing of a translation.
    with collected() as missing:
        try:
            recipe = recipes.read_either(config)
        except UserError as error:
            return Linted(None, str(error), [], {}, missing)
    try:
        width, wrong = None if "model.path" in yours else advice.width_of(recipe), {}
    except UserError as error:
        width, wrong = None, {"learning_rate": str(error)}
    judged = advice.RunSettings(recipe, width)
    return Linted(recipe.sizes, "", advice.findings(judged), advice.blind(judged) | wrong, missing)
