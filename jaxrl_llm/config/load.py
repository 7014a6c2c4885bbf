"""Loads config files and applies overrides from the command line."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.config.names import closest
from jaxrl_llm.config.user_modules import importing_from
from jaxrl_llm.errors import Parser, UserError, describe

if TYPE_CHECKING:  # it imports JAX, which reward processes must not load
    from jaxrl_llm.structs import Config


RENAMED = {  # old name of a field -> its new name
    "rollout.engine": "engine.name",
    "rollout.canary_gap": "engine.max_gap",
    "advantage.normalise": "advantage.normalize",
    "log.tensorboard": "log.to",
    "log.wandb_project": "log.project",
    "hold.kl_to_reward": "adaptive_warmup.kl_to_reward",
    "hold.update_size": "adaptive_warmup.update_size",
    **{f"correction.{name}": f"importance.{name}" for name in ("level", "action", "low", "high")},
    **{
        f"rollout.{name}": f"engine.{name}"
        for name in (
            "managed",
            "python",
            "server_args",
            "servers",
            "push",
            "push_address",
            "weights_dir",
            "concurrency",
            "timeout",
            "patience",
        )
    },
}

OPEN = ("data.chat_template_args",)  # sections in which the user may add fields


class Arguments(NamedTuple):
    """The command line of a trainer."""

    config: Config  # locked, with its overrides
    workdir: Path
    distributed: str  # how this process joins others (`host.distributed.joined`); "": it is alone
    compile_only: bool


def parse_arguments(
    program: str, description: str, argv: list[str] | None = None, *, compile_only: str = ""
) -> Arguments:
    """Parses a trainer's command line. compile_only: help text of this flag, if the program has it.

    Raises: UserError, as `parse_config`, or if the workdir is missing.
    """
    parser = config_parser(program, description)
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


def config_parser(program: str, description: str, *, required: bool = True) -> Parser:
    """Returns the parser of a program that has a config, for `parse_config`. required: whether it must be given."""
    parser = Parser(
        program,
        description=description,
        epilog="Any field of the config is set by --config.section.field=value, for example --config.num_steps=10 "
        "--config.optim.learning_rate=1e-5. The fields and what they mean are in the config file.",
    )
    parser.add_argument("--config", required=required, metavar="FILE", help="a config file, e.g. configs/grpo.py")
    return parser


def parse_config(parser: Parser, argv: list[str] | None = None) -> tuple[Config, Namespace]:
    """Parses a command line, and returns the config with its overrides, locked, and the other arguments.

    Adds the config file's folder and its parent to sys.path, so that the config can name functions from there.
    Raises: UserError, if the config file cannot be run or an override does not fit.
    """
    known, rest = parser.parse_known_args(argv)
    config = load(Path(known.config))
    # At the end of sys.path, so that these files do not hide installed modules.
    sys.path += [folder for folder in map(str, _folders(Path(known.config))) if folder not in sys.path]
    for argument in rest:
        match = re.fullmatch(r"--config\.([\w.]+)=(.*)", argument, re.DOTALL)
        if not match:
            raise UserError(f"unknown argument {argument}: fields of the config are set by --config.field=value")
        override(config, match[1], match[2])
    return config.lock(), known


def load(path: Path) -> Config:
    """Runs a Python file and returns the ConfigDict of its `get_config()`.

    The file may import modules from its folder and the parent folder, even if others with these names are imported.
    """
    if not path.is_file():
        raise UserError(f"--config {path}: no such file; give one, e.g. configs/grpo.py")
    try:
        with importing_from(*_folders(path)):
            get_config = runpy.run_path(str(path)).get("get_config", lambda: None)
            config = get_config()
    except Exception as error:
        said = describe(error, str(path))
        sections = {old.split(".")[0]: new.split(".")[0] for old, new in RENAMED.items()}
        for old, new in sections.items():
            if isinstance(error, AttributeError) and old != new and f"'{old}'" in said.replace('"', "'"):
                said += f" (section {old} was renamed to {new})"
        raise UserError(f"{path} cannot be run: {said}: put the file right") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{path} gives no config: define get_config(), returning an ml_collections.ConfigDict")
    return config


def _folders(path: Path) -> tuple[Path, Path]:
    """Returns the config file's folder and its parent: a delta imports its complete config from there."""
    folder = path.resolve().parent
    return folder, folder.parent


def override(config: Config, name: str, text: str) -> None:
    """Sets field `name` (such as "optim.learning_rate") to the value that `text` holds."""
    *sections, last = name.split(".")
    node: Any = config
    for i, part in enumerate(sections):
        node = node.get(part) if isinstance(node, ConfigDict) else None
        if not isinstance(node, ConfigDict):
            raise UserError(f"config has no section {'.'.join(sections[: i + 1])}{_meant(name, config)}")
    if ".".join(sections) in OPEN and last not in node:
        node[last] = _literal(text)
        return
    if last not in node:
        raise UserError(f"config has no field {name}{_meant(name, config)}")
    old = node[last]
    if isinstance(old, ConfigDict):
        raise UserError(f"config.{name} is a section: set one of {', '.join(f'{name}.{key}' for key in old)}")
    node[last] = _parse(name, old, text)


def _parse(name: str, old: Any, text: str) -> Any:
    if isinstance(old, str):
        return text
    value = _literal(text)
    if isinstance(old, tuple) and isinstance(value, (str, int, float, list)):
        value = tuple(value) if isinstance(value, list) else (value,)
    if isinstance(old, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(old):  # not isinstance: True is an int
        raise UserError(f"config.{name} = {text!r}: give {type(old).__name__}, like {old!r}")
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def flatten(config: Config, prefix: str = "") -> dict[str, Any]:
    """Flattens a config to {"optim.learning_rate": 1e-5, ...}. A section of OPEN stays one dict."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict) and prefix + key not in OPEN:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value.to_dict() if isinstance(value, ConfigDict) else value
    return flat


def _meant(name: str, config: Config) -> str:
    if name in RENAMED:
        return f": it was renamed to {RENAMED[name]}"
    known = list(flatten(config))
    section, _, last = name.rpartition(".")
    close = closest(name, known) or [k for k in known if k.split(".")[-1] == last][:1]
    there = [k for k in known if k.startswith(f"{section}.")] or list(config)
    return f"; did you mean {close[0]}?" if close else f"; there is {', '.join(there)}"
