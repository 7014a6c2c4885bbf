"""Config fields are documented where they are declared: the docstring of a field is its comment in configs/grpo.py.

`python tests/config/test_field_docs.py` copies the comments into the records, after a comment or a field has changed.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.config import load, records
from jaxrl_llm.recipe.recipe import Recipe

GRPO = Path(__file__).parents[2] / "configs" / "grpo.py"
ASSIGNMENT = re.compile(r"c\.([\w.]+) = .*?(?:  # (.*))?$")
# Sections that hold the arguments of a function, whose docstring explains them.
ARGUMENTS = ("advantage", "aggregate", "engine", "importance", "loss", "mesh", "optim")


class Declaration(NamedTuple):
    """A field of a record."""

    path: str  # in the config
    record: type  # class whose body declares it
    name: str


def comments() -> dict[str, str]:
    """Returns {path of a field: its comment}: behind the field, or else above it or above the field before it."""
    docs, block, is_open = {}, "", False
    for line in GRPO.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            block = f"{block} {text[1:].strip()}" if is_open else text[1:].strip()
            is_open = True
            continue
        is_open = False
        if match := ASSIGNMENT.fullmatch(text):
            docs |= {match[1]: match[2] or block}
        if not match or match[2]:
            block = ""
    return docs


def declarations(record: type = Recipe, prefix: str = "") -> Iterator[Declaration]:
    """Yields the fields of a record and of all records in it."""
    for field in fields(record):
        declaring = next(kind for kind in record.__mro__ if field.name in vars(kind).get("__annotations__", {}))
        yield Declaration(prefix + field.name, declaring, field.name)
        section = records._sections(record).get(field.name)
        if section and is_dataclass(section.kind) and section.kind is not records.Call:
            yield from declarations(section.kind, f"{prefix}{field.name}.")


@cache
def body_of(record: type) -> list[ast.stmt]:
    """Returns the statements of a class, with lines of its file."""
    tree = ast.parse(Path(inspect.getfile(record)).read_text(encoding="utf-8"))
    return next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == record.__name__).body


def statement_of(declaration: Declaration) -> tuple[ast.AnnAssign, ast.Expr | None]:
    """Returns the statement that declares a field, and its docstring if it has one."""
    body = body_of(declaration.record)
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == declaration.name:
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                return statement, following
            return statement, None
    raise AssertionError(declaration)


def written(doc: str) -> str:
    """Returns a comment as a sentence of a docstring."""
    capital = doc[0].upper() + doc[1:] if re.match(r"[a-z]+[ ,;:]", doc) else doc
    return capital if capital.endswith((".", "?")) else f"{capital}."


def documented() -> dict[Declaration, str]:
    """Returns the docstring that each field in configs/grpo.py must have."""
    docs = comments()
    return {declared: written(docs[declared.path]) for declared in declarations() if docs.get(declared.path)}


def test_a_field_of_the_complete_config_has_a_comment():
    docs = comments()
    leaves = [path for path in load.flatten(load.load("grpo")) if path.split(".")[0] not in ARGUMENTS]
    whole = {"host_memory.reference", "host_memory.optimizer"}  # the comment of their section explains both
    assert [path for path in leaves if not docs.get(path) and path not in whole] == []


def test_a_declared_field_has_the_comment_of_the_complete_config():
    expected = documented()
    assert len(expected) > 80
    wrong = {}
    for declared, doc in expected.items():
        _, docstring = statement_of(declared)
        text = " ".join(ast.literal_eval(docstring.value).split()) if docstring else ""
        if text != doc:
            wrong[declared.path] = text
    assert wrong == {}, "python tests/config/test_field_docs.py copies the comments"


def write() -> None:
    """Copies the comments of configs/grpo.py into the records."""
    for declared, doc in documented().items():
        statement, docstring = statement_of(declared)
        file = Path(inspect.getfile(declared.record))
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        text = f'    """{doc}"""'
        if len(text) > 120:
            wrapped = textwrap.fill(f'"""{doc}', 116, break_long_words=False, break_on_hyphens=False)
            text = textwrap.indent(f'{wrapped}\n"""', "    ")
        start, end = statement.end_lineno or 0, (docstring or statement).end_lineno or 0
        lines[start:end] = [text + "\n"]
        file.write_text("".join(lines), encoding="utf-8")
        body_of.cache_clear()


if __name__ == "__main__":
    write()
