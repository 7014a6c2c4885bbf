"""Documents of a corpus: JSON lines with `id` and `contents`, of which each is read from the disk when it is needed."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError


class RetrieverError(Exception):
    """The retriever gave no answer, or an unusable one."""


class Document(NamedTuple):
    """A document of a corpus. The first line of its contents may be a title in quotes, as in Search-R1."""

    id: str
    contents: str


class DocumentFile(Sequence[Document]):
    """Documents of a file of JSON lines. Only the offsets of the lines are in memory."""

    def __init__(self, path: Path, places: np.ndarray | None = None):
        """places: [N + 1] offsets of the lines in bytes, and the end of the last line; None to find them.

        If the offsets are searched, every line is checked too.
        Raises: UserError, naming file and line, for a line that is no document.
        """
        self._path = path
        try:
            # The file is mapped, because a corpus may be larger than the memory, and processes share its pages.
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file is a ValueError
            raise UserError(f"the corpus {path} cannot be read ({error}): name a file of JSON lines") from error
        self.places = np.array([0, *self._line_ends()], np.int64) if places is None else places
        if places is None:
            for _ in self:
                pass

    def _line_ends(self) -> Iterator[int]:
        """Yields the offset of the end of each line. Raises: UserError, for an empty line."""
        while line := self._bytes.readline():
            if not line.strip():
                raise UserError(f"the corpus {self._path} has an empty line: remove it")
            yield self._bytes.tell()

    def __len__(self) -> int:
        return len(self.places) - 1

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start, end = self.places[number : number + 2]
        try:
            parsed = document(json.loads(self._bytes[start:end]))
            "".join(parsed).encode()  # fails for unpaired surrogates such as \ud800, which servers cannot send
            return parsed
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the corpus {self._path}, line {number + 1}: {type(error).__name__} {error}; each line must be a JSON "
                "object with id and contents, or with id, title and text"
            ) from error


def document(row: dict[str, Any]) -> Document:
    """Returns the document of a row with `id` and `contents`, or with `id`, `title` and `text`. Raises: KeyError."""
    if "contents" in row:
        return Document(str(row["id"]), str(row["contents"]))
    return Document(str(row["id"]), f'"{row["title"]}"\n{row["text"]}')


def shown(documents: list[Document]) -> str:
    """Returns documents as text in the form of Search-R1, with the first line of the contents as title."""
    lines = []
    for number, (_, contents) in enumerate(documents, 1):
        title, _, body = contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {body}\n")
    return "".join(lines)


def information(text: str) -> str:
    """Returns the text that a policy reads after a search. text: result of `shown`."""
    return f"\n\n<information>{text}</information>\n\n"
