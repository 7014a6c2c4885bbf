"""Follows a JSON-lines file that grows, and reads every line of it once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.errors import UserError


class Lines:
    """Complete lines of a growing file, which a run that rolls back replaces. Callers repeat `begin`, then `new`."""

    def __init__(self, file: Path):
        self.file = file
        self._inode, self._end, self._last = -1, 0, b""  # the last line was read up to `_end`

    def begin(self) -> bool:
        """Returns whether the file was replaced since the last call. If so, `new` starts at its first line."""
        try:
            with self.file.open("rb") as file:
                status = os.fstat(file.fileno())
                file.seek(self._end - len(self._last))
                # The last line is compared too, because a new file may get the inode of the old one.
                is_same_file = status.st_ino == self._inode and status.st_size >= self._end
                if is_same_file and file.read(len(self._last)) == self._last:
                    return False
                inode = status.st_ino
        except FileNotFoundError:
            inode = -1
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error}): restore the file") from error
        self._inode, self._end, self._last = inode, 0, b""
        return True

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yields the complete lines since the last call, each with its offset in the file. Raises: UserError."""
        if self._inode == -1:
            return
        try:
            with self.file.open("rb") as file:
                file.seek(self._end)
                for line in file:
                    # A line without an end is being written, and the next call reads it.
                    if not line.endswith(b"\n"):
                        break
                    if line.strip():
                        yield self._end, line
                    self._end, self._last = self._end + len(line), line
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error}): restore the file") from error

    def line(self, offset: int) -> bytes:
        """Returns the line at an offset. Raises: UserError, if the file cannot be read."""
        try:
            with self.file.open("rb") as file:
                file.seek(offset)
                return file.readline()
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error}): restore the file") from error
