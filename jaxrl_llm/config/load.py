"""Loads config files and applies overrides from the command line."""

from __future__ import annotations

import ast
import difflib
import importlib
import re
import runpy
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime
from functools import reduce
from itertools import accumulate, pairwise
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

import jaxrl_llm
from jaxrl_llm import configs
from jaxrl_llm.config.names import name_of
from jaxrl_llm.config.sections import Section, display, required_type, sections
from jaxrl_llm.config.suggestions import nearest
from jaxrl_llm.config.user_modules import importing_from
from jaxrl_llm.errors import Parser, UserError, code_location, describe

if TYPE_CHECKING:  # it imports JAX, which reward processes must not load
    from jaxrl_llm.structs import Config


OPEN = ("data.chat_template_args",)  # sections in which the user may add fields
SHIPPED = ("grpo", "dapo", "recipes/qwen2_5_0_5b_gsm8k")  # examples of shipped configs in the help


class Arguments(NamedTuple):
    """The command line of a trainer."""

    config: Config  # locked config with its overrides
    workdir: Path
    distributed: str  # how this process joins other processes (`machine.distributed.joining`); "" for a single process
    compile_only: bool


def parse_arguments(
    program: str,
    description: str,
    argv: list[str] | None = None,
    *,
    compile_only: str = "",
    shipped: Sequence[str] = SHIPPED,
) -> Arguments:
    """Parses a trainer's command line.

    argv: arguments, None for those of this process; compile_only: help text of this flag, "" if the program has no such
    flag; shipped: names of configs for the help, as in `config_parser`.
    Raises: UserError, as `parse_config`, or if the workdir is missing.
    """
    parser = config_parser(program, description, shipped=shipped)
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="work directory of the run; an existing run is resumed (default: runs/<config>-<date>-<time>)",
    )
    parser.add_argument(
        "--distributed",
        default="",
        metavar="auto|HOST:PORT,INDEX/COUNT",
        help="join several processes to one run, which share the workdir: auto on a TPU pod, Kubernetes, Slurm or Open "
        "MPI; otherwise the address of process 0, the number of this process, and the number of processes",
    )
    if compile_only:
        parser.add_argument("--compile-only", action="store_true", help=compile_only)
    config, arguments = parse_config(parser, argv)
    only_compiles = bool(compile_only) and arguments.compile_only
    if arguments.distributed and not arguments.workdir and not only_compiles:
        raise UserError(
            "--workdir is missing: with --distributed, all processes need the same work directory on a shared disk"
        )
    new_workdir = Path("runs") / f"{Path(arguments.config).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    return Arguments(config, arguments.workdir or new_workdir, arguments.distributed, only_compiles)


def config_parser(program: str, description: str, *, required: bool = True, shipped: Sequence[str] = SHIPPED) -> Parser:
    """Returns the parser of a program that has a config, for `parse_config`.

    required: whether --config is mandatory; shipped: names of configs for the help, the first of which explains every
    field.
    """
    parser = Parser(
        program,
        description=description,
        epilog="--config.section.field=value sets a field of the config, for example --config.num_steps=10 "
        "--config.optim.learning_rate=1e-5. Commas separate several values: --config.log.to=tensorboard,wandb. "
        "An empty value empties the field: --config.log.to=. All fields are explained in "
        f"{configs.FOLDER / shipped[0]}.py.",
    )
    parser.add_argument(
        "--config",
        required=required,
        metavar="FILE",
        help=f"a config file, or the name of a shipped config, e.g. {', '.join(shipped[:-1])} or {shipped[-1]}",
    )
    return parser


def parse_config(parser: Parser, argv: list[str] | None = None) -> tuple[Config, Namespace]:
    """Parses a command line, and returns the config with its overrides, locked, and the other arguments.

    Adds the config file's folder, its parent and the current folder to sys.path, so that the config can name functions
    in them.
    Raises: UserError, if the config file cannot be run or an override does not fit.
    """
    arguments, overrides = parser.parse_known_args(_join_values(sys.argv[1:] if argv is None else argv))
    file = find(arguments.config)
    arguments.config = str(file)  # the name of a shipped config becomes its file
    config = load(file)
    # The folders go to the end of sys.path, so that their files do not hide installed modules.
    folders = [*_folders(file), Path.cwd()]
    sys.path += [folder for folder in map(str, folders) if folder not in sys.path]
    for argument in overrides:
        match = re.fullmatch(r"--config\.([\w.]+)=(.*)", argument, re.DOTALL)
        if not match:
            if argument.startswith("--config."):
                raise UserError(f"{argument} has no value: write {argument}=VALUE")
            raise UserError(f"unknown argument {argument}: --config.FIELD=VALUE sets a field of the config")
        override(config, match[1], match[2])
    return config.lock(), arguments


def _join_values(argv: list[str]) -> list[str]:
    """Returns the arguments with --config.field and the value after it joined to --config.field=value."""
    joined_arguments: list[str] = []
    for argument in argv:
        lacks_value = joined_arguments and re.fullmatch(r"--config\.[\w.]+", joined_arguments[-1])
        if lacks_value and not argument.startswith("--"):
            joined_arguments[-1] += f"={argument}"
        else:
            joined_arguments.append(argument)
    return joined_arguments


def find(config: str | Path) -> Path:
    """Returns the file of a config. config: path of a file, or name of a shipped config.

    Raises: UserError, if no such file exists.
    """
    path, name = Path(config), str(config).removesuffix(".py")
    if path.is_file():
        return path
    shipped_names = configs.names()
    # A name that ends with .py is a file, which does not exist.
    if name in shipped_names and not path.suffix:
        return configs.FOLDER / f"{name}.py"
    if (shipped := name.removeprefix("configs/")) in shipped_names:
        raise UserError(
            f"--config {config}: file does not exist; --config {shipped} is the shipped config of this name"
        )
    files = [str(file) for file in path.parent.glob("*.py")]
    with_ending = [f"{path}.py"] if f"{path}.py" in files else []
    suggestions = with_ending or difflib.get_close_matches(str(path), [*shipped_names, *files], n=1)
    listed_names = ", ".join(shipped_names)
    hint = f"did you mean {suggestions[0]}?" if suggestions else f"use a file, or a shipped config: {listed_names}"
    raise UserError(f"--config {config}: file does not exist; {hint}")


def load(config: str | Path) -> Config:
    """Runs a config file, or the shipped config of this name, and returns the ConfigDict of its `get_config()`.

    The file may import modules from its folder and the parent folder, even if modules with equal names are imported.
    Raises: UserError, if the file does not exist or cannot be run.
    """
    path = find(config)
    try:
        with importing_from(*_folders(path)):
            # The file is run, because it may have a name that cannot be imported, and each load must run it again.
            get_config = runpy.run_path(str(path)).get("get_config", lambda: None)
            returned = get_config()
    except UserError as error:
        raise UserError(f"{error} ({code_location(error, str(path))})") from None
    # SystemExit is caught too, because a config that calls sys.exit would end this program silently.
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} cannot be run: {describe(error, str(path))}: {_remedy(error)}") from error
    if not isinstance(returned, ConfigDict):
        raise UserError(f"{path} must define get_config(), which returns an ml_collections.ConfigDict")
    return sections(with_names(returned, path.stem))


def with_names(config: Config, home: str = "") -> Config:
    """Returns a config in which names replace function objects in `reward.functions`, `env` and `eval`.

    home: name of the module of functions that a config file defines. Raises: UserError, if a function has no name.
    """
    fields = flatten(config)
    value = fields.get("reward.functions", ())
    rewards = value if isinstance(value, tuple) else (value,)
    functions = {path: x for path, x in fields.items() if path.startswith(("env.", "eval.")) and callable(x)}
    if not functions and not any(map(callable, rewards)):
        return config
    named = config.copy_and_resolve_references()
    with named.unlocked(), named.ignore_type():
        if any(map(callable, rewards)):
            named.reward.functions = tuple(name_of(function, home, "reward.functions") for function in rewards)
        for path, function in functions.items():
            *outer_sections, last = path.split(".")
            reduce(getitem, outer_sections, named)[last] = name_of(function, home, path)
    return named


def _remedy(error: BaseException) -> str:
    """Returns the fix for an error in a config file."""
    if isinstance(error, ModuleNotFoundError):
        for name in configs.names():
            folder, _, module = name.rpartition("/")
            if module == error.name:
                return f"write 'from {'.'.join(filter(None, (configs.__name__, folder)))} import {module}'"
    return "correct the file"


def _folders(path: Path) -> tuple[Path, ...]:
    """Returns the config file's folder and its parent, from which it may import; () for a file in our package."""
    folder = path.resolve().parent
    return () if Path(jaxrl_llm.__file__).parent in (folder, *folder.parents) else (folder, folder.parent)


def override(config: Config, name: str, text: str) -> None:
    """Sets a field of a config to the value in a text. name: path of the field, such as "optim.learning_rate".

    Raises: UserError, if the config has no such field, or for a value of another type.
    """
    *parts, last = name.split(".")
    section: Any = config
    for i, part in enumerate(parts):
        parent = section
        is_known = isinstance(section, Section) and (part in section or section.is_open)
        section = section.section_named(part) if isinstance(section, Section) and is_known else None
        if not isinstance(section, ConfigDict):
            # An empty section, such as data.mixture, holds sections of any names.
            hint = _suggestion(name, flatten(config)) if parent else ": add sections to it in a config file"
            raise UserError(f"config.{'.'.join(parts[: i + 1])} is not a section{hint}")
    if last not in section and (".".join(parts) in OPEN or section.is_open):
        value = _literal(text)
        section[last] = _tuple(text) if section.is_open and isinstance(value, str) and "," in value else value
        return
    if last not in section:
        if text.lower() == "none" and _is_section(name):
            return  # the section is absent already
        raise UserError(f"config.{name} is not a field{_suggestion(name, flatten(config))}")
    old_value = section[last]
    if old_value is None or isinstance(old_value, ConfigDict):
        if text.lower() != "none":
            raise UserError(
                f"config.{name} = {display(text)}: the value must be {required_type(text, old_value, name)}"
            )
        section[last] = None
        return
    section[last] = _parse(name, old_value, text)


def _parse(name: str, old_value: Any, text: str) -> Any:
    """Returns the value of a text for a field that holds `old_value`. Raises: UserError, for another type."""
    # A text field takes the text as it is, so that 1 or None can be a name.
    if isinstance(old_value, str):
        return text
    value = _tuple(text) if isinstance(old_value, tuple) else _literal(text)
    # A whole number is accepted for a float, because people write 1 for 1.0.
    if isinstance(old_value, float) and type(value) is int:
        value = float(value)
    # Types are compared exactly, because True is an int for isinstance.
    if type(value) is not type(old_value):
        raise UserError(f"config.{name} = {display(text)}: the value must be {required_type(text, old_value, name)}")
    return value


def _tuple(text: str) -> tuple[Any, ...]:
    """Returns the values in "1.0,0.5", "('a','b')", "a.f,b.g(size=3, way='x')", "a" or ""."""
    value = _literal(text)
    if isinstance(value, (tuple, list)):
        return tuple(value)
    if not isinstance(value, str):
        return (value,)
    # Brackets are removed here, because ast cannot read words without quotation marks, which a shell removes.
    if re.fullmatch(r"\(.*\)|\[.*\]", value, re.DOTALL):
        value = value[1:-1]
    # A comma within brackets belongs to the arguments of a function: a.f,b.g(size=3, way='x') has two parts.
    depths = accumulate((c in "([{") - (c in ")]}") for c in value)
    commas = [i for i, (c, depth) in enumerate(zip(value, depths, strict=True)) if c == "," and depth == 0]
    parts = [value[i + 1 : j].strip() for i, j in pairwise([-1, *commas, len(value)])]
    return tuple(_literal(part) for part in parts if part)


def _literal(text: str) -> Any:
    """Returns the value of a Python literal; any other text stays text."""
    try:
        # true and false are accepted, because JSON and YAML write them so.
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def flatten(section: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens a config, a section or a dict to {"optim.learning_rate": 1e-5, ...}. Sections in OPEN stay dicts."""
    flat: dict[str, Any] = {}
    # References are preserved, so that an override also changes the fields that refer to it.
    references = {"preserve_field_references": True} if isinstance(section, ConfigDict) else {}
    for key, value in section.items(**references):
        if isinstance(value, ConfigDict | dict) and prefix + key not in OPEN:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value.to_dict() if isinstance(value, ConfigDict) else value
    return flat


def _suggestion(name: str, fields: dict[str, Any]) -> str:
    """Returns the end of an error for a wrong name: the field that may be meant, or the known fields of its section."""
    known_fields, section = list(fields), name.rpartition(".")[0]
    top_level = dict.fromkeys(field.split(".")[0] for field in known_fields)
    if section.split(".")[0] not in top_level and (shipped := shipped_with(name)):
        return f"; add the section in a config file, as the shipped config {shipped} does (--config {shipped})"
    if field := nearest(name, known_fields):
        return f"; did you mean {field}?"
    in_section = [field for field in known_fields if field.startswith(f"{section}.")] or list(top_level)
    return f"; known fields: {', '.join(in_section)}"


def shipped_with(name: str, value: Any = None) -> str:
    """Returns the name of a shipped config that has a field, with this value unless it is None; "" if none has it."""
    for shipped in _shipped():
        shipped_value = _shipped_fields(shipped).get(name)
        if shipped_value is not None and value in (None, shipped_value):
            return shipped
    return ""


def _is_section(name: str) -> bool:
    """Returns whether a shipped config has a section of this name."""
    return any(field.startswith(f"{name}.") for shipped in _shipped() for field in _shipped_fields(shipped))


def _shipped() -> list[str]:
    """Returns the names of the shipped configs, the plainest first: few folders, then a short name."""
    return sorted(configs.names(), key=lambda shipped: (shipped.count("/"), len(shipped)))


def _shipped_fields(name: str) -> dict[str, Any]:
    module = importlib.import_module(f"{configs.__name__}.{name.replace('/', '.')}")
    return flatten(module.get_config())
