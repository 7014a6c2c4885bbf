"""Disk writes that a crash cannot leave half done, one-line errors for failed writes, and the free disk space."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import bucket


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an OSError of the block into a UserError. folder: folder that the block writes to."""
    try:
        yield
    except OSError as error:
        raise UserError(cannot_write(folder, error.strerror or str(error), error.errno)) from error


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields a new folder that replaces `folder` after the block, so that `folder` is never half-written.

    Raises: UserError, if a write fails.
    """
    new_folder, old_folder = (folder.with_name(folder.name + suffix) for suffix in (".partial", ".old"))
    with writing(folder):
        shutil.rmtree(new_folder, ignore_errors=True)
        new_folder.mkdir(parents=True)
        yield new_folder
        # A folder cannot be replaced in one step, so the old one moves aside and is deleted last.
        shutil.rmtree(old_folder, ignore_errors=True)
        if folder.exists():
            folder.rename(old_folder)
        new_folder.rename(folder)
        shutil.rmtree(old_folder, ignore_errors=True)


def replace(file: Path, content: str | bytes) -> None:
    """Replaces the content of a file. After a crash of the host the file is the old or the new one, never a part."""
    partial = file.with_name(file.name + ".partial")
    try:
        with partial.open("wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            # The data must reach the disk first, because a file system may keep the new name and lose the data.
            os.fsync(out.fileno())
        os.replace(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def check_output(field: str, file: Path | None) -> None:
    """Checks, before the work, that a tool can write its output. field: flag of the file; file: None for no output.

    Raises: UserError, if the file is in a bucket, is a folder, or cannot be written.
    """
    if not file:
        return
    _refuse_bucket(field, file)
    if file.is_dir():
        raise UserError(f"{field} {file} is a folder: name a file in it")
    if file.parent.exists() and not file.parent.is_dir():
        raise UserError(f"{field} {file} cannot be created, because {file.parent} is a file: use another file")
    if not file.parent.is_dir():
        raise UserError(f"{field} {file}: folder {file.parent} does not exist: create it, or use another file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"{field} {file} is not writable by you: use another file")


@contextmanager
def writing_output(field: str, file: Path) -> Iterator[None]:
    """Turns an OSError of the block, which writes a tool's output, into a UserError. field: flag of the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{field} {file} cannot be written ({error.strerror or error}): use another file") from error


def check_output_folder(field: str, folder: Path | None) -> None:
    """Checks, before the work, that a tool can make a folder. field: flag of the folder; folder: None for no output.

    Raises: UserError, if the folder is in a bucket, has files already, or cannot be made.
    """
    if not folder:
        return
    _refuse_bucket(field, folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{field} {folder} exists and is not empty: name a new folder")
    # The folder itself is replaced, so its parent must be writable.
    existing = next(path for path in folder.absolute().parents if path.exists())
    if not existing.is_dir():
        raise UserError(f"{field} {folder} cannot be created, because {existing} is a file: use another folder")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{field} {folder}: {existing} is not writable by you: use another folder")


def _refuse_bucket(field: str, path: Path) -> None:
    """Raises: UserError, if the path of an output is in a bucket, which the tools do not write to."""
    if remote := bucket.address(path):
        raise UserError(f"{field} = {remote!r} is in a bucket: use a path on a disk, and copy the output afterwards")


def cannot_write(folder: Path, reason: str, number: int | None = None) -> str:
    """Returns the error message for a folder in which a write has failed. number: errno of the failure, None = unknown.

    The message omits the free space, so that two failed writes on one full disk give equal messages.
    """
    is_full = number in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free disk space" if is_full else "check the folder and your rights on it, or use another one"
    return f"{folder} cannot be written ({reason}): {remedy}; the same command resumes from the last checkpoint"


def free(folder: Path) -> int:
    """Returns the free bytes on the disk of a folder, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
