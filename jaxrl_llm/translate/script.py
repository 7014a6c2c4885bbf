"""Reads a Python script of TRL from its syntax tree. It is never run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, TypeAlias

from jaxrl_llm.errors import UserError
from jaxrl_llm.translate.outcome import Unread
from jaxrl_llm.translate.shell import calculated

CONFIGS = {"GRPOConfig": "grpo", "PPOConfig": "ppo"}
TRAINERS = {"GRPOTrainer": "grpo", "PPOTrainer": "ppo"}
OTHERS = ("RLOOConfig", "SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "OnlineDPOConfig", "AsyncGRPOConfig")
POSITIONAL = {"config": ("output_dir",), "trainer": ("model", "reward_funcs", "args", "train_dataset")}
DATASETS = ("load_dataset", "load_from_disk")
Names: TypeAlias = dict[str, list[ast.expr]]  # what the script sets a name to, in its order


def read_script(path: Path, text: str) -> tuple[str, dict[str, Any]]:
    """Returns "grpo" or "ppo", and the keys of the config; those of the trainer begin with "trainer.".

    A value that is no literal is `Unread`, except functions and data sets, which are given by name.
    Raises: UserError, if the script is no Python or makes no such config.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is no Python that can be parsed: {error}") from None
    names: Names = {}
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]
    for node in sorted(assigned, key=lambda node: node.lineno):
        if isinstance(target := node.targets[0], ast.Name):
            names[target.id] = [*names.get(target.id, []), node.value]
    calls = [(_called(node), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [(name, call) for name, call in calls if name in CONFIGS]
    trainers = [(name, call) for name, call in calls if name in TRAINERS]
    if len(configs) > 1:
        raise UserError(f"{path} makes {len(configs)} configs, at lines {_lines(configs)}: keep one in the file")
    if not configs and not trainers:
        other = next((name for name, _ in calls if name in OTHERS), "")
        there = f"{other}, which is not translated" if other else "no GRPOConfig or PPOConfig"
        raise UserError(f"{path} makes {there}: give a script that calls one of these, or its command line in a .sh")
    kind = CONFIGS[configs[0][0]] if configs else TRAINERS[trainers[0][0]]
    keys = {}
    for _, call in configs:
        keys |= {name: _value(node, names) for name, node in _arguments(call, POSITIONAL["config"])}
    for _, call in trainers[:1]:
        for name, node in _arguments(call, POSITIONAL["trainer"]):
            if name != "args":
                keys[f"trainer.{name}"] = _of_trainer(node, names)
    return kind, keys


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _lines(calls: list[tuple[str, ast.Call]]) -> str:
    return ", ".join(str(call.lineno) for _, call in calls)


def _arguments(call: ast.Call, positional: tuple[str, ...]) -> list[tuple[str, ast.expr]]:
    named = [(keyword.arg or f"**{_short(keyword.value)}", keyword.value) for keyword in call.keywords]
    return [*zip(positional, call.args, strict=False), *named]


def _before(name: str, names: Names) -> tuple[ast.expr, Names]:
    """Returns what a name was last set to, and the names as they were before."""
    return names[name][-1], names | {name: names[name][:-1]}


def _value(node: ast.expr, names: Names) -> Any:
    """Returns the literal of an expression: also a sum of numbers, and a name that the script sets to a literal."""
    if isinstance(node, ast.Name) and names.get(node.id):
        return _value(*_before(node.id, names))
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


def _of_trainer(node: ast.expr, names: Names) -> Any:
    """As `_value`; a function is its name, a data set what it is loaded from, and a LoraConfig its arguments."""
    if isinstance(node, ast.List):
        return [_of_trainer(one, names) for one in node.elts]
    if isinstance(node, ast.Name):
        return _of_trainer(*_before(node.id, names)) if names.get(node.id) else node.id
    if isinstance(node, ast.Subscript):  # load_dataset(...)["train"]
        return _of_trainer(node.value, names)
    if isinstance(node, ast.Call) and _called(node) == "LoraConfig":
        return {name: _value(value, names) for name, value in _arguments(node, ("task_type", "r"))}
    if isinstance(node, ast.Call) and _called(node) in DATASETS and node.args:
        return _value(node.args[0], names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        # dataset.map(...) and .select(...) of a data set that was loaded before
        loaded = _of_trainer(node.func.value, names)
        return loaded if names.get(node.func.value.id) else Unread(_short(node))
    if isinstance(node, ast.Call):
        return _short(node)
    return _value(node, names)


def _short(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."
