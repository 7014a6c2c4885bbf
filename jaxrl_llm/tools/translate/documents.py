"""Reads configs of other trainers in YAML or JSON, with the files that they include and the keys they refer to.

veRL, EasyR1 and Search-R1 use Hydra or OmegaConf: a file includes other files, and a value may refer to another key.
TRL has plain files. Each function returns the keys that the rules of a trainer translate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate.outcome import Unread

# First words of the keys of veRL, EasyR1 and Search-R1.
SECTIONS = ("actor_rollout_ref", "worker", "algorithm", "trainer", "critic")
# A number, also in the form 1e-6.
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
# A reference is ${a.b}, ${.b} of the same section, ${oc.select:a.b,default} or ${oc.env:NAME,default}.
REFERENCE = re.compile(r"\$\{(oc\.select:|oc\.env:)?([\w.]+)(?:,([^{}]*))?\}")
# Folders beside a script in which --config-name without a path is looked for.
FOLDERS = ("", "config/", "configs/", "conf/")
# Names of veRL's own files, whose keys are the defaults of the tables.
VERL_FILES = re.compile(r"/?(ppo_trainer|ppo_megatron_trainer|_generated_ppo_\w+|default|hydra/.*)")
VERL_GROUPS = re.compile(
    r"/?(actor|critic|data|ref|rollout|model|reward|reward_model|reward_manager|algorithm|engine|optim|profiler|"
    r"npu_profile|model_engine|distillation|transfer_queue)(/.*)?"
)
# A file of Hydra names the section of its keys in this comment.
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


@dataclass
class DocumentKeys:
    """The keys of a config file, or of a training command, with their values.

    lost: lines that belong to no key.
    notes: sentences about values that the file does not say itself.
    referred: keys to which other keys refer, such as `lr` if the file has the value ${lr} too.
    program: kind of TRL's trainer that the program or its name says, such as "dpo" of dpo.py; "" if none.
    program_text: text of the program; "" if it is not read.
    """

    keys: dict[str, Any]
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    referred: frozenset[str] = frozenset()
    program: str = ""
    program_text: str = ""


class Loader(yaml.SafeLoader):
    """Loads YAML as the other trainers do: 1e-6 is a number, which plain YAML takes for text."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("+-.0123456789"))


def parse(path: Path, text: str) -> dict[Any, Any]:
    """Returns the mapping of a YAML or JSON document. Raises: UserError, if the document is no mapping."""
    try:
        document = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} has no mapping of keys to values: name a config of another trainer")
    return document


def read_document(path: Path, text: str) -> DocumentKeys:
    """Returns the keys of a config file. A key b in a section a is called a.b."""
    document = parse(path, text)
    if "defaults" in document or any(isinstance(document.get(section), dict) for section in SECTIONS):
        return DocumentKeys(compose_defaults(path, document))
    return DocumentKeys({str(key): value for key, value in document.items()})


def compose_defaults(path: Path, document: dict[Any, Any], roots: Sequence[Path] = ()) -> dict[str, Any]:
    """Returns the keys of a document of Hydra: keys of the files in its list `defaults`, then its own keys.

    roots: folders of Hydra's groups. In the result, the key "defaults" lists the files that were not found instead.
    """
    own_sections = {key: value for key, value in document.items() if key != "defaults"}
    document_keys = with_tool_names(path, flatten_sections(own_sections), {})
    if not isinstance(document.get("defaults"), list):
        return document_keys
    searched_folders = re.findall(r"(?:file|pkg)://([^\s'\",\]]+)", str(document_keys.get("hydra.searchpath")))
    search_paths = (parent / folder for folder in searched_folders for parent in path.resolve().parents)
    roots = roots or [path.parent, *search_paths]
    # Hydra joins the files in the order of the list, and a later file wins. _self_ is the document itself, which comes
    # last if it is not listed.
    keys: dict[str, Any] = {}
    missing_files = []
    entries = document["defaults"]
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            keys |= document_keys
            continue
        for name, section, is_optional in _included_files(entry):
            files = (folder / f"{name.lstrip('/')}.yaml" for folder in (path.parent, *roots))
            if file := next((file for file in files if file.is_file()), None):
                text = file.read_text(encoding="utf-8")
                header = PACKAGE.search(text)
                prefix = _key_prefix(section or (header[1] if header else ""), name)
                file_keys = compose_defaults(file, parse(file, text), roots)
                missing_files += file_keys.pop("defaults", [])
                keys |= {f"{prefix}{key}": value for key, value in file_keys.items()}
            # A missing file of veRL itself loses nothing, because verl.py has its keys as the defaults of the table.
            elif not is_optional and not VERL_FILES.fullmatch(name) and not VERL_GROUPS.fullmatch(name):
                missing_files.append(name)
    return keys | {"defaults": missing_files}


def _included_files(entry: Any) -> list[tuple[str, str, bool]]:
    """Returns (file, section of its keys or "", whether it may be absent) for each file of an entry of `defaults`.

    Examples of an entry: "ppo_trainer"; "optim/fast@critic.optim", whose keys are those of the section critic.optim;
    {"optim@critic.optim": "fast"}, which means the same; {"optional data": None}, which names no file.
    """
    group, choice = next(iter(entry.items()), ("", "")) if isinstance(entry, dict) else (entry, "")
    words = str(group).split() or [""]
    group, _, section = words[-1].partition("@")
    names = [f"{group}/{x}" for x in (choice if isinstance(choice, list) else [choice]) if x not in (None, "null")]
    return [(name.rstrip("/").removesuffix(".yaml"), section, "optional" in words[:-1]) for name in names]


def _key_prefix(section: str, name: str) -> str:
    """Returns the prefix of the keys of a file: "optim." for a file of the folder optim/ without another section.

    section: section that the entry or the file names, which wins over the folder; "" if none is named.
    """
    folder = name.strip("/").rpartition("/")[0].replace("/", ".")
    section = {"_global_": "", "_here_": "", "_group_": folder, "": folder}.get(section, section)
    return section.removeprefix("_global_.") + "." * bool(section)


def with_tool_names(path: Path, keys: dict[str, Any], script_files: Mapping[str, str]) -> dict[str, Any]:
    """Returns the keys with the names of the functions in veRL's file of tools, if this file exists."""
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    file = find_file(path, str(keys[key]), script_files) if key in keys else None
    if not file:
        return keys
    tools = parse(*file).get("tools") or []
    schemas = [tool["tool_schema"] for tool in tools if isinstance(tool, dict) and "tool_schema" in tool]
    return keys | {f"{key}.names": [schema["function"]["name"] for schema in schemas]}


def with_files(path: Path, keys: dict[str, Any], script_files: Mapping[str, str]) -> DocumentKeys:
    """Returns the keys of a command with the keys of its config file, if the file exists.

    script_files: {name: text} of files that the script writes.
    """
    keys = with_tool_names(path, keys, script_files)
    name, folder = keys.get("--config-name"), keys.get("--config-path", keys.get("--config-dir", "."))
    names = [keys["config"]] if "config" in keys else []
    if isinstance(name, str) and not VERL_FILES.fullmatch(name.removesuffix(".yaml")):
        names += [f"{place}{name.removesuffix('.yaml')}.yaml" for place in (f"{folder}/", *FOLDERS)]
    # A name that could not be read is the text of its expression, which names no file.
    if file := next(filter(None, (find_file(path, str(name), script_files) for name in names)), None):
        base = read_document(*file)
        if file[1] in script_files.values():
            # A heredoc such as `lr: $(cat lr.txt)` has values that the script does not say.
            base.keys = {key: value_of(value, str) for key, value in base.keys.items()}
        other_keys = {key: x for key, x in keys.items() if key not in ("config", "--config-name", "--config-path")}
        return DocumentKeys(base.keys | other_keys, base.lost)
    return DocumentKeys(keys)


def find_file(path: Path, name: str, script_files: Mapping[str, str]) -> tuple[Path, str] | None:
    """Returns the path and text of a file that a script names, which it writes or which is in its folder or above.

    None if there is no such file. script_files: {name: text} of files that the script writes.
    """
    # A file that the script writes comes first, because a file of this name on the disk may be of another run.
    for file_name, text in script_files.items():
        if Path(file_name).name == Path(name).name:
            return Path(name), text
    for folder in (*path.resolve().parents, Path()):
        if (folder / name).is_file():
            return folder / name, (folder / name).read_text(encoding="utf-8", errors="replace")
    return None


def flatten_sections(document: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"a.b": 1} for {"a": {"b": 1}}: the sections of a document become parts of dotted keys."""
    flattened: dict[str, Any] = {}
    for key, value in document.items():
        is_section = isinstance(value, dict) and value
        flattened |= flatten_sections(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flattened


def with_references(settings: DocumentKeys, environment: Mapping[str, Any]) -> DocumentKeys:
    """Returns settings whose references are replaced by values. A reference to an unknown key makes a value `Unread`.

    environment: {environment variable that the command sets: value}, for references such as ${oc.env:LR,1e-6}.
    """
    referred, notes = set[str](), dict.fromkeys(settings.notes)

    def referred_value(key: str, match: re.Match[str], depth: int) -> Any:
        """Returns what a reference such as ${a.b} stands for, in the value of `key`."""
        kind, name, default = match.groups()
        name = f"{key.rpartition('.')[0]}{name}" if name.startswith(".") else name
        if kind == "oc.env:" and name in environment:
            return value_of(environment[name])
        if kind == "oc.env:" and default is not None:
            # The environment of the run may set the variable, so the default may not be its value.
            notes[f"{key}: {match[0]} is taken to be its default, {default.strip()}"] = None
        elif kind != "oc.env:" and name in settings.keys and depth:
            referred.add(name)
            return resolve(name, settings.keys[name], depth - 1)
        return Unread(match[0]) if default is None else parse_scalar(default.strip())

    def resolve(key: str, value: Any, depth: int) -> Any:
        """Returns the value of a key with its references resolved. depth: references that may follow each other."""
        if isinstance(value, list):
            elements = [resolve(key, element, depth) for element in value]
            # A list with an unknown element is unknown, because a rule reads all of the list.
            unread = any(isinstance(element, Unread) for element in elements)
            return Unread(", ".join(map(str, elements))) if unread else elements
        if not isinstance(value, str) or isinstance(value, Unread):
            return value
        while match := REFERENCE.search(value):
            reference_value = referred_value(key, match, depth)
            # A value that is one reference keeps its type, so a number stays a number.
            if match[0] == value or isinstance(reference_value, Unread):
                return reference_value
            value = value.replace(match[0], "null" if reference_value is None else str(reference_value))
        # OmegaConf writes ??? for a value that the command line must set.
        return Unread(value) if value == "???" or re.search(r"\$\{[\w.]+[:}]", value) else value

    # The depth ends a circle of keys that refer to each other.
    keys = {key: resolve(key, value, 5) for key, value in settings.keys.items()}
    return replace(settings, keys=keys, notes=tuple(notes), referred=frozenset(referred))


@cache
def parse_scalar(text: str) -> Any:
    """Returns the parsed value of a command line, which may be a list [a, b] or a mapping {a: 1} as in Hydra."""
    try:
        return yaml.load(text, Loader) if text else ""
    except yaml.YAMLError:
        return text


def value_of(text: Any, parse: Callable[[str], Any] = parse_scalar) -> Any:
    """Returns the parsed text of a value; `Unread` if a variable of the shell is left in the text."""
    if isinstance(text, list):
        return [value_of(element, parse) for element in text]
    if isinstance(text, Unread) or not isinstance(text, str):
        return text
    # ${a.b} is no variable of the shell: in Hydra it names another key, which `with_references` looks up later.
    variable = re.search(r"\$(\{\w+[^\w.]|\{[!#@]|\w+|\(|\[)", text)
    return Unread(f"{text!r}, which the script does not say") if variable else parse(text)
