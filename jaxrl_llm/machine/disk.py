"""The disk of a workdir: the free space, and a one-line error for a failed write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrl_llm.errors import UserError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an OSError of the block, which writes below `folder`, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(cannot_write(folder, error.strerror or str(error))) from error


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields a new folder, which replaces `folder` after the block: `folder` is never half-written.

    Raises: UserError, if a write fails.
    """
    unfinished, old = (folder.with_name(folder.name + suffix) for suffix in (".partial", ".old"))
    with writing(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        # A folder cannot be replaced in one step, so the old one moves aside and is deleted last.
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        unfinished.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def replace(file: Path, text: str) -> None:
    """Writes a file that is whole or not there after a crash of the host too, and replaces what was there."""
    partial = file.with_name(file.name + ".partial")
    with partial.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        # The data must reach the disk before the rename, because a file system may keep the new name and lose the data.
        os.fsync(out.fileno())
    os.replace(partial, file)


def cannot_write(folder: Path, reason: str) -> str:
    """Error line for a folder in which a write failed.

    Without the free space, because two failed writes of one full disk must give one line."""
    return f"{folder} cannot be written ({reason}): make room, and the same command resumes from the last checkpoint"


def free(folder: Path) -> int:
    """Free bytes on the disk of a folder. The folder need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
