"""Hashes the source of the user's own functions, so that a resumed run notices changes since its start."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxrl_llm.config.names import notebook_functions, own_files


def digests(values: Iterable[Any]) -> dict[str, str]:
    """Returns {name of a function of the user: hash of its source}. values: all values of a checked config."""
    values = [*values]
    sources = {name: source_in(file, name.rpartition(".")[2]) for name, file in own_files(values).items()}
    sources |= {name: inspect.getsource(function) for name, function in notebook_functions(values).items()}
    return {name: hashlib.sha256(source.encode()).hexdigest() for name, source in sources.items()}


def source_in(file: Path, name: str) -> str:
    """Returns the source of a definition in a file, with all definitions of the file that it uses."""
    text = file.read_text(encoding="utf-8")
    statements = ast.parse(text).body
    used_statements, pending_names = set[int](), [name]
    while pending_names:
        pending_name = pending_names.pop()
        for i, statement in enumerate(statements):
            if i not in used_statements and pending_name in _defined_names(statement):
                used_statements.add(i)
                pending_names += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    lines, parts = text.splitlines(), [statements[i] for i in sorted(used_statements)]
    return "\n".join("\n".join(lines[_first_line(part) - 1 : part.end_lineno]) for part in parts)


def _defined_names(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    nodes = [*ast.walk(statement)]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return names | {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}


def _first_line(statement: ast.stmt) -> int:
    """Returns the number of the first line of a statement, with its decorators."""
    return min(node.lineno for node in (statement, *getattr(statement, "decorator_list", [])))
