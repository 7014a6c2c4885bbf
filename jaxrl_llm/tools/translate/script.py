"""Reads a Python script of TRL from its syntax tree. It is never run."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, TypeAlias

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate.arguments import calculated
from jaxrl_llm.tools.translate.ours import FILES
from jaxrl_llm.tools.translate.outcome import Unread

CLASSES = {"GRPO": "grpo", "PPO": "ppo", "RLOO": "rloo", "DPO": "dpo", "CPO": "simpo"}
CONFIGS = {f"{name}Config": kind for name, kind in CLASSES.items()}
TRAINERS = {f"{name}Trainer": kind for name, kind in CLASSES.items()}
OTHERS = ("SFTConfig", "KTOConfig", "RewardConfig", "OnlineDPOConfig", "AsyncGRPOConfig")
REWARDED = ("model", "reward_funcs", "args", "train_dataset")
PAIRS = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
POSITIONAL = {  # arguments of a trainer
    **dict.fromkeys(("grpo", "ppo", "rloo"), REWARDED),
    "dpo": ("model", "ref_model", *PAIRS),
    "simpo": ("model", *PAIRS),
}
DATASETS = ("load_dataset", "load_from_disk")
# Methods of a data set that change its rows, or leave some out. `shuffle` and `remove_columns` need nothing here.
ROW_METHODS = (
    "map",
    "filter",
    "select",
    "take",
    "skip",
    "train_test_split",
    "rename_column",
    "rename_columns",
    "flatten",
)
Assignments: TypeAlias = dict[str, list[ast.expr]]  # what the script sets a name to, in its order


def read_script(path: Path, text: str) -> tuple[str, dict[str, Any], list[str]]:
    """Returns a kind of CLASSES, and the keys of the config; those of the trainer begin with "trainer.".

    A value that is no literal is `Unread`, except functions and data sets, which are given by name.
    Raises: UserError, if the script is no Python or makes no such config.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is no Python that can be parsed: {error}") from None
    names, later = _assignments(tree)
    calls = [(_called(node), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [(name, call) for name, call in calls if name in CONFIGS]
    trainers = [(name, call) for name, call in calls if name in TRAINERS]
    if len(configs) > 1:
        raise UserError(f"{path} makes {len(configs)} configs, at lines {_lines(configs)}: keep one in the file")
    if not configs and not trainers:
        other = next((name for name, _ in calls if name in OTHERS), "")
        made_instead = (
            f"{other}, which is not translated"
            if other
            else "no GRPOConfig, RLOOConfig, PPOConfig, DPOConfig or CPOConfig"
        )
        raise UserError(
            f"{path} makes {made_instead}: give a script that calls one of these, or its command line in a .sh"
        )
    kind = CONFIGS[configs[0][0]] if configs else TRAINERS[trainers[0][0]]
    keys, lost = {}, []
    for _, call in configs:
        keys |= {name: _value(node, names) for name, node in _arguments(call, ("output_dir",), names)}
        config_names = {name for name, values in names.items() if any(value is call for value in values)}
        keys |= {attribute: _value(node, names) for name, attribute, node in later if name in config_names}
    for _, call in trainers[:1]:
        for name, node in _arguments(call, POSITIONAL[kind], names):
            if name != "args":
                keys |= _argument(name, node, names)
            elif not configs:
                lost.append(f"line {node.lineno}: args={_short(node)} is not made there: give the command line (a .sh)")
            if name == "train_dataset" and (steps := _steps(node, names)):
                keys["trainer.train_dataset.steps"] = ", ".join(steps)
    return kind, keys, lost


def _assignments(tree: ast.Module) -> tuple[Assignments, list[tuple[str, str, ast.expr]]]:
    """Returns what a script sets names to, with its imports and the fields of its classes, and attributes of names."""
    names: Assignments = {}
    later: list[tuple[str, str, ast.expr]] = []  # object.attribute = value
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                # As an expression with its module: a reward function of another file keeps the name that it is imported
                # by.
                names[alias.asname or alias.name] = [ast.parse(f"{node.module}.{alias.name}", mode="eval").body]
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                target = line.target if isinstance(line, ast.AnnAssign) else None
                if isinstance(target, ast.Name) and isinstance(line, ast.AnnAssign) and line.value:
                    names[f"{node.name}.{target.id}"] = [line.value]
    # Fields of a class are no names of the script: `_field` looks them up by the class.
    inside = {id(line) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for line in node.body}
    assigned = [
        (node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and id(node) not in inside
        if isinstance(node, ast.AnnAssign) or len(node.targets) == 1
    ]
    # By line: ast.walk goes level by level, and the last assignment counts.
    for target, value, _ in sorted(assigned, key=lambda assignment: assignment[2]):
        if isinstance(target, ast.Name) and value:
            names[target.id] = [*names.get(target.id, []), value]
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and value:
            later.append((target.value.id, target.attr, value))
    return names, later


def _argument(name: str, node: ast.expr, names: Assignments) -> dict[str, Any]:
    """Returns the keys of an argument of the trainer. Those of a LoraConfig and of a processor are keys, too."""
    value = _trainer_value(node, names)
    keys = {f"trainer.{name}": value}
    parts = value if isinstance(value, dict) else _loading(node, names) if name == "processing_class" else {}
    return keys | {f"trainer.{name}.{key}": x for key, x in parts.items()}


def _loading(node: ast.expr, names: Assignments) -> dict[str, Any]:
    """Returns the arguments by name with which an object is loaded: AutoProcessor.from_pretrained(path, ...)."""
    if isinstance(node, ast.Name) and names.get(node.id):
        return _loading(*_before(node.id, names))
    if not isinstance(node, ast.Call) or _called(node) != "from_pretrained":
        return {}
    return {name: _value(value, names) for name, value in _arguments(node, (), names)}


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _lines(calls: list[tuple[str, ast.Call]]) -> str:
    return ", ".join(str(call.lineno) for _, call in calls)


def _arguments(call: ast.Call, positional: tuple[str, ...], names: Assignments) -> list[tuple[str, ast.expr]]:
    """Returns the arguments of a call by their names: also those of **name, if the script sets it to a mapping."""
    named: list[tuple[str, ast.expr]] = []
    for keyword in call.keywords:
        named += [(keyword.arg, keyword.value)] if keyword.arg else _mapping(keyword.value, names)
    return [*zip(positional, call.args, strict=False), *named]


def _mapping(node: ast.expr, names: Assignments) -> list[tuple[str, ast.expr]]:
    """Returns the items of {"a": 1} or dict(a=1); of anything else, itself under a name that no key has."""
    if isinstance(node, ast.Name) and names.get(node.id):
        return _mapping(*_before(node.id, names))
    if isinstance(node, ast.Call) and _called(node) == "dict" and not node.args:
        return _arguments(node, (), names)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return [(str(key.value), value) for key, value in zip(node.keys, node.values, strict=True)]  # pyright: ignore
    return [(f"**{_short(node)}", node)]


def _before(name: str, names: Assignments) -> tuple[ast.expr, Assignments]:
    """Returns what a name was last set to, and the names as they were before."""
    # Without the last value, so that x = x + 1 ends.
    return names[name][-1], names | {name: names[name][:-1]}


def _value(node: ast.expr, names: Assignments) -> Any:
    """Returns the literal of an expression: also a sum of numbers, and a name that the script sets to a literal."""
    if isinstance(node, ast.Name) and names.get(node.id):
        return _value(*_before(node.id, names))
    if isinstance(node, ast.Attribute) and (field := _field(node, names)):
        return _value(field, names)
    if isinstance(node, ast.JoinedStr):
        return _formatted(node, names)
    if isinstance(node, ast.Call) and _called(node) in ("float", "int", "str") and len(node.args) == 1:
        inside = _value(node.args[0], names)
        try:
            return {"float": float, "int": int, "str": str}[_called(node)](inside)
        except (TypeError, ValueError):
            return Unread(_short(node))
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        pass
    try:
        return calculated(
            ast.unparse(node), {name: ast.unparse(set_to[-1]) for name, set_to in names.items() if set_to}
        )
    except (ValueError, KeyError, SyntaxError, ZeroDivisionError, RecursionError):
        return Unread(_short(node))


def _field(node: ast.Attribute, names: Assignments) -> ast.expr | None:
    """Returns the field of an object that the script makes of a class of its own, as args.rate of args = Args()."""
    constructors = names.get(node.value.id, [])[-1:] if isinstance(node.value, ast.Name) else []
    if not constructors or not isinstance(constructors[0], ast.Call):
        return None
    arguments = {keyword.arg: keyword.value for keyword in constructors[0].keywords}
    return arguments.get(node.attr) or next(iter(names.get(f"{_called(constructors[0])}.{node.attr}", [])), None)


def _formatted(node: ast.JoinedStr, names: Assignments) -> Any:
    """Returns the text of an f-string whose names the script sets to literals."""
    parts = [
        part.value if isinstance(part, ast.Constant) else _value(part.value, names)
        for part in node.values
        if isinstance(part, ast.Constant | ast.FormattedValue)
    ]
    plain = all(not isinstance(part, ast.FormattedValue) or part.format_spec is None for part in node.values)
    known = plain and not any(isinstance(part, Unread) for part in parts)
    return "".join(map(str, parts)) if known else Unread(_short(node))


def _trainer_value(node: ast.expr, names: Assignments) -> Any:
    """Returns the value of an argument of the trainer.

    A function is its name, a data set what it is loaded from, a LoraConfig its arguments, and a literal itself.
    """
    if isinstance(node, ast.List):
        return [_trainer_value(element, names) for element in node.elts]
    if isinstance(node, ast.Name):
        return _trainer_value(*_before(node.id, names)) if names.get(node.id) else node.id
    if isinstance(node, ast.Attribute) and not _field(node, names):  # mymod.rewards.good
        return ast.unparse(node)
    if isinstance(node, ast.Subscript):  # load_dataset(...)["train"]
        source, split = _trainer_value(node.value, names), _value(node.slice, names)
        return _split(source, split)
    if isinstance(node, ast.Call) and _called(node) == "LoraConfig":
        return {name: _value(value, names) for name, value in _arguments(node, ("task_type", "r"), names)}
    if isinstance(node, ast.Call) and _called(node) == "from_pretrained" and node.args:
        return _value(node.args[0], names)
    if isinstance(node, ast.Call) and _called(node) in DATASETS and node.args:
        return _loaded(node, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        # dataset.map(...) and .select(...) of a data set, which `_steps` lists
        known = not isinstance(node.func.value, ast.Name) or node.func.value.id in names
        return _trainer_value(node.func.value, names) if known else Unread(_short(node))
    if isinstance(node, ast.Call):
        return _short(node)
    return _value(node, names)


def _loaded(call: ast.Call, names: Assignments) -> Any:
    """Returns what a data set is loaded from: owner/name:configuration@split, or the file of a format."""
    arguments = {name: _value(node, names) for name, node in _arguments(call, ("path", "name"), names)}
    source = arguments.get("path")
    if not isinstance(source, str) or isinstance(source, Unread):
        return source
    # load_dataset("json", data_files=...): "json" is a format, the rows are in the file.
    files = arguments.get("data_files")
    if "/" not in source and isinstance(files, str):
        return files
    if isinstance(configuration := arguments.get("name"), str) and _called(call) == "load_dataset":
        if isinstance(configuration, Unread):
            return Unread(f"{source}, {configuration}")
        source = f"{source}:{configuration}"
    return _split(source, arguments.get("split"))


def _split(source: Any, split: Any) -> Any:
    """Adds the split of a data set of the hub, or of a saved folder, that has none yet. A slice of it is `Unread`."""
    if not isinstance(source, str) or isinstance(source, Unread) or not isinstance(split, str):
        return source
    if "/" not in source or "@" in source or source.endswith(FILES):
        return source
    known = not isinstance(split, Unread) and re.fullmatch(r"[\w.-]+", split)
    return f"{source}@{split}" if known else Unread(f"{source}, {split}")


def _steps(node: ast.expr, names: Assignments) -> list[str]:
    """Returns what a script does with the rows of a data set after it has loaded them, such as map and filter."""
    if isinstance(node, ast.Name) and names.get(node.id):
        return _steps(*_before(node.id, names))
    if isinstance(node, ast.Subscript):
        return _steps(node.value, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _called(node) not in DATASETS:
        return [*_steps(node.func.value, names), *([_called(node)] if _called(node) in ROW_METHODS else [])]
    return []


def _short(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."
