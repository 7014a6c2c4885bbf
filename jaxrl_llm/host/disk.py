"""The disk of a workdir: its lock, its room, and one line for what cannot be written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from jaxrl_llm.errors import UserError

LOCK = "lock"  # the file in a workdir that a run holds


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes the workdir, and is its only run. The kernel frees the lock of a process that is gone, however it went.

    A folder that this made and that is still empty at the end is removed.
    Raises: UserError, if another process has the lock.
    """
    made = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    lock = FileLock(workdir / LOCK, blocking=False, thread_local=False)
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
        (workdir / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()
        lock.release()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises: UserError, for an OSError of the block, which writes below `folder`."""
    try:
        yield
    except OSError as error:
        raise UserError(cannot_write(folder, error.strerror or str(error))) from error


def cannot_write(folder: Path, reason: str) -> str:
    """The line for a folder that takes no more."""
    return (
        f"{folder} cannot be written ({reason}; {gigabytes(free(folder))} free there): "
        "make room; the same command goes on from the last checkpoint"
    )


def free(folder: Path) -> int:
    """Bytes that may still be written to the disk of a folder, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
