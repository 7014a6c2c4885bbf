"""Loads rows of problems from tasks, user functions and files. A row is a dict of columns."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from jaxrl_llm.config import memory
from jaxrl_llm.config.names import resolve
from jaxrl_llm.data import formats, hub, image_columns, image_rows
from jaxrl_llm.data.formats import Columns, Row
from jaxrl_llm.data.image_rows import RowImages
from jaxrl_llm.errors import MissingHere, UserError, check_local, describe
from jaxrl_llm.machine import bucket, extras
from jaxrl_llm.tasks import CONVERTERS, SOURCES

FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")
KINDS = ".json, .csv, .jsonl or .parquet"  # for error messages; all but .parquet may end with .gz
SHOWN = 5  # files in an error message


@dataclass(frozen=True)
class SourceRows:
    """The rows of a source. The column "prompt" of each row is text or a list of messages."""

    rows: list[Row]
    numbers: list[int]  # number of each row in its source, from 1
    dropped: int  # number of rows for which convert returned None
    read_as: str = ""  # how columns other than "prompt" and "answer" were read
    images: RowImages | None = None  # the images in the prompts; None: the model reads none


def check_source(field: str, source: str) -> None:
    """Raises: UserError, naming the field, if `source` is neither a task nor a file of a supported kind."""
    if source.startswith(memory.PREFIX):
        memory.rows_of(source, field)
        return
    if source.endswith(".parquet"):
        extras.require("pyarrow", "parquet", f"{field} = {source!r}")
    if source.endswith(FILES) or hub.check(field, source):
        return
    path = Path(source).expanduser()
    if path.is_dir():
        raise UserError(f"{field} = {source!r} is a folder: {_hint(path, source.rstrip('/'))}")
    file, _, split = source.rpartition("@")
    if file.endswith(FILES):
        raise UserError(f"{field} = {source!r}: a file has no splits such as {split!r}: give {file!r}")
    if "/" in source or path.exists() or path.suffix in (".gz", ".zip", ".tsv", ".txt", ".xlsx", ".arrow", ".zst"):
        raise UserError(f"{field} = {source!r}: a file must be {KINDS}: write it as one of them")
    resolve(source, SOURCES, field)


def check_there(field: str, source: str) -> None:
    """Raises: MissingHere, naming the field, if `source` is a file or a pattern and no file is there."""
    if source.endswith(FILES):
        _files(source, field)


def _hint(folder: Path, named: str) -> str:
    """Says which files of a folder, or of one below it, are a source; named: the folder in the user's words."""
    files = sorted(path.relative_to(folder) for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_file())
    files = [file for file in files if file.name.endswith(FILES)]
    if not files:
        return f"it has no file of rows ({KINDS}): give one"
    nearest = [file for file in files if file.parent == min((f.parent for f in files), key=lambda at: len(at.parts))]
    train = [file for file in nearest if file.name.startswith("train")]
    first, *others = train or nearest
    if not others:
        return f"give its file {str(Path(named) / first)!r}"
    ending = "".join(first.suffixes[-2:]) if first.suffix == ".gz" else first.suffix
    pattern = Path(named) / first.parent / f"{'train' if train else ''}*{ending}"
    return f"give a file of it, such as {first.name}, or the pattern {str(pattern)!r}"


def is_task(source: str) -> bool:
    """Returns whether a source is a function that makes rows."""
    return not (source.endswith(FILES) or source.startswith(memory.PREFIX) or hub.names_one(source))


def load_rows(source: str, convert: str = "", field: str = "data.convert", columns: Columns = Columns()) -> SourceRows:  # noqa: B008
    """Loads the rows of a task ("arithmetic.train"), a user function, a file, a file pattern or a hub id.

    convert: name of a function row -> row, in `jaxrl_llm.tasks` or dotted. The function makes the column
    "prompt", or returns None to drop the row; field: the config field that named it. Without one, `formats.read` reads
    the row, as `columns` says.
    Raises: UserError, naming the file, the line or row, and the problem.
    """
    rows = _rows(source, field)
    if not rows:
        raise UserError(f"{source} holds no rows: give a data source that has some")
    read_as: dict[str, None] = {}
    if convert:
        function = resolve(convert, CONVERTERS, field)
        converted = [_converted(source, convert, function, i, row) for i, row in enumerate(rows, 1)]
    else:
        converted = [_read_as(source, i, row, columns, read_as) for i, row in enumerate(rows, 1)]
        if columns.answer_column and not any(columns.answer_column in row for row in rows):
            known = formats.columns_text(dict.fromkeys(name for row in rows for name in row))
            raise UserError(f"{source} has no column {columns.answer_column!r} ({known}): see data.answer_column")
    numbers = [i for i, row in enumerate(converted, 1) if row is not None]
    checked = [_checked(source, i, converted[i - 1]) for i in numbers]
    if not checked:
        raise UserError(f"{source}: {convert} returned None for all {len(rows)} rows: set {field} to another")
    read_as_text = "; ".join(x for x in read_as if x)
    if columns.images is None:
        checked, images = [_with_text(source, i, row) for i, row in zip(numbers, checked, strict=True)], None
    else:
        checked, images = _with_images(source, numbers, checked, columns)
    return SourceRows(checked, numbers, len(rows) - len(checked), read_as_text, images)


def _rows(source: str, convert: str) -> list[Row]:
    """convert: the field of the convert function, beside which is that of the source."""
    field = "--task" if convert == "--convert" else f"config.{convert.removesuffix('convert')}source"
    if source.startswith(memory.PREFIX):
        return memory.rows_of(source, field)
    if source.endswith(FILES):
        return [row for path in _files(source, field) for row in _read(path)]
    return hub.load(source) if hub.names_one(source) else _generated(source)


def _read_as(source: str, number: int, row: Any, columns: Columns, seen: dict[str, None]) -> Row:
    """Returns `formats.read(row)`, and adds what it did to `seen`."""
    if not isinstance(row, dict):
        raise UserError(f"{source} row {number} is {row!r}: make every row a dict of columns")
    try:
        row, note = formats.read(row, columns)
    except ValueError as error:
        raise UserError(f"{source} row {number} {error}") from None
    seen[note] = None
    return row


def _checked(source: str, number: int, row: Any) -> Row:
    """Returns a row with a checked prompt: text, or a list of messages."""
    if not isinstance(row, dict) or "prompt" not in row:
        columns = formats.columns_text(row) if isinstance(row, dict) else repr(row)
        raise UserError(f"{source} row {number} has no column 'prompt' ({columns}): let the convert function make it")
    prompt = row["prompt"].tolist() if hasattr(row["prompt"], "tolist") else row["prompt"]  # an array from pandas
    if not prompt or not (isinstance(prompt, str) or _is_chat(prompt)):
        raise UserError(
            f"{source} row {number}: prompt is {prompt!r:.200}: give text, or a list of messages with role and content"
        )
    if isinstance(prompt, str):
        return row
    is_arrow = source.endswith(".parquet") or hub.names_one(source)
    if is_arrow and any(None in message.values() or "tool_calls" in message for message in prompt):
        # Arrow gives every message, and all arguments of its calls, each key that another one has.
        prompt = [_without_nulls(message) for message in prompt]
    # The usual case: no copy of the row.
    return row if row["prompt"] is prompt and isinstance(prompt, list) else row | {"prompt": list(prompt)}


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without the nulls around its content, whose parts the reader of images knows."""
    rest = {key: value for key, value in message.items() if key != "content"}
    return formats.without_nulls(rest) | ({"content": message["content"]} if "content" in message else {})


def _with_text(source: str, number: int, row: Row) -> Row:
    """Returns a row whose messages have text as content."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return row
    contents = [message.get("content") for message in prompt]
    if all(isinstance(content, str) for content in contents):
        return row
    texts = [_text(source, number, content) for content in contents]
    return row | {"prompt": [message | {"content": text} for message, text in zip(prompt, texts, strict=True)]}


def _with_images(
    source: str, numbers: list[int], rows: list[Row], columns: Columns
) -> tuple[list[Row], RowImages | None]:
    """Returns rows whose messages have parts for their images, with the names of these, and the images."""
    assert columns.images
    placed, images_by_row = [], []
    for number, row in zip(numbers, rows, strict=True):
        try:
            row, images = image_columns.read(row, columns.image_column)
        except ValueError as error:
            raise UserError(f"{source} row {number} {error}") from None
        placed.append(row)
        images_by_row.append((f"{source} row {number}", images))
    row_images = image_rows.measure(images_by_row, columns.images, columns.image_folder)
    for i, images in enumerate(row_images.rows):
        if images:
            names = [image.name for image in images]
            placed[i] = placed[i] | {"prompt": image_columns.named(placed[i]["prompt"], names)}
    return placed, row_images


def _is_chat(prompt: Any) -> bool:
    messages = isinstance(prompt, (list, tuple)) and all(isinstance(message, dict) for message in prompt)
    # A message that calls tools may have no content.
    return messages and all("role" in message and message.keys() & {"content", "tool_calls"} for message in prompt)


def _text(source: str, number: int, content: Any) -> Any:
    """Returns a message's content, with text parts joined: templates of text models expect one text."""
    if not isinstance(content, (list, tuple)):
        return content
    for part in content:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise UserError(f"{source} row {number}: a message has the part {str(part)[:80]}: give parts of text alone")
    return "".join(part["text"] for part in content)


def _generated(source: str) -> list[Any]:
    function = resolve(source, SOURCES, "data source")
    try:
        return list(function())
    except Exception as error:  # user code
        raise UserError(f"data source {source} raised {describe(error)}") from error


def _converted(source: str, convert: str, function: Any, number: int, row: Row) -> Row | None:
    try:
        return function(row)
    except KeyError as error:
        columns = formats.columns_text(row)
        raise UserError(f"{source} row {number} has no column {error} for {convert} ({columns}): add it") from error
    except Exception as error:  # user code
        raise UserError(f"{source} row {number}: {convert} raised {describe(error)}") from error


def _files(source: str, field: str) -> list[Path]:
    """Returns the file, or all files that match a pattern, sorted by name."""
    check_local(field, source)
    if remote := bucket.address(source):
        return bucket.fetch_files(field, remote)
    path = Path(source).expanduser()
    if path.exists() or not has_magic(source):
        # An existing file may have [ or * in its name.
        files = [path] if path.exists() else []
    else:
        files = sorted(map(Path, glob(str(path))))
    if not files:
        folder = "this folder" if path.parent == Path() else f"the folder {path.parent}"
        near = f"{folder} has {_some(path.parent)}" if path.parent.is_dir() else f"there is no {folder[4:]}"
        raise MissingHere(f"{field}: data file {path} does not exist; {near}: give the path of one that does")
    return files


def _some(folder: Path) -> str:
    """Lists the files of rows in a folder, as far as they fit a line."""
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(FILES))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else f"no file of rows ({KINDS})"


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
    # Byte-order mark, written by Windows programs.
    content = content.removeprefix(b"\xef\xbb\xbf")
    if ".csv" in path.suffixes:
        return _read_csv(path, content)
    # A .json file may hold lines too: the first character says which.
    if ".json" in path.suffixes and content.lstrip().startswith(b"["):
        rows = _parse(path, "", content, "the file must be one array of JSON objects")
        return [_object(path, f" element {i}", row) for i, row in enumerate(rows, 1)]
    # Lines of bytes: `splitlines` of a str would also split at U+2028, which may be inside a JSON string.
    lines = enumerate(content.splitlines(), 1)
    expected = "every line must be one JSON object"
    expected += ", or the file an array of them" if ".json" in path.suffixes else ""
    return [
        _object(path, f" line {i}", _parse(path, f" line {i}", line, expected)) for i, line in lines if line.strip()
    ]


def _parse(path: Path, where: str, text: bytes, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        # No JSON, no UTF-8, or nested too deeply.
        if isinstance(error, json.JSONDecodeError):
            line = where or f" line {error.lineno}"
            raise UserError(f"{path}{line}, column {error.colno} is no JSON ({error.msg}): {expected}") from None
        raise UserError(f"{path}{where} cannot be read ({error}): {expected}") from None


def _object(path: Path, where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{path}{where} is {type(row).__name__}: every line must be one JSON object")
    return row


def _read_csv(path: Path, content: bytes) -> list[Row]:
    """Reads CSV with all values as text: an answer "007" keeps its zeros."""
    try:
        # newline="": csv itself must see the line ends, which may be part of a quoted text.
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
        # The table is read in pieces, so that memory does not hold all of it beside its rows.
        pieces = pyarrow.parquet.ParquetFile(path).iter_batches()
        return [row for piece in pieces for row in piece.to_pylist()]
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as Parquet ({error}): give a Parquet file") from None
