"""The disk of a workdir: the lock, the free space, and a one-line error for a failed write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from jaxrl_llm.errors import UserError

LOCK = "lock"  # file in a workdir that a running run has locked


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Creates the workdir and holds its lock. The kernel frees the lock when the process ends, even by kill -9.

    At the end it removes the folders that it created, if they are empty.
    Raises: UserError, if another process holds the lock or the disk write fails.
    """
    made = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    lock = FileLock(workdir / LOCK, blocking=False, thread_local=False, fallback_to_soft=False)
    with writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            problem = f"--workdir {workdir} is in use by another run: wait for its end, or give another"
            raise UserError(problem) from None
        except NotImplementedError:
            print(
                f"note: the file system of {workdir} has no locks: nothing stops a second run there, so start only one"
            )
    try:
        yield
    finally:
        (workdir / LOCK).unlink(missing_ok=True)  # while locked: after the release it may be the lock of another run
        with suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()
        lock.release()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an OSError of the block, which writes below `folder`, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(cannot_write(folder, error.strerror or str(error))) from error


def replace(file: Path, text: str) -> None:
    """Writes a file that is whole or not there after a crash of the host too, and replaces what was there."""
    partial = file.with_name(file.name + ".partial")
    with partial.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, file)


def cannot_write(folder: Path, reason: str) -> str:
    """Error line for a folder in which a write failed."""
    return (
        f"{folder} cannot be written ({reason}; {gigabytes(free(folder))} free there): "
        "make room; the same command goes on from the last checkpoint"
    )


def free(folder: Path) -> int:
    """Free bytes on the disk of a folder. The folder need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
