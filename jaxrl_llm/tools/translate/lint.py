"""Checks a translated config, and applies the rules of the doctor to it. Uses no device, and reads no data."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.errors import UserError
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.loggers import TRACKERS
from jaxrl_llm.recipe import advice
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
    missing: list[str]  # packages that the run needs, and that are not installed here


def load_text(text: str) -> Config:
    """Runs the text of a config, and returns what it makes."""
    # As a file, because a config is loaded as a module, and its errors name a path.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "translated_config.py"
        path.write_text(text, encoding="utf-8")
        return load(path)


def lint(config: Config, yours: set[str]) -> Linted:
    """Checks a config. Fields in `yours` have a stand-in meanwhile."""
    fields = flatten(config)
    pairs = "data.rejected_column" in fields  # of `sft`, whose rows are others, and have no mixture
    stand_ins = STAND_INS | (OF_PAIRS if pairs else {})
    mixture = [] if pairs else config.data.mixture.values()
    missing = _without_pyarrow([config.data, *([config.eval] if config.eval else []), *mixture])
    missing += _without_trackers(config.log)
    for name in yours & stand_ins.keys():
        section, field = name.split(".")
        if config[section] is not None:
            config[section][field] = stand_ins[name]
    if "data.mixture" in yours:
        config.data.mixture = {}
        config.data.source = STAND_INS["data.source"]
    # One stand-in has one weight, whatever number of functions the file has.
    if "reward.functions" in yours:
        config.reward.weights = (1.0,)
    # Locked, as `jaxrl train` gets it: a field that does not exist is an error.
    config.lock()
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


def _without_pyarrow(sections: list[Any]) -> list[str]:
    """Lets the checks pass Parquet files where pyarrow is not installed. Returns what reads them."""
    parquet = [section for section in sections if section.source.endswith(".parquet")]
    if not parquet or find_spec("pyarrow"):
        return []
    names = ", ".join(section.source for section in parquet)
    for section in parquet:
        # The check of a source asks for pyarrow. Rows are not read here, so another ending leaves all other checks as
        # they are.
        section.source = section.source.removesuffix(".parquet") + ".jsonl"
    return [f"train needs pyarrow for {names}, which is not installed here: pip install 'jaxrl_llm[parquet]'"]


def _without_trackers(log: Any) -> list[str]:
    """Lets the checks pass loggers whose package is not installed here. Returns what the run needs for them."""
    absent = [name for name in log.to if name in TRACKERS and not find_spec(name)]
    if absent:
        log.to = tuple(name for name in log.to if name not in absent)
        log.project = log.project if set(log.to) & set(TRACKERS) else ""
    return [f"train needs {name} for config.log.to, which is not installed here: pip install {name}" for name in absent]
