"""Hashes the source of the user's own functions, so that a resumed run notices changes since its start."""

from __future__ import annotations

import ast
import hashlib
import inspect
import symtable
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.config.names import notebook_functions, own_files

LOCAL_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip


def digests(values: Iterable[Any]) -> dict[str, str]:
    """Returns {name of a function of the user: hash of its source}. values: all values of a checked config."""
    values = [*values]
    sources = {name: source_in(file, name.rpartition(".")[2]) for name, file in own_files(values).items()}
    sources |= {name: inspect.getsource(function) for name, function in notebook_functions(values).items()}
    return {name: hashlib.sha256(source.encode()).hexdigest() for name, source in sources.items()}


def source_in(file: Path, name: str) -> str:
    """Returns the source of a definition in a file, with all definitions of the file that it uses."""
    text = file.read_text(encoding="utf-8")
    statements, lines = ast.parse(text).body, text.splitlines()
    used_statements, pending_names = set[int](), [name]
    while pending_names:
        pending_name = pending_names.pop()
        for i, statement in enumerate(statements):
            if i not in used_statements and pending_name in _defined_names(statement):
                used_statements.add(i)
                pending_names += _used_names(_source_of(statement, lines))
    return "\n".join(_source_of(statements[i], lines) for i in sorted(used_statements))


def _defined_names(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement of a module defines."""
    nodes = [*_nodes_of_module(statement)]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return names | {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}


def _nodes_of_module(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a statement, except those in functions, classes and comprehensions, whose names are local."""
    yield node
    if isinstance(node, LOCAL_SCOPES):
        return
    for child in ast.iter_child_nodes(node):
        yield from _nodes_of_module(child)


def _used_names(source: str) -> set[str]:
    """Returns the names that a statement reads from its module, also in its functions and comprehensions."""
    tables, names = [symtable.symtable(source, "", "exec")], set[str]()
    while tables:
        table = tables.pop()
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        tables += table.get_children()
    return names


def _source_of(statement: ast.stmt, lines: list[str]) -> str:
    """Returns the lines of a statement, with its decorators."""
    first_line = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", [])))
    return "\n".join(lines[first_line - 1 : statement.end_lineno])
