"""Documents of a corpus: JSON lines with `id` and `contents`, read from the disk only where they are asked for."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError


class RetrieverError(Exception):
    """The retriever gave no answer, or none that can be used."""


class Document(NamedTuple):
    """A document. Search-R1 has a title in quotes on the first line of the contents."""

    id: str
    contents: str


class DocumentFile(Sequence[Document]):
    """The documents of a file of JSON lines. In memory are only the places where its lines begin."""

    def __init__(self, path: Path, places: np.ndarray | None = None):
        """places [N + 1]: where each line begins, and the end of the last; None: finds them, and checks every line.

        Raises: UserError, naming file and line, for a line that is no document.
        """
        self._path = path
        try:
            # Mapped: a corpus may be larger than the memory, and processes share its pages.
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            # ValueError: the file is empty.
            raise UserError(f"the corpus {path} cannot be read: {error}") from error
        self.places = np.array([0, *self._ends()], np.int64) if places is None else places
        if places is None:
            for _ in self:
                pass

    def _ends(self) -> Iterator[int]:
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
            "".join(parsed).encode()  # Servers cannot send a lone surrogate, as \ud800 is.
            return parsed
        except (ValueError, KeyError, TypeError) as error:
            line = f"the corpus {self._path}, line {number + 1}: {type(error).__name__} {error}"
            form = "an object with id and contents, or id, title and text, in Unicode"
            raise UserError(f"{line}: give {form}") from error


def document(row: dict[str, Any]) -> Document:
    """Returns the document of a row with `id` and `contents`, or with `id`, `title` and `text`. Raises: KeyError."""
    if "contents" in row:
        return Document(str(row["id"]), str(row["contents"]))
    return Document(str(row["id"]), f'"{row["title"]}"\n{row["text"]}')


def shown(documents: list[Document]) -> str:
    """Formats documents as Search-R1 does: the first line of the contents is the title."""
    lines = []
    for number, (_, contents) in enumerate(documents, 1):
        title, _, rest = contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {rest}\n")
    return "".join(lines)


def information(text: str) -> str:
    """Returns what a policy reads after a search, whose documents `shown` has formatted."""
    return f"\n\n<information>{text}</information>\n\n"
