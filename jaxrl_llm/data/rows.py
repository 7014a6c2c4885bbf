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
from jaxrl_llm.config.names import bind, is_call, resolve
from jaxrl_llm.config.schema import check_call
from jaxrl_llm.data import formats, hub, image_columns, image_rows
from jaxrl_llm.data.formats import Columns, Row
from jaxrl_llm.data.image_rows import RowImages
from jaxrl_llm.errors import MissingHere, UserError, check_local, describe
from jaxrl_llm.machine import bucket, extras
from jaxrl_llm.tasks import CONVERTERS, SOURCES

FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")
KINDS = ".json, .csv, .jsonl or .parquet"  # file kinds in error messages; all but .parquet may also end with .gz
MAX_FILES_SHOWN = 5  # file names in an error message


@dataclass(frozen=True)
class SourceRows:
    """Rows of one source, with a checked column "prompt": text, or a list of messages."""

    rows: list[Row]
    numbers: list[int]  # number of each row in its source, from 1
    dropped: int  # number of rows for which convert returned None
    read_as: str = ""  # note on how columns other than "prompt" and "answer" were read
    images: RowImages | None = None  # images of the prompts; None if the model reads no images


def check_source(field: str, source: str) -> None:
    """Raises: UserError, naming the field, if `source` is neither a task nor a file of a supported kind."""
    if source.startswith(memory.PREFIX):
        memory.rows_of(source, field)
        return
    if is_call(source):
        check_call(source, SOURCES, field)
        return
    if source.endswith(".parquet"):
        extras.require("pyarrow", "parquet", f"{field} = {source!r}")
    if source.endswith(FILES) or hub.check(field, source):
        return
    path = Path(source).expanduser()
    if path.is_dir():
        raise UserError(f"{field} = {source!r} is a folder: {_folder_hint(path, source.rstrip('/'))}")
    file, _, split = source.rpartition("@")
    if file.endswith(FILES):
        raise UserError(f"{field} = {source!r}: a file has no split {split!r}; set the field to {file!r}")
    if "/" in source or path.exists() or path.suffix in (".gz", ".zip", ".tsv", ".txt", ".xlsx", ".arrow", ".zst"):
        raise UserError(f"{field} = {source!r}: a file of rows must be {KINDS}; convert it to one of these kinds")
    check_call(source, SOURCES, field)


def check_exists(field: str, source: str) -> None:
    """Raises: MissingHere, naming the field, if `source` is a path or a pattern that matches no file."""
    if source.endswith(FILES):
        _matching_files(source, field)


def _folder_hint(folder: Path, user_path: str) -> str:
    """Returns a hint which files in a folder, or one level below it, can be a source.

    user_path: path of the folder as the user wrote it.
    """
    files = sorted(path.relative_to(folder) for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_file())
    files = [file for file in files if file.name.endswith(FILES)]
    if not files:
        return f"the folder has no file of rows ({KINDS}); name a file of rows"
    shallowest = min((file.parent for file in files), key=lambda parent: len(parent.parts))
    nearest = [file for file in files if file.parent == shallowest]
    train = [file for file in nearest if file.name.startswith("train")]
    first, *other_files = train or nearest
    if not other_files:
        return f"name its file {str(Path(user_path) / first)!r}"
    ending = "".join(first.suffixes[-2:]) if first.suffix == ".gz" else first.suffix
    pattern = Path(user_path) / first.parent / f"{'train' if train else ''}*{ending}"
    return f"name a file in it, for example {first.name}, or the pattern {str(pattern)!r}"


def is_task(source: str) -> bool:
    """Returns whether a source names a function that makes rows, and not a file, rows in memory or a hub id."""
    return not (source.endswith(FILES) or source.startswith(memory.PREFIX) or hub.is_hub_source(source))


def load_rows(source: str, convert: str = "", field: str = "data.convert", columns: Columns = Columns()) -> SourceRows:  # noqa: B008
    """Loads the rows of a task ("arithmetic.train"), a function, "function(size=9)", a file, a pattern or a hub id.

    convert: name of a function row -> row, in `jaxrl_llm.tasks` or dotted, which makes the column "prompt" or returns
    None to drop the row; "" if `formats.read` reads the rows; field: config field of `convert`, for errors;
    columns: settings for `formats.read`. Raises: UserError, naming the file, the line or row, and the problem.
    """
    rows = _source_rows(source, field)
    if not rows:
        raise UserError(f"{source} holds no rows: name a source that has rows")
    read_notes: dict[str, None] = {}  # ordered set of notes on how rows were read
    if convert:
        function = resolve(convert, CONVERTERS, field)
        converted = [_converted(source, convert, function, i, row) for i, row in enumerate(rows, 1)]
    else:
        converted = [_read_row(source, i, row, columns, read_notes) for i, row in enumerate(rows, 1)]
        if columns.answer_column and not any(columns.answer_column in row for row in rows):
            present = formats.columns_text(dict.fromkeys(name for row in rows for name in row))
            raise UserError(
                f"config.data.answer_column = {columns.answer_column!r}: {source} has no such column ({present}); name "
                "the column that holds the answer"
            )
    numbers = [i for i, row in enumerate(converted, 1) if row is not None]
    checked = [_checked(source, i, converted[i - 1]) for i in numbers]
    if not checked:
        raise UserError(
            f"{source}: {convert} returned None for all {len(rows)} rows, so no row is left; set {field} to another "
            "function"
        )
    read_as_text = "; ".join(x for x in read_notes if x)
    if columns.images is None:
        checked, images = [_with_text(source, i, row) for i, row in zip(numbers, checked, strict=True)], None
    else:
        checked, images = _with_images(source, numbers, checked, columns)
    return SourceRows(checked, numbers, len(rows) - len(checked), read_as_text, images)


def _source_rows(source: str, convert_field: str) -> list[Row]:
    """Returns the rows of a source as they are stored.

    convert_field: config field or flag of the convert function. Errors name the field of the source, which is in the
    same section: `data.source` beside `data.convert`, or --task beside --convert.
    """
    field = "--task" if convert_field == "--convert" else f"config.{convert_field.removesuffix('convert')}source"
    if source.startswith(memory.PREFIX):
        return memory.rows_of(source, field)
    if source.endswith(FILES):
        return [row for path in _matching_files(source, field) for row in _read_file(path)]
    return hub.load(source) if hub.is_hub_source(source) else _generated(source)


def _read_row(source: str, number: int, row: Any, columns: Columns, notes: dict[str, None]) -> Row:
    """Returns `formats.read(row)`, and adds the note on how the row was read to `notes`, an ordered set."""
    if not isinstance(row, dict):
        raise UserError(f"{source} row {number} is {row!r}: every row must be a dict of columns")
    try:
        row, note = formats.read(row, columns)
    except ValueError as error:
        raise UserError(f"{source} row {number} {error}") from None
    notes[note] = None
    return row


def _checked(source: str, number: int, row: Any) -> Row:
    """Returns a row with a checked prompt: text, or a list of messages."""
    if not isinstance(row, dict) or "prompt" not in row:
        columns = formats.columns_text(row) if isinstance(row, dict) else repr(row)
        raise UserError(
            f"{source} row {number} has no column 'prompt' ({columns}): the convert function must make this column"
        )
    # Rows of pandas hold lists as arrays.
    prompt = row["prompt"].tolist() if hasattr(row["prompt"], "tolist") else row["prompt"]
    if not prompt or not (isinstance(prompt, str) or _is_chat(prompt)):
        raise UserError(
            f"{source} row {number}: prompt is {prompt!r:.200}, but must be text, or a list of messages with role and "
            "content"
        )
    if isinstance(prompt, str):
        return row
    has_nulls = any(None in message.values() or "tool_calls" in message for message in prompt)
    # The kind of the source is checked last, because the check reads the disk for each row.
    if has_nulls and (source.endswith(".parquet") or hub.is_hub_source(source)):
        # Arrow gives every message, and all arguments of its calls, each key that another message has.
        prompt = [_without_nulls(message) for message in prompt]
    # A row whose prompt is unchanged is returned without a copy, because most rows are like this.
    return row if row["prompt"] is prompt and isinstance(prompt, list) else row | {"prompt": list(prompt)}


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without keys that hold None. Its content stays, because `image_columns` reads its parts."""
    other_keys = {key: value for key, value in message.items() if key != "content"}
    return formats.without_nulls(other_keys) | ({"content": message["content"]} if "content" in message else {})


def _with_text(source: str, number: int, row: Row) -> Row:
    """Returns a row for a text model: the content of each message is one text."""
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
    """Returns rows for a vision-language model, whose messages have a named part for each image, and their images."""
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
    has_messages = isinstance(prompt, (list, tuple)) and all(isinstance(message, dict) for message in prompt)
    # A message that calls tools may have no content.
    return has_messages and all("role" in message and message.keys() & {"content", "tool_calls"} for message in prompt)


def _text(source: str, number: int, content: Any) -> Any:
    """Returns a message's content, with text parts joined: templates of text models expect one text."""
    if not isinstance(content, (list, tuple)):
        return content
    for part in content:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise UserError(
                f"{source} row {number}: a message has the part {str(part)[:80]}, but this model reads text only; use "
                "parts of text"
            )
    return "".join(part["text"] for part in content)


def _generated(source: str) -> list[Any]:
    """Returns the rows that a task or a user function makes."""
    function = bind(source, SOURCES, "data source")
    try:
        return list(function())
    except Exception as error:  # user code
        raise UserError(f"data source {source} raised {describe(error)}") from error


def _converted(source: str, convert: str, function: Any, number: int, row: Row) -> Row | None:
    """Returns what the convert function makes of a row. Raises: UserError, if the function fails."""
    try:
        return function(row)
    except KeyError as error:
        columns = formats.columns_text(row)
        raise UserError(
            f"{source} row {number} has no column {error}, which {convert} reads ({columns}); add the column, or "
            "choose another convert function"
        ) from error
    except Exception as error:  # user code
        raise UserError(f"{source} row {number}: {convert} raised {describe(error)}") from error


def _matching_files(source: str, field: str) -> list[Path]:
    """Returns the file of a path, or all files that match a pattern, sorted by name.

    field: config field of the source, for errors. Raises: MissingHere, if no file matches.
    """
    check_local(field, source)
    if remote := bucket.address(source):
        return bucket.fetch_files(field, remote)
    path = Path(source).expanduser()
    if path.exists() or not has_magic(source):
        # The path is tried before it is read as a pattern, because a file may have [ or * in its name.
        files = [path] if path.exists() else []
    else:
        files = sorted(map(Path, glob(str(path))))
    if not files:
        folder = "this folder" if path.parent == Path() else f"the folder {path.parent}"
        folder_has = (
            f"{folder} has {_listed_files(path.parent)}" if path.parent.is_dir() else f"{folder} does not exist"
        )
        raise MissingHere(f"{field} = {source!r}: {path} does not exist; {folder_has}. Name an existing file")
    return files


def _listed_files(folder: Path) -> str:
    """Returns the first files of rows in a folder as text, for an error."""
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(FILES))
    hidden = f" and {len(names) - MAX_FILES_SHOWN} more" if len(names) > MAX_FILES_SHOWN else ""
    return ", ".join(names[:MAX_FILES_SHOWN]) + hidden if names else f"no file of rows ({KINDS})"


def _read_file(path: Path) -> list[Row]:
    """Returns the rows of a file of one of the kinds FILES. Raises: UserError, naming file, line and problem."""
    if path.is_dir():
        raise UserError(f"{path} is a folder, but must be a file of rows: {KINDS}")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): name a readable file") from None
    # Programs for Windows write a byte-order mark.
    content = content.removeprefix(b"\xef\xbb\xbf")
    if ".csv" in path.suffixes:
        return _read_csv(path, content)
    # A .json file holds an array if it begins with a bracket, and JSON lines otherwise.
    if ".json" in path.suffixes and content.lstrip().startswith(b"["):
        rows = _parse(path, "", content, "the file must be one array of JSON objects")
        return [_object(path, f" element {i}", row) for i, row in enumerate(rows, 1)]
    # The bytes are split, because `splitlines` of a str would also split at U+2028, which may be inside a JSON string.
    lines = enumerate(content.splitlines(), 1)
    expected = "every line must be one JSON object"
    expected += ", or the file an array of them" if ".json" in path.suffixes else ""
    return [
        _object(path, f" line {i}", _parse(path, f" line {i}", line, expected)) for i, line in lines if line.strip()
    ]


def _parse(path: Path, where: str, text: bytes, expected: str) -> Any:
    """Returns the value of JSON text. where: place in the file; expected: sentence on its right form, for errors.

    Raises: UserError, if the text is no JSON, no UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            line = where or f" line {error.lineno}"
            raise UserError(f"{path}{line}, column {error.colno} is no JSON ({error.msg}): {expected}") from None
        raise UserError(f"{path}{where} cannot be read ({error}): {expected}") from None


def _object(path: Path, where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{path}{where} is {type(row).__name__}: every line must be one JSON object")
    return row


def _read_csv(path: Path, content: bytes) -> list[Row]:
    """Reads CSV with all values as text, so that an answer "007" keeps its zeros."""
    try:
        # newline="" shows the csv module the line ends, which may be part of a quoted text.
        rows = list(csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as CSV in UTF-8 ({error}): convert it to .jsonl") from None
    for i, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise UserError(
                f"{path} row {i} must have one value per column of the first line: put text with commas in quotes"
            )
    return rows


def _read_parquet(path: Path) -> list[Row]:
    """Returns the rows of a Parquet file. Raises: UserError, if it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        # The table is read in pieces, so that memory never holds the whole table and all rows.
        pieces = pyarrow.parquet.ParquetFile(path).iter_batches()
        return [row for piece in pieces for row in piece.to_pylist()]
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as Parquet ({error}): name a valid Parquet file") from None
