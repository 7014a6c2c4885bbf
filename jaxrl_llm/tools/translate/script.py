"""Reads the Python script of a TRL training for its settings: keys of its config and of its trainer's arguments.

The script is never run: script_calls.py interprets its syntax tree. The rules in trl*.py translate the keys. A line
`GRPOTrainer(model, good, GRPOConfig(beta=0.1), rows)` has the keys `beta`, `trainer.model`, `trainer.reward_funcs` and
`trainer.train_dataset`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate import script_calls
from jaxrl_llm.tools.translate.documents import DocumentKeys
from jaxrl_llm.tools.translate.interpreter import ScriptObject, citation, snippet
from jaxrl_llm.tools.translate.outcome import Unread
from jaxrl_llm.tools.translate.table import WORDS

# {variable of W&B, or argument of wandb.init in capitals: key of TRL}
TRACKED = {"WANDB_PROJECT": "wandb_project", "WANDB_NAME": "run_name"}

# A comment about several processes, such as "accelerate launch --num_processes 8", "run with 8 GPUs" or "4x A100".
SEVERAL_PROCESSES = re.compile(
    r"(?i)(num_processes|nproc[_-]per[_-]node|num_gpus)[= ]+([2-9]|\d\d)|"
    # No memory of a GPU, such as "24 GB GPUs".
    r"(?<![\d.])([2-9]|[1-9]\d{1,3}) ?((x ?)?(?!Gi?B\b)([A-Za-z][\w-]* )?GPUs|x ?[ABH]\d{2,3})\b"
)


def read_script(
    path: Path, text: str, options: dict[str, Any] | None = None, environment: Mapping[str, Any] | None = None
) -> DocumentKeys:
    """Returns the keys of a script of TRL, with the kind of its trainer as their program.

    An argument of the trainer is a key that begins with "trainer.". The value of a function or a data set is its name.
    Any other value that is no literal is `Unread`. An unknown call that may change an object is a key too, such as
    "trainer.model.build()".
    options: options of the command that starts the script; None if no command is known. An option that the script
        reads itself becomes a key that begins with "program.".
    environment: {environment variable that the command sets: value}; None if no command is known.
    Raises: UserError, if the script is no Python, or makes no config of a trainer of TRL.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is no Python that can be parsed: {error}") from None
    called = [(_called_name(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    own_configs = script_calls.CONFIGS.keys() - {"TrainingArguments"}
    for noun, classes in dict(configs=own_configs, trainers=script_calls.TRAINERS).items():
        lines = [str(line) for name, line in called if name in classes]
        if len(lines) > 1:
            raise UserError(f"{path} makes {len(lines)} {noun}, at lines {', '.join(lines)}: keep one in the file")
    run = script_calls.ScriptRun(options, environment or {})
    _follow(tree, run)
    trainer = next((trl_object for trl_object in run.trl_objects if trl_object.kind == "trainer"), None)
    config = _config_of(trainer, run.trl_objects)
    if not trainer and not config:
        other = (name for name, _ in called if name in WORDS["untranslated_classes"])
        made = ", ".join(f"{name}, which is not translated" for name in other)
        listed = ", ".join(sorted(own_configs))
        raise UserError(f"{path} makes {made or 'no config'}: name a script that calls one of {listed}, or a .sh")
    if config and any(name.startswith("**") for name in config.keys):
        run.lost.append(f"{citation(config.node)}: the script does not say all of this config: translate a .sh")
    settings = config.keys | _steps("trainer.args", config) if config else {}
    settings |= {name: run.environment[x] for x, name in TRACKED.items() if x in run.environment}
    keys = {name: key_value(value) for name, value in settings.items()}
    if trainer:
        for name, value in trainer.keys.items():
            keys |= argument_keys(f"trainer.{name}", value) if name != "args" else {}
        keys |= _steps("trainer", trainer)
    keys |= {f"program.{name}": value for name, value in run.own_options.items()}
    # A script without its command may be started with several processes, and their number is a factor of the batch.
    if options is None and (comment := _comment_on_processes(tree, text)):
        keys["num_processes"] = None
        run.notes.append(f"{comment!r}: a comment does not decide the number of processes")
    kind = str((trainer or config).value)  # pyright: ignore[reportOptionalMemberAccess]
    return DocumentKeys(keys, tuple(run.lost), tuple(run.notes), program=kind, program_text=text)


def _config_of(trainer: ScriptObject | None, objects: list[ScriptObject]) -> ScriptObject | None:
    """Returns the config of a trainer, which is its argument `args`, or else the first config that a script makes.

    objects: configs and trainers that the script makes.
    """
    args = trainer.keys.get("args") if trainer else None
    if isinstance(args, ScriptObject) and args.kind == "config":
        return args
    # The config may come from a function that is not known, as in GRPOTrainer(model, args=make_config()).
    if trainer and args is not None:
        return script_calls.unread_config(str(trainer.value), trainer.node)
    # TrainingArguments without a trainer of TRL are those of another program.
    configs = (trl_object for trl_object in objects if trl_object.kind == "config")
    return next((trl_object for trl_object in configs if _called_name(trl_object.node) != "TrainingArguments"), None)


def _comment_on_processes(tree: ast.Module, text: str) -> str:
    """Returns the first line of the docstring, or the first comment, about several processes; "" if none is."""
    lines = [*(ast.get_docstring(tree) or "").splitlines(), *re.findall(r"(?m)^\s*#.*", text)]
    return next((line.strip() for line in lines if SEVERAL_PROCESSES.search(line)), "")


def _follow(tree: ast.Module, run: script_calls.ScriptRun) -> None:
    """Follows a script up to the start of its training, and functions with a trainer that it does not call."""
    with suppress(script_calls.TrainingStarts):
        run.follow(tree.body)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        makes = {_called_name(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
        # A function that the script does not call gets unknown arguments from a library such as fire.
        is_needed = not any(trl_object.kind == "trainer" for trl_object in run.trl_objects)
        if is_needed and makes & (script_calls.CONFIGS | script_calls.TRAINERS).keys():
            with suppress(script_calls.TrainingStarts):
                run.follow_function(function, dict(run.options or {}), function)


def _called_name(call: ast.Call) -> str:
    """Returns the last part of the name that a call calls; "" if it has none."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _steps(prefix: str, owner: ScriptObject) -> dict[str, Any]:
    """Returns keys for the unknown calls that may change an object, such as trainer.model.my_function()."""
    return {f"{prefix}.{name}": place for name, place in owner.steps.items()}


def argument_keys(name: str, value: Any) -> dict[str, Any]:
    """Returns the keys of an argument of the trainer: its value, its parts, and unknown calls that may change it.

    name: name of the key. For example, the model of AutoModelForCausalLM.from_pretrained("a/b", dtype="auto") has the
    keys "trainer.model" with the value a/b, and "trainer.model.dtype" with the value auto.
    """
    if name.endswith("callbacks") and isinstance(value, list):
        return {name: [str(x.value if isinstance(x, ScriptObject) else x).partition("(")[0] for x in value]}
    kind = value.kind if isinstance(value, ScriptObject) else ""
    if kind in ("", "name", "function", "part"):
        keys = {name: key_value(value, functions=True)}
        # An unknown call may return a model with adapters, or with parameters that do not learn.
        if name == "trainer.model" and "(" in str(keys[name]):
            keys["trainer.model.made()"] = str(keys[name])
        return keys | (_steps(name, value.value) if kind == "part" else {})
    if kind == "rows":
        steps = ", ".join(step for step in value.steps if step != "if()")
        source = value.value.get("train", Unread(str(value.value))) if isinstance(value.value, dict) else value.value
        return {name: key_value(source)} | ({f"{name}.steps": steps} if steps else {})
    keys = {name: value.value if kind in ("adapter", "model", "tokenizer") else Unread(str(value.value))}
    for key, part in value.keys.items():
        if key == "peft_config":
            keys |= argument_keys("trainer.peft_config", part)
        elif isinstance(part, ScriptObject) and part.kind == "object":
            keys |= {f"{name}.{key}.{attribute}": key_value(x) for attribute, x in part.keys.items()}
        else:
            keys[f"{name}.{key}"] = key_value(part)
    return keys | _steps(name, value)


def key_value(value: Any, *, functions: bool = False) -> Any:
    """Returns the value of a key: a literal, or a list or dict of literals; `Unread` if the script does not say it.

    functions: whether the value of a function is its name, as in reward_funcs=[good]. The value of torch.bfloat16 is
    always its name.
    """
    if isinstance(value, ScriptObject):
        if value.kind == "name" and str(value.value).startswith("torch."):
            return str(value.value).removeprefix("torch.")
        if value.kind == "part":
            return Unread(snippet(value.node))
        named = functions and value.kind in ("name", "function") and not isinstance(value.value, Unread)
        return value.value if named else Unread(str(value.value))
    if isinstance(value, list | dict):
        parts = [key_value(x, functions=functions) for x in (value if isinstance(value, list) else value.values())]
        if any(isinstance(part, Unread) for part in parts):
            return Unread(", ".join(map(str, parts)))
        return parts if isinstance(value, list) else dict(zip(value, parts, strict=True))
    return value
