"""Reads the files of a run and judges it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm import doctor
from jaxrl_llm.config import checks
from jaxrl_llm.errors import UserError
from jaxrl_llm.health import logs, settings
from jaxrl_llm.health.finding import FEW, RECENT, SEVERITIES, Finding, Record
from jaxrl_llm.models import hf
from jaxrl_llm.structs import Config

FILES = ("config.json", logs.METRICS, "completions.jsonl", "health.jsonl")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Verdict(NamedTuple):
    """What a run's rules say of it, in a few words."""

    level: str  # "error", "warning", "healthy", or "early": too few steps
    words: str


class Settings(NamedTuple):
    """What follows from a config."""

    totals: checks.Totals | None  # None, if the config does not pass the checks of this version
    findings: list[Finding]
    problem: str = ""  # why something is missing


class Run(NamedTuple):
    """A run as its files tell it."""

    letter: str  # short name in plots
    name: str
    workdir: Path
    config: Config
    records: list[Record]
    spells: list[doctor.Spell]
    completions: list[dict[str, Any]]
    settings: Settings
    wrote: list[str]  # ids in health.jsonl that the rules of this version do not find

    @property
    def last(self) -> int:
        return self.records[-1]["step"]

    @property
    def verdict(self) -> Verdict:
        count = {severity: sum(s.finding.severity == severity for s in self.spells) for severity in SEVERITIES}
        told = [f"{n} {severity}{'s' * (n > 1)}" for severity, n in reversed(count.items()) if n]
        if count["error"] or count["warning"]:
            return Verdict("error" if count["error"] else "warning", ", ".join(told))
        if self.last <= FEW + RECENT:
            return Verdict("early", f"no finding yet; most rules need {FEW + RECENT + 1} steps")
        return Verdict("healthy", ", ".join(["healthy", *told]))

    def latest(self, metric: str) -> tuple[int, float] | None:
        """Returns the last finite value of a metric and its step."""
        for record in reversed(self.records):
            if record.get(metric) is not None:
                return record["step"], record[metric]
        return None


def read_all(workdirs: Sequence[Path]) -> list[Run]:
    """Reads runs. Raises: UserError, if a folder is no run or has no record yet."""
    if len(workdirs) > len(LETTERS):
        raise UserError(f"{len(workdirs)} runs are too many for a page: give {len(LETTERS)} or fewer")
    names = [workdir.resolve().name for workdir in workdirs]
    unique = len(set(names)) == len(names)
    return [
        read(workdir, letter, name if unique else str(workdir))
        for workdir, letter, name in zip(workdirs, LETTERS, names, strict=False)
    ]


def read(workdir: Path, letter: str, name: str) -> Run:
    """Reads a run, also while it goes on. Raises: UserError."""
    config = read_config(workdir)
    records = _lines(workdir / logs.METRICS)
    if not records:
        raise UserError(f"{workdir} has no record yet: wait for its first step")
    spells = doctor.judge(records, config.health.to_dict(), logs.found_before(workdir))
    found = {spell.finding.id for spell in spells}
    wrote = sorted({line["id"] for line in _lines(workdir / "health.jsonl")} - found)
    completions = _lines(workdir / "completions.jsonl")
    return Run(letter, name, workdir, config, records, spells, completions, of_config(config), wrote)


def read_config(workdir: Path) -> Config:
    """Reads the config of a run. Raises: UserError, if the folder has none."""
    try:
        config = ConfigDict(_tuples(json.loads((workdir / "config.json").read_text(encoding="utf-8"))))
        config.health.to_dict()
    except (OSError, ValueError, TypeError, AttributeError):
        raise UserError(f"{workdir} is no run (it has no config.json of one): give a run's --workdir") from None
    return config


def _tuples(value: Any) -> Any:
    """Returns a value of JSON with tuples for lists, as configs have them."""
    if isinstance(value, dict):
        return {name: _tuples(x) for name, x in value.items()}
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value


def _lines(file: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSON-lines file, without a last line that is being written. Raises: UserError."""
    if not file.is_file():
        return []
    try:
        return [json.loads(line) for line in logs.whole_lines(file)]
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): restore the file") from error


def of_config(config: Config) -> Settings:
    """Applies the checks and the rules over settings. Looks only at files of this machine."""
    try:
        totals = checks.check_train(config) if "loss" in config else checks.check_sft(config)
    except UserError as error:
        return Settings(None, [], f"The config does not pass the checks here: {error}")
    folder = Path(config.model.path)
    if not config.model.path or not (folder / "config.json").is_file():
        return Settings(totals, [], "The rules over settings need the model's folder, which is not here.")
    try:
        return Settings(totals, settings.findings(settings.Settings(config, totals, hf.load_model(folder).cfg)))
    except UserError as error:
        return Settings(totals, [], f"The rules over settings need the model: {error}")
