"""Reads the training command of a shell script. Nothing is run: variables, arrays and sums are expanded as text."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.translate.outcome import Unread

ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-=])([^{}]*))?\}|\$(\w+|@)")
ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
SUM = re.compile(r"\$\(\(([^$]*?)\)\)")
SPACED = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)")  # $(command) or $((sum))
OVERRIDE = re.compile(r"[+~]*([\w-]+(?:\.[\w-]+)*)=(.*)", re.DOTALL)  # of Hydra and OmegaConf
END = ("|", "||", "&&", ";", "&")
KNOWN = {"HOME": "~", "PWD": "."}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def commands(text: str) -> list[list[str]]:
    """Returns the words of each command, with variables expanded. A variable that is not set stays as it is."""
    variables: dict[str, str] = dict(KNOWN)
    arrays: dict[str, list[str]] = {}
    found = []
    for line in _logical_lines(text):
        words = _expanded(line, variables, arrays)
        if words and words[0] in ("export", "declare", "local", "readonly"):
            words = words[1:]
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            name, more, value = match.groups()
            if value.startswith("("):
                end = next((i for i, word in enumerate(words) if word.endswith(")")), len(words) - 1)
                inside = [value[1:], *words[1 : end + 1]] if end else [value[1:]]
                inside[-1] = inside[-1].removesuffix(")")
                arrays[name] = arrays.get(name, []) * bool(more) + [word for word in inside if word]
                words = words[end + 1 :]
                continue
            variables[name] = variables.get(name, "") * bool(more) + value
            words = words[1:]
        if words:
            found.append(words)
    return found


def overrides(words: list[str]) -> dict[str, Any]:
    """Returns the key=value arguments of a command, and its --flags as "--flag"."""
    found: dict[str, Any] = {}
    for word in words:
        flag = word.startswith("--")
        match = OVERRIDE.fullmatch(word.removeprefix("--"))
        if match:
            found["--" * flag + match[1]] = match[2]
        elif flag:
            found[word] = "True"
    return found


def flags(words: list[str]) -> dict[str, Any]:
    """Returns the --key value arguments of a command, with _ for - in the keys. A key without a value is "True"."""
    found: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, _, value = word.removeprefix("--").partition("=")
            key = key.replace("-", "_")
            found[key] = value or "True"
        elif key:
            before = found[key]
            listed = before if isinstance(before, list) else [] if before == "True" else [before]
            found[key] = [*listed, word] if listed else word
    return found


def calculated(text: str, names: dict[str, Any]) -> int | float:
    """Computes a sum of numbers and names. Raises: ValueError, KeyError or SyntaxError, for anything else."""

    def value(node: ast.AST) -> int | float:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.Name):
            return value(ast.parse(str(names[node.id]).strip(), mode="eval").body)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"{text} is no sum of numbers")

    return value(ast.parse(text.strip(), mode="eval").body)


def value_of(text: Any, parse: Any) -> Any:
    """Parses the text of a value; what still has a variable in it is `Unread`."""
    if isinstance(text, list):
        return [value_of(one, parse) for one in text]
    left = re.search(r"\$(\{\w+[^\w.]|\w+|\()", text)  # ${a.b} is not the shell's but Hydra's: it names another key
    return Unread(f"{text!r} has {left[0]}, which is not set there") if left else parse(text)


def _logical_lines(text: str) -> list[list[str]]:
    """Splits a script into the words of its lines: joined where a line, a quotation or an array goes on."""
    lines, pending = [], ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        pending += line + "\n"
        # Without its spaces, $((a + b)) stays one word.
        packed = SPACED.sub(lambda match: re.sub(r"\s+", "", match[0]), pending)
        try:
            words = shlex.split(packed, comments=True)
        except ValueError:  # an open quotation
            continue
        opened = [i for i, word in enumerate(words) if re.match(r"\w+\+?=\((?!\()", word)]
        if opened and not any(word.endswith(")") for word in words[opened[-1] :]):
            continue
        pending = ""
        while words:
            end = next((i for i, word in enumerate(words) if word in END or word.endswith(";")), len(words))
            one = [word.removesuffix(";") for word in words[: end + 1] if word not in END]
            lines.append(_without_redirections(one))
            words = words[end + 1 :]
    if pending.strip():
        raise UserError("a quotation or an array has no end: is this a shell script?")
    return [line for line in lines if line]


def _without_redirections(words: list[str]) -> list[str]:
    """Leaves out `2>&1`, `>log` and `> log`."""
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if word and not re.match(r"\d*[<>]|&>", word) and not re.fullmatch(r"(\d*|&)(>>?|<)", before):
            kept.append(word)
    return kept


def _expanded(words: list[str], variables: dict[str, str], arrays: dict[str, list[str]]) -> list[str]:
    expanded = []
    for word in words:
        if (match := ARRAY.fullmatch(word)) and match[1] in arrays:
            expanded += arrays[match[1]]
        elif word not in ("$@", "$*", "${@}", "${@:1}"):
            expanded.append(_expand(word, variables))
    return expanded


def _expand(word: str, variables: dict[str, str]) -> str:
    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        if variables.get(name):
            return variables[name]
        return match[3] if match[2] else match[0]

    def total(match: re.Match[str]) -> str:
        try:
            return str(calculated(match[1].replace("/", "//"), variables))  # a shell has whole numbers only
        except (ValueError, KeyError, SyntaxError):
            return match[0]

    while (made := SUM.sub(total, VARIABLE.sub(variable, word))) != word:
        word = made
    return word
