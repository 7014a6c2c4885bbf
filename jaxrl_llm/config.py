"""Config files: loaded, overridden from the command line, and checked as a whole before anything else happens."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.errors import UserError


@dataclass(frozen=True)
class Field:
    """What a field may hold: a type, and a range or a set of choices."""

    kind: type
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    above: bool = False  # the low end itself is not allowed

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, if anything."""
        wanted = (int, float) if self.kind is float else self.kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.kind is not bool):
            return f"is {value!r} ({type(value).__name__}): give {self.kind.__name__}"
        if self.choices and value not in self.choices:
            return f"is {value!r}: give one of {', '.join(map(repr, self.choices))}"
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return f"is {value}: give a value {'above' if self.above else 'of at least'} {self.low}"
        if self.high is not None and value > self.high:
            return f"is {value}: give a value of at most {self.high}"
        return None


def parse_arguments(program: str, description: str, argv: list[str] | None = None) -> tuple[ConfigDict, Path]:
    """The command line of a trainer -> the locked config with its overrides, and the workdir.

    Raises: UserError, for a config file that cannot be run and an override that does not fit.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        epilog="Any field of the config is set by --config.section.field=value, for example "
        "--config.num_steps=10 --config.optim.learning_rate=1e-5. The fields and what they mean are in the config file.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a config file, e.g. configs/grpo.py")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="where the run is kept; an existing run is resumed "
                        "(default: runs/<config>-<date>-<time>)")  # fmt: skip
    known, rest = parser.parse_known_args(argv)
    config = load(Path(known.config))
    for argument in rest:
        match = re.fullmatch(r"--config\.([\w.]+)=(.*)", argument, re.DOTALL)
        if not match:
            raise UserError(f"unknown argument {argument}: fields of the config are set by --config.field=value")
        override(config, match[1], match[2])
    fresh = Path("runs") / f"{Path(known.config).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    return config.lock(), known.workdir or fresh


def load(path: Path) -> ConfigDict:
    """The ConfigDict that `get_config()` of a Python file returns."""
    if not path.is_file():
        raise UserError(f"--config {path}: no such file")
    sys.path.insert(0, str(path.parent.resolve()))  # a delta imports the complete file beside it
    try:
        return runpy.run_path(str(path))["get_config"]()
    except KeyError as error:
        if error.args != ("get_config",):
            raise UserError(f"{path}: {error}") from error
        raise UserError(f"{path} defines no get_config(): it must return an ml_collections.ConfigDict") from None
    except Exception as error:
        raise UserError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)


def override(config: ConfigDict, name: str, text: str) -> None:
    """Sets field `name` ("optim.learning_rate") to a value written as text."""
    *sections, last = name.split(".")
    node: Any = config
    for i, part in enumerate(sections):
        node = node.get(part) if isinstance(node, ConfigDict) else None
        if not isinstance(node, ConfigDict):
            raise UserError(f"config has no section {'.'.join(sections[: i + 1])}{_meant(name, config)}")
    if last not in node:
        raise UserError(f"config has no field {name}{_meant(name, config)}")
    old = node[last]
    if isinstance(old, ConfigDict):
        raise UserError(f"config.{name} is a section: set one of {', '.join(f'{name}.{key}' for key in old)}")
    node[last] = _parse(name, old, text)


def _parse(name: str, old: Any, text: str) -> Any:
    if isinstance(old, str):
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        value = text
    if isinstance(old, tuple) and isinstance(value, (str, int, float, list)):
        value = tuple(value) if isinstance(value, list) else (value,)
    if isinstance(old, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(old):
        raise UserError(f"config.{name} = {text!r}: give {type(old).__name__}, like {old!r}")
    return value


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """{"optim.learning_rate": 1e-5, ...}"""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else {prefix + key: value})
    return flat


def _meant(name: str, config: ConfigDict) -> str:
    known = list(flatten(config))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    close = close or [k for k in known if k.split(".")[-1] == name.split(".")[-1]][:1]
    return f"; did you mean {close[0]}?" if close else f"; there is {', '.join(config)}"


def check_fields(config: ConfigDict, fields: dict[str, Field], named: dict[str, ModuleType]) -> None:
    """Every field of the table is there and fits; nothing else is.

    named: sections {"loss": losses} whose `name` is a function of that module (or dotted) and
    whose other fields are its keyword arguments. Raises: UserError, naming the field.
    """
    flat = flatten(config)
    for section, module in named.items():
        if f"{section}.name" not in flat:
            raise UserError(f"config.{section}.name is missing: the name of a function of {module.__name__}")
        function = resolve(config[section].name, module, f"config.{section}.name")
        allowed = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        for key in arguments(config[section]):
            if key not in allowed:
                raise UserError(f"config.{section}.{key}: {config[section].name} takes {', '.join(allowed) or 'nothing'}")
    flat = {name: value for name, value in flat.items() if name.split(".")[0] not in named}
    for name in flat:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            raise UserError(f"config.{name} is not a field" + (f"; did you mean {close[0]}?" if close else ""))
    for name, field in fields.items():
        if name not in flat:
            raise UserError(f"config.{name} is missing: add it to the config file (configs/ has complete ones)")
        if problem := field.problem(flat[name]):
            raise UserError(f"config.{name} {problem}")


def arguments(section: ConfigDict) -> dict[str, Any]:
    """A named section's keyword arguments: all but the name."""
    return {key: value for key, value in section.items() if key != "name"}


def resolve(name: str, module: ModuleType, what: str = "name") -> Callable[..., Any]:
    """The function `name`: of `module` ("grpo"), of a module in it ("arithmetic.accuracy"), or anywhere ("my.module.f").

    Raises: UserError, naming what there is.
    """
    *path, attribute = name.split(".")
    if not path:
        found = getattr(module, attribute, None)
    else:
        found = None
        for parent in (f"{module.__name__}.{'.'.join(path)}", ".".join(path)):
            try:
                found = getattr(importlib.import_module(parent), attribute, None)
            except ModuleNotFoundError as error:
                if not parent.startswith(error.name or "\0"):
                    raise UserError(f"{what} {name!r}: importing {parent} failed: {error}") from error
                continue
            break
    if callable(found):
        return found
    close = difflib.get_close_matches(name, offered := _offered(module), n=1)
    hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(offered)}, or a dotted name of your own"
    raise UserError(f"{what} {name!r} does not exist; {hint}")


def _offered(module: ModuleType) -> list[str]:
    """Public functions of a module, and those of the modules of a package as "module.function"."""
    names = []
    if hasattr(module, "__path__"):
        for file in sorted(Path(module.__path__[0]).glob("[!_]*.py")):
            inner = importlib.import_module(f"{module.__name__}.{file.stem}")
            names += [f"{file.stem}.{name}" for name in _offered(inner)]
        return names
    members = inspect.getmembers(module, inspect.isfunction)
    return [name for name, f in members if not name.startswith("_") and f.__module__ == module.__name__]
