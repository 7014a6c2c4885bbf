"""Reads a Python script of TRL: the keys of its config and of what reaches its trainer. The script is never run."""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate.interpreter import Item, short
from jaxrl_llm.tools.translate.outcome import Unread
from jaxrl_llm.tools.translate.script_calls import CONFIGS, OTHERS, POSITIONAL, TRAINERS, ScriptRun, TrainingStarts


def read_script(path: Path, text: str) -> tuple[str, dict[str, Any], list[str], list[str]]:
    """Returns the kind of a trainer, the keys of the script, its lines that belong to no key, and notes of values.

    Keys of the trainer begin with "trainer.". A value that is no literal is `Unread`, except functions and data sets,
    which are given by name. What happens to an object on the way to the trainer, and is in no table, is a key too.
    Raises: UserError, if the script is no Python or makes no such config.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is no Python that can be parsed: {error}") from None
    called = [(_called(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for kinds, what in ((CONFIGS.keys() - {"TrainingArguments"}, "configs"), (TRAINERS.keys(), "trainers")):
        lines = [str(line) for name, line in called if name in kinds]
        if len(lines) > 1:
            raise UserError(f"{path} makes {len(lines)} {what}, at lines {', '.join(lines)}: keep one in the file")
    run = _followed(tree)
    config = next((item for item in run.items if item.kind == "config"), None)
    trainer = next((item for item in run.items if item.kind == "trainer"), None)
    if not trainer and (not config or not any(name in CONFIGS and name != "TrainingArguments" for name, _ in called)):
        other = next((f"{name}, which is not translated" for name, _ in called if name in OTHERS), "")
        raise UserError(
            f"{path} makes {other or 'no GRPOConfig, RLOOConfig, PPOConfig, DPOConfig or CPOConfig'}: "
            "give a script that calls one of these, or its command line in a .sh"
        )
    lost = list(run.lost)
    arguments = dict(trainer.keys) if trainer else {}
    args = arguments.pop("args", None)
    if isinstance(args, Item) and args.kind == "config":
        config = args
    elif trainer and args is not None:
        node = _argument(trainer.node, POSITIONAL[trainer.value].index("args"))
        lost.append(f"line {node.lineno}: args={short(node)} is not made there: give the command line (a .sh)")
    project = run.environment.get("WANDB_PROJECT")
    keys = {"wandb_project": plain(project)} if project is not None else {}
    if config:
        keys |= {name: plain(value) for name, value in config.keys.items()} | _steps("trainer.args", config)
    for name, value in arguments.items():
        keys |= argument(f"trainer.{name}", value)
    keys |= _steps("trainer", trainer) if trainer else {}
    return str((trainer or config).value), keys, lost, run.notes  # pyright: ignore[reportOptionalMemberAccess]


def _followed(tree: ast.Module) -> ScriptRun:
    """Returns the configs and trainers of a script, as they are where the training starts."""
    run = ScriptRun()
    with suppress(TrainingStarts):
        run.follow(tree.body)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        makes = {_called(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
        # A library calls it, with arguments that nobody knows.
        if not any(item.kind == "trainer" for item in run.items) and makes & (CONFIGS | TRAINERS).keys():
            with suppress(TrainingStarts):
                run.inlined(function, {}, function)
    return run


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _argument(call: ast.Call, index: int) -> ast.expr:
    return next((x.value for x in call.keywords if x.arg == "args"), call.args[index] if call.args[index:] else call)


def _steps(prefix: str, item: Item) -> dict[str, Any]:
    return {f"{prefix}.{name}": place for name, place in item.steps.items()}


def argument(name: str, value: Any) -> dict[str, Any]:
    """Returns the keys of an argument of the trainer: also of what its object is made of, and what happens to it."""
    if name.endswith("callbacks") and isinstance(value, list):
        return {name: [str(x.value if isinstance(x, Item) else x).partition("(")[0] for x in value]}
    kind = value.kind if isinstance(value, Item) else ""
    if kind in ("", "name", "function", "part"):
        keys = {name: plain(value, functions=True)}
        # What a call returns may be more than a model: adapters, or only some parameters that learn.
        if name == "trainer.model" and "(" in str(keys[name]):
            keys["trainer.model.made()"] = str(keys[name])
        return keys | (_steps(name, value.value) if kind == "part" else {})
    if kind == "rows":
        steps = ", ".join(step for step in value.steps if step != "if()")
        source = value.value.get("train", Unread(str(value.value))) if isinstance(value.value, dict) else value.value
        return {name: plain(source)} | ({f"{name}.steps": steps} if steps else {})
    if kind == "adapter":
        keys = {name: "LoraConfig" if value.value is None else value.value}
    else:
        keys = {name: value.value if kind in ("model", "tokenizer") else Unread(str(value.value))}
    for key, part in value.keys.items():
        if key == "peft_config":
            keys |= argument("trainer.peft_config", part)
        elif isinstance(part, Item) and part.kind == "object":
            keys |= {f"{name}.{key}.{inner}": plain(x) for inner, x in part.keys.items()}
        else:
            keys[f"{name}.{key}"] = plain(part)
    return keys | _steps(name, value)


def plain(value: Any, *, functions: bool = False) -> Any:
    """Returns the value of a key. functions: the name of a function stands for it."""
    if isinstance(value, Item):
        if value.kind == "name" and str(value.value).startswith("torch."):
            return str(value.value).removeprefix("torch.")
        if value.kind == "part":
            return Unread(short(value.node))
        named = functions and value.kind in ("name", "function") and not isinstance(value.value, Unread)
        return value.value if named else Unread(str(value.value))
    if isinstance(value, list | dict):
        parts = [plain(x, functions=functions) for x in (value if isinstance(value, list) else value.values())]
        if any(isinstance(part, Unread) for part in parts):
            return Unread(", ".join(map(str, parts)))
        return parts if isinstance(value, list) else dict(zip(value, parts, strict=True))
    return value
