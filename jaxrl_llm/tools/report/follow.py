"""Follows a JSON-lines file that grows, and reads every line of it once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError


class Lines:
    """The whole lines of a file: `begin`, then `new`, again and again. A run that goes back replaces the file."""

    def __init__(self, file: Path):
        self.file = file
        self._inode, self._end, self._last = -1, 0, b""  # the last line was read up to `_end`

    def begin(self) -> bool:
        """Returns whether this is another file than at the last call: then `new` begins at its first line."""
        try:
            with self.file.open("rb") as file:
                about = os.fstat(file.fileno())
                file.seek(self._end - len(self._last))
                # An inode is used again after a file is replaced, so the last line is compared too.
                same = about.st_ino == self._inode and about.st_size >= self._end
                if same and file.read(len(self._last)) == self._last:
                    return False
                inode = about.st_ino
        except FileNotFoundError:
            inode = -1
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error}): restore the file") from error
        self._inode, self._end, self._last = inode, 0, b""
        return True

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yields the whole lines since the last call, each with its place in the file. Raises: UserError."""
        if self._inode == -1:
            return
        try:
            with self.file.open("rb") as file:
                file.seek(self._end)
                for line in file:
                    # An incomplete line is being written, and the next call reads it whole.
                    if not line.endswith(b"\n"):
                        break
                    if line.strip():
                        yield self._end, line
                    # The position moves after the yield, so that a line that cannot be parsed is read and reported
                    # again.
                    self._end, self._last = self._end + len(line), line
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error}): restore the file") from error

    def parse(self, line: bytes) -> dict[str, Any]:
        """Returns the object of a line. Raises: UserError, if it is none."""
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{self.file} cannot be read ({error}): restore the file") from error
        if not isinstance(value, dict):
            raise UserError(f"{self.file} cannot be read (a line is no JSON object): restore the file")
        return value

    def line(self, at: int) -> dict[str, Any]:
        """Returns the object of the line at a place. Raises: UserError."""
        try:
            with self.file.open("rb") as file:
                file.seek(at)
                return self.parse(file.readline())
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error}): restore the file") from error
