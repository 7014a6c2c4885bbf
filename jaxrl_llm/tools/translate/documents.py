"""Reads YAML and JSON of other trainers, with the files that they name and the keys that they refer to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate.outcome import Unread

SECTIONS = ("actor_rollout_ref", "worker", "algorithm", "trainer", "critic")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
# ${a.b}, ${.b} of the same section, ${oc.select:a.b,default}, ${oc.env:NAME,default}
REFERENCE = re.compile(r"\$\{(oc\.select:|oc\.env:)?([\w.]+)(?:,([^{}]*))?\}")
FOLDERS = ("", "config/", "configs/", "conf/")  # beside a script, for --config-name without a path
# Files of veRL itself: the tables have their keys as defaults.
VERL_FILES = re.compile(r"/?(ppo_trainer|ppo_megatron_trainer|_generated_ppo_\w+|default|hydra/.*)")
VERL_GROUPS = re.compile(
    r"/?(actor|critic|data|ref|rollout|model|reward|reward_model|reward_manager|algorithm|engine|optim|profiler|"
    r"npu_profile|model_engine|distillation|transfer_queue)(/.*)?"
)
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)  # in a file of Hydra: the section that its keys are for


@dataclass
class DocumentKeys:
    """The keys of a document or command, and what is to be said of them.

    lost: lines that have no effect there; notes: values that are not written there; referred: keys that others name;
    program: "rloo", if the name of the program that a command starts says so.
    """

    values: dict[str, Any]
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    referred: set[str] = field(default_factory=set)
    program: str = ""


class Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, which YAML takes for text."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("+-.0123456789"))


def parse(path: Path, text: str) -> dict[Any, Any]:
    """Returns the mapping of a document. Raises: UserError, if it holds none."""
    try:
        document = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no mapping of keys to values: give a config")
    return document


def read_document(path: Path, text: str) -> DocumentKeys:
    """Returns the keys of a document: a.b of sections, or those of one level."""
    document = parse(path, text)
    if "defaults" in document or any(isinstance(document.get(section), dict) for section in SECTIONS):
        return DocumentKeys(composed(path, document))
    return DocumentKeys({str(key): value for key, value in document.items()})


def composed(path: Path, document: dict[Any, Any], roots: Sequence[Path] = ()) -> dict[str, Any]:
    """Returns the keys of a document of Hydra: those of the files in its list `defaults`, then its own.

    roots: folders of groups. The key "defaults" is the list of the files that are not there.
    """
    document_keys = with_tools(path, flat({key: value for key, value in document.items() if key != "defaults"}), {})
    if not isinstance(document.get("defaults"), list):
        return document_keys
    searched = re.findall(r"(?:file|pkg)://([^\s'\",\]]+)", str(document_keys.get("hydra.searchpath")))
    roots = roots or [path.parent, *(folder / place for place in searched for folder in path.resolve().parents)]
    # Hydra joins the files in the order of the list. Later ones win, and the document itself is where _self_ stands, or
    # last.
    keys: dict[str, Any] = {}
    missing = []
    for entry in [*document["defaults"], *(() if "_self_" in document["defaults"] else ("_self_",))]:
        keys |= document_keys if entry == "_self_" else {}
        for name, section, is_optional in _named(entry) if entry != "_self_" else ():
            files = (folder / f"{name.lstrip('/')}.yaml" for folder in (path.parent, *roots))
            if file := next((file for file in files if file.is_file()), None):
                text = file.read_text(encoding="utf-8")
                header = PACKAGE.search(text)
                before = _section(section or (header[1] if header else ""), name)
                inside = composed(file, parse(file, text), roots)
                missing += inside.pop("defaults", [])
                keys |= {f"{before}{key}": value for key, value in inside.items()}
            # Files of veRL itself are no loss: their keys are the defaults of its table.
            elif not is_optional and not VERL_FILES.fullmatch(name) and not VERL_GROUPS.fullmatch(name):
                missing.append(name)
    return keys | {"defaults": missing}


def _named(entry: Any) -> list[tuple[str, str, bool]]:
    """Returns the files of an entry of `defaults`, the section of their keys ("": none), and if they may be absent.

    entry: "group/file@section", or {"group@section": file}, where `null` takes a file out of the list.
    """
    group, options = next(iter(entry.items()), ("", "")) if isinstance(entry, dict) else (entry, "")
    words = str(group).split() or [""]
    group, _, section = words[-1].partition("@")
    names = [f"{group}/{x}" for x in (options if isinstance(options, list) else [options]) if x not in (None, "null")]
    return [(name.rstrip("/").removesuffix(".yaml"), section, "optional" in words[:-1]) for name in names]


def _section(section: str, name: str) -> str:
    """Returns the prefix of a file's keys, which its section or its folder gives."""
    folder = name.strip("/").rpartition("/")[0].replace("/", ".")
    section = {"_global_": "", "_here_": "", "_group_": folder, "": folder}.get(section, section)
    return section.removeprefix("_global_.") + "." * bool(section)


def with_tools(path: Path, keys: dict[str, Any], written: Mapping[str, str]) -> dict[str, Any]:
    """Adds the names of the functions in a file of tools of veRL, if it is there."""
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    name = keys.get(key)
    file = beside(path, name, written) if isinstance(name, str) and not isinstance(name, Unread) else None
    if not file:
        return keys
    listed = parse(*file).get("tools") or []
    names = [
        tool["tool_schema"]["function"]["name"] for tool in listed if isinstance(tool, dict) and "tool_schema" in tool
    ]
    return keys | {f"{key}.names": names}


def with_files(path: Path, keys: dict[str, Any], written: Mapping[str, str]) -> DocumentKeys:
    """Adds the keys of the file that a command names, if it is there. written: files that the script writes itself."""
    keys = with_tools(path, keys, written)
    name, folder = keys.get("--config-name"), keys.get("--config-path", keys.get("--config-dir"))
    names = [keys.get("config")]
    if isinstance(name, str) and not VERL_FILES.fullmatch(name.removesuffix(".yaml")):
        folders = [f"{folder}/", *FOLDERS] if isinstance(folder, str) and not isinstance(folder, Unread) else FOLDERS
        names += [f"{place}{name.removesuffix('.yaml')}.yaml" for place in folders if not isinstance(name, Unread)]
    for name in names:
        if isinstance(name, str) and not isinstance(name, Unread) and (file := beside(path, name, written)):
            base = read_document(*file)
            others = {key: x for key, x in keys.items() if key not in ("config", "--config-name", "--config-path")}
            return DocumentKeys(base.values | others, base.lost)
    return DocumentKeys(keys)


def beside(path: Path, name: str, written: Mapping[str, str]) -> tuple[Path, str] | None:
    """Returns a file that a script names, and its text: written by the script, or beside it, or in a folder above."""
    # What the script writes first: a file of this name beside it may be of another run.
    for other, text in written.items():
        if Path(other).name == Path(name).name:
            return Path(name), text
    for folder in (*path.resolve().parents, Path()):
        if (folder / name).is_file():
            return folder / name, (folder / name).read_text(encoding="utf-8", errors="replace")
    return None


def flat(document: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"a.b": 1} for {"a": {"b": 1}}."""
    flattened: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and value:
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value
    return flattened


def resolved(keys: DocumentKeys) -> DocumentKeys:
    """Replaces references to other keys by their values. A reference that leads nowhere makes a value `Unread`."""
    referred, notes = set[str](), dict.fromkeys(keys.notes)

    def referred_value(key: str, match: re.Match[str], depth: int) -> Any:
        how, name, default = match.groups()
        name = f"{key.rpartition('.')[0]}{name}" if name.startswith(".") else name
        if how == "oc.env:" and default is not None:
            # A variable of the environment may be set where the run is started, and then the default is not its value.
            notes[f"{key}: {match[0]} is its default here, {default.strip()}"] = None
        elif how != "oc.env:" and name in keys.values and depth:
            referred.add(name)
            return resolve(name, keys.values[name], depth - 1)
        return Unread(match[0]) if default is None else scalar(default.strip())

    def resolve(key: str, value: Any, depth: int) -> Any:
        if isinstance(value, list):
            elements = [resolve(key, element, depth) for element in value]
            # A list with an element that is not known is as a whole not known: a rule reads all of it.
            unread = any(isinstance(element, Unread) for element in elements)
            return Unread(", ".join(map(str, elements))) if unread else elements
        if not isinstance(value, str) or isinstance(value, Unread):
            return value
        while match := REFERENCE.search(value):
            other = referred_value(key, match, depth)
            # A value that is one reference keeps its type: a number stays a number.
            if match[0] == value or isinstance(other, Unread):
                return other
            value = value.replace(match[0], "null" if other is None else str(other))
        # OmegaConf's ??? is a value that the command line must give.
        return Unread(value) if value == "???" or re.search(r"\$\{[\w.]+[:}]", value) else value

    # The depth ends a circle of keys that name each other.
    values = {key: resolve(key, value, 5) for key, value in keys.values.items()}
    return replace(keys, values=values, notes=list(notes), referred=referred)


def scalar(text: str) -> Any:
    """Parses a value of a command line, as Hydra and argparse do. "[a, b]" and "{a: 1}" are values too."""
    try:
        return yaml.load(text, Loader) if text else ""
    except yaml.YAMLError:
        return text
