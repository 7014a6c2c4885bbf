"""Config files: loaded, overridden from the command line, and checked as a whole before anything else happens."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import math
import re
import runpy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict

from jaxrl_llm.errors import Parser, UserError, describe
from jaxrl_llm.modules import importing_from, own_file

if TYPE_CHECKING:  # it imports jax, which the processes of rewards do without
    from jaxrl_llm.structs import Config


RENAMED = {  # fields by the names that they had
    "rollout.engine": "engine.name",
    "rollout.canary_gap": "engine.max_gap",
    **{
        f"rollout.{name}": f"engine.{name}"
        for name in (
            "managed", "python", "server_args", "servers", "push", "push_address", "weights_dir", "concurrency",
            "timeout", "patience",
        )
    },
}  # fmt: skip

OPEN = ("data.chat_template_args",)  # sections whose fields are the user's own


@dataclass(frozen=True)
class Field:
    """What a field may hold: a type, and a range or a set of choices."""

    kind: type
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    above: bool = False  # the low end itself is not allowed
    of: type | None = None  # what each value of a tuple is

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, if anything."""
        wanted = (int, float) if self.kind is float else self.kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.kind is not bool):
            return f"is {value!r} ({type(value).__name__}): give {self.kind.__name__}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"is {value}: give a finite number"
        if self.of and isinstance(value, tuple):
            problems = [problem for one in value if (problem := Field(self.of).problem(one))]
            return f"has one that {problems[0]}" if problems else None
        if self.choices and value not in self.choices:
            return f"is {value!r}: give one of {', '.join(map(repr, self.choices))}"
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return f"is {value}: give a value {'above' if self.above else 'of at least'} {self.low}"
        if self.high is not None and value > self.high:
            return f"is {value}: give a value of at most {self.high}"
        return None


# Types of arguments that are fields of the config: what an annotation says is checked.
NotNegative = Annotated[float, Field(float, low=0)]
Positive = Annotated[float, Field(float, low=0, above=True)]
Share = Annotated[float, Field(float, low=0, high=1)]
AtLeastOne = Annotated[int, Field(int, low=1)]
Count = Annotated[int, Field(int, low=0)]


def parse_arguments(program: str, description: str, argv: list[str] | None = None) -> tuple[Config, Path]:
    """The command line of a trainer -> the locked config with its overrides, and the workdir.

    From here on, functions that the config names may be in modules beside the config file, too.
    Raises: UserError, for a config file that cannot be run and an override that does not fit.
    """
    parser = Parser(
        prog=f"python -m {program}",
        description=description,
        epilog="Any field of the config is set by --config.section.field=value, for example --config.num_steps=10 "
        "--config.optim.learning_rate=1e-5. The fields and what they mean are in the config file.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a config file, e.g. configs/grpo.py")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="where the run is kept; an existing run is resumed "
                        "(default: runs/<config>-<date>-<time>)")  # fmt: skip
    known, rest = parser.parse_known_args(argv)
    config = load(Path(known.config))
    sys.path += [folder for folder in map(str, _folders(Path(known.config))) if folder not in sys.path]
    for argument in rest:
        match = re.fullmatch(r"--config\.([\w.]+)=(.*)", argument, re.DOTALL)
        if not match:
            raise UserError(f"unknown argument {argument}: fields of the config are set by --config.field=value")
        override(config, match[1], match[2])
    fresh = Path("runs") / f"{Path(known.config).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    return config.lock(), known.workdir or fresh


def load(path: Path) -> Config:
    """The ConfigDict that `get_config()` of a Python file returns.

    The file may import modules beside it and in the folder above it, whatever was imported before.
    """
    if not path.is_file():
        raise UserError(f"--config {path}: no such file; give one, e.g. configs/grpo.py")
    try:
        with importing_from(*_folders(path)):
            get_config = runpy.run_path(str(path)).get("get_config", lambda: None)
            config = get_config()
    except Exception as error:
        raise UserError(f"{path} cannot be run: {describe(error, str(path))}: put the file right") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{path} gives no config: define get_config(), returning an ml_collections.ConfigDict")
    return config


def _folders(path: Path) -> tuple[Path, Path]:
    """Where a delta's complete file may be: beside it, or in the folder above."""
    folder = path.resolve().parent
    return folder, folder.parent


def override(config: Config, name: str, text: str) -> None:
    """Sets field `name` ("optim.learning_rate") to a value written as text."""
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
    if type(value) is not type(old):
        raise UserError(f"config.{name} = {text!r}: give {type(old).__name__}, like {old!r}")
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def flatten(config: Config, prefix: str = "") -> dict[str, Any]:
    """{"optim.learning_rate": 1e-5, ...}; a section of the user's own fields is one dict."""
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
    close = _close(name, known) or [k for k in known if k.split(".")[-1] == last][:1]
    there = [k for k in known if k.startswith(f"{section}.")] or list(config)
    return f"; did you mean {close[0]}?" if close else f"; there is {', '.join(there)}"


def _close(name: str, known: Iterable[str]) -> list[str]:
    """The one that was meant, if any; two names of a section are not alike for that alone."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)


def check_fields(config: Config, fields: dict[str, Field], named: dict[str, ModuleType]) -> None:
    """Every field of the table is there and fits; nothing else is.

    named: sections {"loss": losses} whose `name` is a function of that module (or dotted) and
    whose other fields are its keyword arguments. Raises: UserError, naming the field.
    """
    flat = flatten(config)
    for section, module in named.items():
        if f"{section}.name" not in flat:
            raise UserError(f"config.{section}.name is missing: give a function of {module.__name__}")
        name = flat[f"{section}.name"]
        if problem := Field(str).problem(name):
            raise UserError(f"config.{section}.name {problem}")
        _check_arguments(section, name, resolve(name, module, f"config.{section}.name"), arguments(config[section]))
    flat = {name: value for name, value in flat.items() if name.split(".")[0] not in named}
    for name in flat:
        if name not in fields:
            if name in RENAMED:
                raise UserError(f"config.{name} is not a field: it was renamed to {RENAMED[name]}")
            close = _close(name, fields)
            raise UserError(f"config.{name} is not a field" + (f"; did you mean {close[0]}?" if close else ""))
    for name, field in fields.items():
        if name not in flat:
            raise UserError(f"config.{name} is missing: add it to the config file (configs/ has complete ones)")
        if problem := field.problem(flat[name]):
            raise UserError(f"config.{name} {problem}")


def _check_arguments(section: str, name: str, function: Callable[..., Any], given: dict[str, Any]) -> None:
    """The keyword-only arguments of a function are given as it declares them, and no others."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:  # a name that only type checkers import
        hints = {}
    taken = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    for key, value in given.items():
        if key not in taken:
            raise UserError(f"config.{section}.{key} is not an argument: {name} takes {', '.join(taken) or 'nothing'}")
        if (field := _field(hints.get(key))) and (problem := field.problem(value)):
            raise UserError(f"config.{section}.{key} {problem}")
    for key, parameter in taken.items():
        if parameter.default is parameter.empty and key not in given:
            raise UserError(f"config.{section}.{key} is missing: {name} needs it")


def fields_of(section: str, function: Callable[..., Any], *, leave_out: tuple[str, ...] = ()) -> dict[str, Field]:
    """The fields of a section that is the keyword arguments of a function, as their annotations say."""
    hints = get_type_hints(function, include_extras=True)
    found = {name: _field(hints[name]) for name in keywords(function) if name not in leave_out}
    return {f"{section}.{name}": field for name, field in found.items() if field}


def _field(hint: Any) -> Field | None:
    """What an annotation allows; None if it says nothing that can be checked."""
    if get_origin(hint) is Literal:
        return Field(str, choices=get_args(hint))
    if get_origin(hint) is tuple:
        return Field(tuple, of=get_args(hint)[0])
    if get_origin(hint) is Annotated:
        return get_args(hint)[1]
    return Field(hint) if hint in (bool, int, float, str) else None


def arguments(section: Config) -> dict[str, Any]:
    """A named section's keyword arguments: all but the name."""
    return {key: value for key, value in section.items() if key != "name"}


def needs(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's positional arguments: what it asks of its caller, not of the config."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


def keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's keyword-only arguments: what it takes from the config."""
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)


def resolve(name: str, module: ModuleType, what: str = "name") -> Callable[..., Any]:
    """The function `name`: of `module` ("grpo"), of a module in it ("arithmetic.accuracy"), or anywhere ("my.mod.f").

    Raises: UserError, naming what there is, or both functions that a name could mean.
    """
    path, _, attribute = name.rpartition(".")
    inner, found = None, None
    if not path and name in _functions(module):
        found = getattr(module, name)
    if path:
        ours = f"{module.__name__}.{path}"
        inner = _imported(ours, what, name)
        file = own_file(path, attribute) if inner else None
        if file and hasattr(inner, attribute):
            raise UserError(
                f"{what} {name!r} could be ours or that of {file}: "
                f"write '{ours}.{attribute}' for ours, or rename your file"
            )
        if file or not inner:
            inner = _imported(path, what, name)
        found = getattr(inner, attribute, None)
    if callable(found):
        return found
    offered = [f"{path}.{other}" for other in _functions(inner)] if inner else _offered(module)
    close = _close(name, offered)
    hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(offered)}, or a dotted name of your own"
    missing = f": there is no module {path}" if path and not inner else ""
    raise UserError(f"{what} {name!r} does not exist{missing}; {hint}")


def _imported(module: str, what: str, name: str) -> ModuleType | None:
    """A module, or None if it is not there at all."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever the module does
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise UserError(f"{what} {name!r}: importing {module} failed: {describe(error)}") from error


def _offered(module: ModuleType) -> list[str]:
    """Public functions of a module, and those of the modules of a package as "module.function"."""
    if not hasattr(module, "__path__"):
        return _functions(module)
    names = sorted(file.stem for file in Path(module.__path__[0]).glob("[!_]*.py"))
    inner = {name: importlib.import_module(f"{module.__name__}.{name}") for name in names}
    return [f"{name}.{function}" for name in names for function in _functions(inner[name])]


def _functions(module: ModuleType) -> list[str]:
    """What a module offers by name: its `__all__`, or its public functions."""
    members = inspect.getmembers(module, inspect.isfunction)
    mine = [name for name, f in members if not name.startswith("_") and f.__module__ == module.__name__]
    return getattr(module, "__all__", mine)


def own_name(function: Callable[..., Any], module: ModuleType) -> str:
    """The name of a function of our module, however it was named; "" for anybody else's."""
    return function.__name__ if function.__module__ == module.__name__ else ""
