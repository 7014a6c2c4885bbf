"""Rows of problems, one dict of columns each: from tasks, functions of yours, and files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from jaxrl_llm.config.names import resolve
from jaxrl_llm.data import tasks
from jaxrl_llm.errors import UserError, describe

Row = dict[str, Any]
FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".parquet")
KINDS = ".json, .csv, .jsonl or .parquet"  # as a person reads it; the first three may end with .gz


@dataclass(frozen=True)
class Rows:
    """Rows of a source; the column "prompt" of each is text, or a list of messages."""

    rows: list[Row]
    numbers: list[int]  # where each stands in its source, from 1
    dropped: int  # rows for which convert returned None


def check_source(field: str, source: str) -> None:
    """Raises: UserError, naming the field, for what is neither a task nor a file of a kind that is read."""
    if source.endswith(FILES):
        return
    path = Path(source).expanduser()
    if path.is_dir():
        pattern = f"{source.rstrip('/')}/train-*.parquet"
        raise UserError(f"{field} = {source!r} is a folder: give a file of it, or a pattern like {pattern!r}")
    hub = (
        ""
        if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or path.suffix
        else (f"; a data set of the hub is fetched first (hf download {source} --repo-type dataset --local-dir data)")
    )
    if "/" in source or path.exists() or path.suffix in (".gz", ".zip", ".tsv", ".txt", ".xlsx", ".arrow", ".zst"):
        raise UserError(f"{field} = {source!r}: a file must be {KINDS}{hub or ': write it as one of them'}")
    resolve(source, tasks, field)


def load_rows(source: str, convert: str = "", field: str = "data.convert") -> Rows:
    """Rows of a task ("arithmetic.train"), a function of yours ("my.module.rows"), a file, or files by a pattern.

    convert names a function row -> row that makes the column "prompt", or None to drop the row (of
    `jaxrl_llm.data.tasks`, or dotted); `field` is the config field that named it.
    Raises: UserError, naming the file, the line or row, and what is wrong with it.
    """
    rows = [row for path in _files(source) for row in _read(path)] if source.endswith(FILES) else _made(source)
    if not rows:
        raise UserError(f"{source} holds no rows: give a data source that has some")
    numbered = list(enumerate(rows, 1))
    if convert:
        function = resolve(convert, tasks, field)
        made = [(i, _converted(source, convert, function, i, row)) for i, row in numbered]
        numbered = [(i, row) for i, row in made if row is not None]
    if not numbered:
        raise UserError(f"{source}: {convert} returned None for all {len(rows)} rows: set {field} to another")
    kept = [_checked(source, i, row) for i, row in numbered]
    return Rows(kept, [i for i, _ in numbered], len(rows) - len(kept))


def _checked(source: str, number: int, row: Any) -> Row:
    """A row whose prompt is text or a list of messages with text as content."""
    if not isinstance(row, dict):
        raise UserError(f"{source} row {number} is {row!r}: make every row a dict of columns")
    if "prompt" not in row:
        raise UserError(
            f"{source} row {number} has no column 'prompt' ({_there(row)}): rename one, or set data.convert "
            "(eval.convert for the problems to be judged by)"
        )
    prompt = row["prompt"].tolist() if hasattr(row["prompt"], "tolist") else row["prompt"]  # an array of pandas'
    if not prompt or not (isinstance(prompt, str) or _is_chat(prompt)):
        raise UserError(
            f"{source} row {number}: prompt is {prompt!r}: give text, or a list of messages with role and content"
        )
    if isinstance(prompt, str):
        return row
    return row | {"prompt": [message | {"content": _text(source, number, message["content"])} for message in prompt]}


def _is_chat(prompt: Any) -> bool:
    messages = isinstance(prompt, (list, tuple)) and all(isinstance(message, dict) for message in prompt)
    return messages and all({"role", "content"} <= message.keys() for message in prompt)


def _text(source: str, number: int, content: Any) -> Any:
    """A message's content; parts {"type": "text", "text": ...} become one text, as templates of text models want it."""
    if not isinstance(content, (list, tuple)):
        return content
    for part in content:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise UserError(f"{source} row {number}: a message has the part {str(part)[:80]}: give parts of text alone")
    return "".join(part["text"] for part in content)


def _there(row: Row) -> str:
    return f"there is {', '.join(sorted(map(str, row)))}"


def _made(source: str) -> list[Any]:
    function = resolve(source, tasks, "data source")
    try:
        return list(function())
    except Exception as error:  # their own code
        raise UserError(f"data source {source} raised {describe(error)}") from error


def _converted(source: str, convert: str, function: Any, number: int, row: Row) -> Row | None:
    try:
        return function(row)
    except KeyError as error:
        raise UserError(f"{source} row {number} has no column {error} for {convert} ({_there(row)}): add it") from error
    except Exception as error:  # their own code
        raise UserError(f"{source} row {number}: {convert} raised {describe(error)}") from error


def _files(source: str) -> list[Path]:
    """The file, or those that a pattern matches, by name."""
    path = Path(source).expanduser()
    if path.exists() or not has_magic(source):
        found = [path] if path.exists() else []
    else:
        found = sorted(map(Path, glob(str(path))))
    if not found:
        raise UserError(f"data file {path} does not exist: give the path of one that does")
    return found


def _read(path: Path) -> list[Row]:
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a file")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): give a file of yours") from None
    content = content.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark, as Windows writes it
    if ".csv" in path.suffixes:
        return _read_csv(path, content)
    if ".json" in path.suffixes and content.lstrip().startswith(b"["):
        rows = _parse(path, "", content, "the file must be one array of JSON objects")
        return [_object(path, f" element {i}", row) for i, row in enumerate(rows, 1)]
    lines = enumerate(content.splitlines(), 1)
    wanted = "every line must be one JSON object"
    wanted += ", or the file an array of them" if ".json" in path.suffixes else ""
    return [_object(path, f" line {i}", _parse(path, f" line {i}", line, wanted)) for i, line in lines if line.strip()]


def _parse(path: Path, where: str, text: bytes, wanted: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or brackets without end
        raise UserError(f"{path}{where}: {error}: {wanted}") from None


def _object(path: Path, where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{path}{where} is {type(row).__name__}: every line must be one JSON object")
    return row


def _read_csv(path: Path, content: bytes) -> list[Row]:
    """Every value is text: an answer "007" stays what it is."""
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as CSV in UTF-8 ({error}): write it as .jsonl") from None
    for i, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise UserError(f"{path} row {i} has not one value for each name of the first line: put text in quotes")
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path).read().to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as Parquet ({error}): give a Parquet file") from None
