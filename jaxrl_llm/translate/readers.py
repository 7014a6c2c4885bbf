"""Reads a file of another trainer: finds out whose it is, and returns its keys and values."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxrl_llm.errors import UserError
from jaxrl_llm.translate import easyr1, search_r1, shell, trl, trl_ppo, verl
from jaxrl_llm.translate.outcome import System, Unread
from jaxrl_llm.translate.script import read_script

NAME = re.compile(r"[\w./@-]+")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# ${a.b}, ${.b} of the same section, ${oc.select:a.b,default}
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")
OF_SEARCH_R1 = re.compile(
    r"max_turns|do_search|(retriever|reranker)\..*|.*\.(n_agent|state_masking|no_think_rl)|"
    r"data\.(max_start_length|max_obs_length)"
)
SECTIONS = ("actor_rollout_ref", "worker", "algorithm", "trainer", "critic")
LAUNCHER = "accelerate."
LAUNCHERS = ("torch.distributed", "accelerate", "deepspeed")  # modules that start a script, whose name comes later


@dataclass(frozen=True)
class Source:
    """The keys of a file, and the trainer that they are for."""

    path: Path
    system: System
    keys: dict[str, Any]


def read(path: Path) -> Source:
    """Reads a file. Raises: UserError, if it cannot be read or is of none of the trainers."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a config or script of TRL, veRL, EasyR1 or Search-R1")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as text ({error}): give a config or a script") from None
    if path.suffix == ".py":
        kind, keys = read_script(path, text)
        return Source(path, trl.GRPO if kind == "grpo" else trl_ppo.PPO, keys)
    keys = _of_document(path, text) if path.suffix in (".json", ".yaml", ".yml") else _of_shell(path, text)
    # A key becomes a comment of the config, so it must be a name.
    if wrong := next((key for key in keys if not NAME.fullmatch(key)), ""):
        raise UserError(f"{path} has the key {wrong!r}, which is no name: is this a config?")
    return Source(path, detect(path, keys), keys)


def detect(path: Path, keys: dict[str, Any]) -> System:
    """Returns the trainer whose keys these are. Raises: UserError, if it is none."""
    if any(key.startswith("worker.") for key in keys):
        return easyr1.EASYR1
    if any(OF_SEARCH_R1.fullmatch(key) for key in keys):
        return search_r1.SEARCH_R1
    if any(key.startswith("actor_rollout_ref.") for key in keys):
        return verl.VERL
    best = max((trl.GRPO, trl_ppo.PPO), key=lambda system: _known(system, keys))
    if 2 * _known(best, keys) < max(len(keys), 1):
        some = ", ".join(list(keys)[:3])
        raise UserError(f"{path} is of none of TRL, veRL, EasyR1 and Search-R1: its keys are {some or 'none'} ...")
    return best


def _known(system: System, keys: dict[str, Any]) -> int:
    return sum(key in system.rules for key in keys)


def _of_document(path: Path, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no mapping of keys to values: give a config")
    if any(isinstance(document.get(section), dict) for section in SECTIONS):
        return _resolved(_flat(document))
    return {str(key): _number(value) for key, value in document.items()}


def _of_shell(path: Path, text: str) -> dict[str, Any]:
    try:
        found = [keys for words in shell.commands(text) if (keys := _of_command(path, words))]
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not found:
        raise UserError(f"{path} has no training command of TRL, veRL, EasyR1 or Search-R1: give a script that has one")
    if len(found) > 1:
        raise UserError(f"{path} has {len(found)} training commands: keep one in the file")
    return found[0]


def _of_command(path: Path, words: list[str]) -> dict[str, Any]:
    """Returns the keys of a command; empty, if it starts no training."""
    start = next((i for i in range(len(words)) if _starts(words, i)), None)
    if start is None:
        return {}
    inside = words[start + 1 :]
    hydra = shell.overrides(inside)
    if any(key.split(".")[0] in SECTIONS for key in hydra):
        keys = {key: shell.value_of(value, _scalar) for key, value in hydra.items()}
        return _resolved(_with_file(path, keys))
    keys = {key: shell.value_of(value, _scalar) for key, value in shell.flags(inside).items()}
    denied = {key for key in keys if key.removeprefix("no_") in trl.GRPO.rules and key not in trl.GRPO.rules}
    keys = {key.removeprefix("no_") if key in denied else key: key not in denied and x for key, x in keys.items()}
    launcher = shell.flags(words[:start])
    if "num_processes" in launcher:
        keys[f"{LAUNCHER}num_processes"] = shell.value_of(launcher["num_processes"], _scalar)
    keys = _with_file(path, keys)
    return keys if any(key in trl.GRPO.rules or key in trl_ppo.PPO.rules for key in keys) else {}


def _starts(words: list[str], i: int) -> bool:
    """Whether the arguments of a training begin after word i. What is after it may hold names of files too."""
    after = words[i + 1] if i + 1 < len(words) else ""
    if words[i] == "trl":
        return after in ("grpo", "ppo")
    if words[i] == "-m":
        return not after.startswith(LAUNCHERS)
    return re.fullmatch(r"[^=]*\.py", words[i]) is not None


def _with_file(path: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Adds the keys of the file that `config` names, if it is there: beside the script, or from a folder above it."""
    if not isinstance(keys.get("config"), str):
        return keys
    name = str(keys["config"])
    for folder in (Path(), *path.resolve().parents):
        if (folder / name).is_file():
            base = _of_document(folder / name, (folder / name).read_text(encoding="utf-8"))
            return base | {key: value for key, value in keys.items() if key != "config"}
    return keys


def _flat(document: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _number(value)
    return flat


def _resolved(keys: dict[str, Any]) -> dict[str, Any]:
    """Replaces references to other keys by their values. A reference that leads nowhere makes a value `Unread`."""

    def referred(key: str, match: re.Match[str], depth: int) -> Any:
        name, default = match.groups()
        name = f"{key.rpartition('.')[0]}{name}" if name.startswith(".") else name
        if name in keys and depth:
            return resolve(name, keys[name], depth - 1)
        return Unread(match[0]) if default is None else _scalar(default.strip())

    def resolve(key: str, value: Any, depth: int) -> Any:
        if not isinstance(value, str) or isinstance(value, Unread):
            return value
        while match := REFERENCE.search(value):
            found = referred(key, match, depth)
            if match[0] == value or isinstance(found, Unread):
                return found
            value = value.replace(match[0], "null" if found is None else str(found))
        return value

    return {key: resolve(key, value, 5) for key, value in keys.items()}


def _scalar(text: str) -> Any:
    """Parses a value of a command line, as Hydra and argparse do. "[a, b]" and "{a: 1}" are values too."""
    try:
        return _number(yaml.safe_load(text)) if text else ""
    except yaml.YAMLError:
        return text


def _number(value: Any) -> Any:
    """Makes 1e-6 a number, also inside lists and mappings: YAML takes it for text."""
    if isinstance(value, str) and not isinstance(value, Unread) and NUMBER.fullmatch(value):
        return float(value)
    if isinstance(value, list):
        return [_number(one) for one in value]
    if isinstance(value, dict):
        return {key: _number(one) for key, one in value.items()}
    return value
