"""Reads the arguments of a training command as keys with values, as Hydra, OmegaConf and argparse do."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.tools.translate.outcome import Unread

# An argument key=value of Hydra and OmegaConf, and the short options of Hydra.
OVERRIDE = re.compile(r"[+~]*([\w-]+(?:\.[\w-]+)*)=(.*)", re.DOTALL)
# A word that is nothing but a variable of the shell whose value the script does not say.
UNKNOWN_VARIABLE = re.compile(r"\$(\w+|\{[^}]+\})")
SHORT_OPTIONS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
# The pattern matches the text inside <PATH-TO-MODEL> and <your/data>, but not inside the tags <think> and </answer>.
PLACEHOLDER = r"(?=[^<>\n]*(?:[A-Z/-]|path|your))[A-Za-z](?:[^<>|&;'\"`\n]*[^\s<>|&;'\"`])?"


def _product(left: Any, right: Any) -> Any:
    """Returns a product of two numbers. Raises: ValueError for a text or a list, whose product may take all memory."""
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        raise ValueError("it is no product of numbers")
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    """Returns a power of small numbers. Raises: ValueError for others, because 9**9**9 would take for ever."""
    if abs(base) > 2**32 or abs(exponent) > 64:
        raise ValueError("the power is too large")
    return base**exponent


# {operator of arithmetic in a script or shell: function that computes it}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: _product, ast.Div: operator.truediv}
OPERATORS |= {ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power, ast.USub: operator.neg}


def keys_of(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the arguments key=value of a command with its flags as "--flag", and the words that are neither."""
    keys: dict[str, str] = {}
    unkeyed: list[str] = []
    option = ""
    for text in command:
        word = SHORT_OPTIONS.get(text, text)
        flag = "--" * word.startswith("--")
        if match := OVERRIDE.fullmatch(word.removeprefix("--")):
            keys[flag + match[1]] = match[2]
        elif flag:
            keys[word] = "True"
        elif option in SHORT_OPTIONS.values():
            keys[option] = word
        else:
            unkeyed.append(text)
        option = word if flag and not match else ""
    return keys, unkeyed


def flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the --key value arguments, with _ for - in the keys, and the words that belong to no key.

    These are the words before the first key, and unknown variables behind a value: they may hold further options. A
    key without a value is "True".
    """
    options: dict[str, Any] = {}
    unkeyed: list[str] = []
    key = ""
    for word in words:
        if word.startswith("--") and word != "--":
            key, sign, text = word.removeprefix("--").partition("=")
            # transformers accepts - and _ in the names of its flags.
            key = key.replace("-", "_")
            options[key] = text if sign else "True"
        elif not key:
            unkeyed.append(word)
        elif options[key] == "True":
            options[key] = word
        elif UNKNOWN_VARIABLE.fullmatch(word):
            unkeyed.append(word)
        else:
            # A second word after a key makes a list, as nargs="+" does.
            options[key] = [*(options[key] if isinstance(options[key], list) else [options[key]]), word]
    return options, unkeyed


def merge_rounds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the keys of a command that a loop or a function runs several times. A key with two values is `Unread`."""
    merged_keys: dict[str, Any] = {}
    for key in dict.fromkeys(key for keys in runs for key in keys):
        # The values are compared by `repr`, because lists and mappings have no hash.
        values = list({repr(keys.get(key)): keys.get(key) for keys in runs}.values())
        several = f"the script runs this command {len(runs)} times, with {', '.join(map(str, values))}"
        merged_keys[key] = values[0] if len(values) == 1 else Unread(several)
    return merged_keys


def calculated(
    text: str, names: dict[str, str], operators: Mapping[type, Callable[[Any, Any], Any]] = OPERATORS
) -> int | float:
    """Computes an expression of numbers and names. Raises: ValueError, KeyError or SyntaxError, for anything else."""

    def value(node: ast.AST) -> int | float:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        # A variable in an expression of the shell may hold an expression itself.
        if isinstance(node, ast.Name):
            return value(ast.parse(str(names[node.id]).strip(), mode="eval").body)
        if isinstance(node, ast.BinOp | ast.UnaryOp):
            operands = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            return operators[type(node.op)](*map(value, operands))
        raise ValueError(f"{text} is no expression of numbers")

    return value(ast.parse(text.strip(), mode="eval").body)


def without_places(value: Any) -> Any:
    """Returns a value; `Unread` if it has a placeholder such as <PATH>, which a person must replace."""
    parts = value if isinstance(value, list) else [value]
    placeholders = [part for part in parts if isinstance(part, str) and re.match(rf"<{PLACEHOLDER}>([\w./-]*)$", part)]
    return Unread(", ".join(map(str, parts))) if placeholders else value
