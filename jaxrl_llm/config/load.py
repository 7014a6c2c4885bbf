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
from jaxrl_llm.config.sections import Section, problem, sections
from jaxrl_llm.config.suggestions import nearest
from jaxrl_llm.config.user_modules import importing_from
from jaxrl_llm.errors import Parser, UserError, describe, place

if TYPE_CHECKING:  # it imports JAX, which reward processes must not load
    from jaxrl_llm.structs import Config


OPEN = ("data.chat_template_args",)  # sections in which the user may add fields
SHIPPED = ("grpo", "dapo", "recipes/qwen2_5_0_5b_gsm8k")


class Arguments(NamedTuple):
    """The command line of a trainer."""

    config: Config  # locked, with its overrides
    workdir: Path
    distributed: str  # how this process joins others (`machine.distributed.joining`); "" = alone
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

    compile_only: help text of this flag, "" if the program has no such flag; shipped: names of configs for the help
    (`config_parser`).

    Raises: UserError, as `parse_config`, or if the workdir is missing.
    """
    parser = config_parser(program, description, shipped=shipped)
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="where the run is kept; an existing run is resumed (default: runs/<config>-<date>-<time>)",
    )
    parser.add_argument(
        "--distributed",
        default="",
        metavar="auto|HOST:PORT,INDEX/COUNT",
        help="this is one of several processes, which together make one run: auto, on a TPU pod, Kubernetes, Slurm or "
        "Open MPI; or the address of process 0, the number of this process, and their count. They share the workdir",
    )
    if compile_only:
        parser.add_argument("--compile-only", action="store_true", help=compile_only)
    config, known = parse_config(parser, argv)
    only = bool(compile_only) and known.compile_only
    if known.distributed and not known.workdir and not only:
        raise UserError("--workdir is missing: with --distributed all processes need the same one, on a shared disk")
    fresh = Path("runs") / f"{Path(known.config).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    return Arguments(config, known.workdir or fresh, known.distributed, only)


def config_parser(program: str, description: str, *, required: bool = True, shipped: Sequence[str] = SHIPPED) -> Parser:
    """Returns the parser of a program that has a config, for `parse_config`.

    required: whether --config must be given; shipped: names of configs for the help. The first explains every field.
    """
    parser = Parser(
        program,
        description=description,
        epilog="Any field of the config is set by --config.section.field=value, for example --config.num_steps=10 "
        "--config.optim.learning_rate=1e-5. Values have commas between them: --config.log.to=tensorboard,wandb; "
        "no value makes the field empty: --config.log.to=. The fields are explained in "
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

    Adds the config file's folder, its parent and the working folder to sys.path, so that the config can name functions
    from there.
    Raises: UserError, if the config file cannot be run or an override does not fit.
    """
    known, rest = parser.parse_known_args(_joined(sys.argv[1:] if argv is None else argv))
    file = find(known.config)
    known.config = str(file)  # also where it was the name of a shipped config
    config = load(file)
    # The folders go to the end of sys.path, so that their files do not hide installed modules.
    folders = [*_folders(file), Path.cwd()]
    sys.path += [folder for folder in map(str, folders) if folder not in sys.path]
    for argument in rest:
        match = re.fullmatch(r"--config\.([\w.]+)=(.*)", argument, re.DOTALL)
        if not match:
            if argument.startswith("--config."):
                raise UserError(f"{argument} has no value: write {argument}=VALUE")
            raise UserError(f"unknown argument {argument}: fields of the config are set by --config.field=value")
        override(config, match[1], match[2])
    return config.lock(), known


def _joined(argv: list[str]) -> list[str]:
    """Joins --config.field and the value after it to --config.field=value."""
    joined: list[str] = []
    for argument in argv:
        if joined and re.fullmatch(r"--config\.[\w.]+", joined[-1]) and not argument.startswith("--"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def find(config: str | Path) -> Path:
    """Returns the file of a config: a path, or the name of a shipped config. Raises: UserError, if there is none."""
    path, name = Path(config), str(config).removesuffix(".py")
    if path.is_file():
        return path
    known = configs.names()
    # A name that ends in .py means a file, which is missing here.
    if name in known and not path.suffix:
        return configs.FOLDER / f"{name}.py"
    if (shipped := name.removeprefix("configs/")) in known:
        raise UserError(f"--config {config}: no such file; --config {shipped} is the shipped config of this name")
    beside = [str(file) for file in path.parent.glob("*.py")]
    near = [f"{path}.py"] if f"{path}.py" in beside else difflib.get_close_matches(str(path), [*known, *beside], n=1)
    hint = f"did you mean {near[0]}?" if near else f"give one, or a shipped config by its name: {', '.join(known)}"
    raise UserError(f"--config {config}: no such file; {hint}")


def load(config: str | Path) -> Config:
    """Runs a config file, or the shipped config of this name, and returns the ConfigDict of its `get_config()`.

    The file may import modules from its folder and the parent folder, even if others with these names are imported.
    Raises: UserError, if there is no such file or it cannot be run.
    """
    path = find(config)
    try:
        with importing_from(*_folders(path)):
            # The file is run and not imported, because it may have any name, and each load must run it anew.
            get_config = runpy.run_path(str(path)).get("get_config", lambda: None)
            returned = get_config()
    except UserError as error:
        raise UserError(f"{error} ({place(error, str(path))})") from None
    # SystemExit too: a config that calls sys.exit would end this program without a word.
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} cannot be run: {describe(error, str(path))}: {_remedy(error)}") from error
    if not isinstance(returned, ConfigDict):
        raise UserError(f"{path} gives no config: define get_config(), returning an ml_collections.ConfigDict")
    return sections(with_names(returned, path.stem))


def with_names(config: Config, home: str = "") -> Config:
    """Returns a config with names in place of the reward functions, also of `eval`, that are function objects.

    home: the module of functions that a config file defines. Raises: UserError, if a function has no name.
    """
    fields = flatten(config)
    functions = fields.get("reward.functions", ())
    several = functions if isinstance(functions, tuple) else (functions,)
    judges = {path: x for path, x in fields.items() if path.startswith("eval.") and callable(x)}
    if not judges and not any(map(callable, several)):
        return config
    named = config.copy_and_resolve_references()
    with named.unlocked(), named.ignore_type():
        if any(map(callable, several)):
            named.reward.functions = tuple(name_of(function, home, "reward.functions") for function in several)
        for path, judge in judges.items():
            *sections_above, last = path.split(".")
            reduce(getitem, sections_above, named)[last] = name_of(judge, home, path)
    return named


def _remedy(error: BaseException) -> str:
    """Returns what to do about an error in a config file."""
    if isinstance(error, ModuleNotFoundError):
        for name in configs.names():
            folder, _, module = name.rpartition("/")
            if module == error.name:
                return f"write 'from {'.'.join(filter(None, (configs.__name__, folder)))} import {module}'"
    return "put the file right"


def _folders(path: Path) -> tuple[Path, ...]:
    """Returns the config file's folder and its parent, from which it may import; none for a file in our package."""
    folder = path.resolve().parent
    return () if Path(jaxrl_llm.__file__).parent in (folder, *folder.parents) else (folder, folder.parent)


def override(config: Config, name: str, text: str) -> None:
    """Sets field `name` (such as "optim.learning_rate") to the value that `text` holds."""
    *parts, last = name.split(".")
    node: Any = config
    for i, part in enumerate(parts):
        above = node
        node = node.section_named(part) if isinstance(node, Section) and (part in node or node.is_open) else None
        if not isinstance(node, ConfigDict):
            # An empty one has sections of any names, such as data.mixture.
            hint = _meant(name, flatten(config)) if above else "; a section is added in a file"
            raise UserError(f"config.{'.'.join(parts[: i + 1])} is not a section{hint}")
    if last not in node and (".".join(parts) in OPEN or node.is_open):
        value = _literal(text)
        node[last] = _tuple(text) if node.is_open and isinstance(value, str) and "," in value else value
        return
    if last not in node:
        if text.lower() == "none" and _is_section(name):
            return  # it is not there already
        raise UserError(f"config.{name} is not a field{_meant(name, flatten(config))}")
    old = node[last]
    if old is None or isinstance(old, ConfigDict):
        if text.lower() != "none":
            raise UserError(f"config.{name} {problem(text, old, name)}")
        node[last] = None
        return
    node[last] = _parse(name, old, text)


def _parse(name: str, old: Any, text: str) -> Any:
    # A text field takes the text as it is, so that 1 or None can be a name.
    if isinstance(old, str):
        return text
    value = _tuple(text) if isinstance(old, tuple) else _literal(text)
    # A person writes 1 for 1.0.
    if isinstance(old, float) and type(value) is int:
        value = float(value)
    # `type` is compared, because isinstance takes True for an int.
    if type(value) is not type(old):
        raise UserError(f"config.{name} {problem(text, old, name)}")
    return value


def _tuple(text: str) -> tuple[Any, ...]:
    """Reads "1.0,0.5", "('a','b')", "a.f,b.g(size=3, way='x')", "a" or ""."""
    value = _literal(text)
    if isinstance(value, (tuple, list)):
        return tuple(value)
    if not isinstance(value, str):
        return (value,)
    # Words without quotation marks: a shell takes them away.
    if re.fullmatch(r"\(.*\)|\[.*\]", value, re.DOTALL):
        value = value[1:-1]
    # A comma within brackets belongs to the arguments of a function: a.f,b.g(size=3, way='x') has two parts.
    depths = accumulate((c in "([{") - (c in ")]}") for c in value)
    commas = [i for i, (c, depth) in enumerate(zip(value, depths, strict=True)) if c == "," and depth == 0]
    parts = [value[i + 1 : j].strip() for i, j in pairwise([-1, *commas, len(value)])]
    return tuple(_literal(part) for part in parts if part)


def _literal(text: str) -> Any:
    try:
        # Many people type true and false by habit, as JSON and YAML write them.
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def flatten(section: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens a config, a section or a dict to {"optim.learning_rate": 1e-5, ...}. Those of OPEN stay dicts."""
    flat: dict[str, Any] = {}
    # References stay references, so that an override also changes the fields that refer to it.
    references = {"preserve_field_references": True} if isinstance(section, ConfigDict) else {}
    for key, value in section.items(**references):
        if isinstance(value, ConfigDict | dict) and prefix + key not in OPEN:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value.to_dict() if isinstance(value, ConfigDict) else value
    return flat


def _meant(name: str, fields: dict[str, Any]) -> str:
    known, section = list(fields), name.rpartition(".")[0]
    top = dict.fromkeys(field.split(".")[0] for field in known)
    if section.split(".")[0] not in top and (shipped := shipped_with(name)):
        return f"; a section is added in a file, as the shipped config {shipped} does (--config {shipped})"
    if field := nearest(name, known):
        return f"; did you mean {field}?"
    beside = [k for k in known if k.startswith(f"{section}.")] or list(top)
    return f"; there is {', '.join(beside)}"


def shipped_with(name: str, value: Any = None) -> str:
    """Returns the name of the shipped config that has a field, with this value if one is given; "": none has it."""
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
