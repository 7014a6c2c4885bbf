"""The lock of a work directory, which allows one run at a time on any disk, and survives the loss of a host.

Kernel locks do not work here: an NFSv3 server keeps the locks of a vanished host, and a bucket has none. Therefore the
lock is a file that names its owner, and whose modification time the owner renews (`filelock.SoftFileLease`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from filelock import LeaseSettingsMismatch, OwnerRecord, SoftFileLease, SoftFileLock, Timeout

# filelock has no public function for its name of this host, or for whether the owner of a lock has ended. So
# pyproject.toml pins the version of filelock.
from filelock._identity import host_name, owner_is_stale

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine.disk import writing

LOCK = "lock"  # file in a workdir that a run has locked
RENEW, STALE = 30.0, 150.0  # seconds between renewals, and seconds without a renewal after which a lock is stale
POLL = 1.0  # seconds between two readings of a lock that another process holds


class Lock:
    """The lock of a work directory on a disk. A thread renews it."""

    def __init__(self, workdir: Path):
        self._workdir, self.file = workdir, workdir / LOCK
        # The lease must not be thread-local, because after a signal another thread closes the run.
        self._lease = SoftFileLease(
            self.file, lease_duration=STALE, heartbeat_interval=RENEW, thread_local=False, blocking=False
        )

    def acquire(self) -> None:
        """Acquires the lock. If another host holds it, watches for STALE seconds whether that host renews it.

        The clocks of two hosts are never compared. Raises: UserError, if a running process holds the lock.
        """
        # Each reading shows owner and last renewal of another process's lock, None while no process holds the lock.
        watched_reading, previous_reading, watch_start = None, None, time.monotonic()
        while True:
            reading = self._read()
            previous_reading = reading or previous_reading
            with suppress(Timeout, LeaseSettingsMismatch):
                self._lease.acquire()
                break
            if not reading:  # another process has acquired the lock since this reading
                continue
            if reading.is_owner_dead():
                self._remove(reading)
            elif reading.is_on_this_host() or (watched_reading and watched_reading != reading and reading.owner):
                raise UserError(self._in_use_message(reading.owner))
            elif watched_reading != reading:  # the first reading, or a lock that is so new that it has no owner yet
                if not watched_reading:
                    # filelock removes a file without an owner after some seconds.
                    duration = f"for {STALE:.0f} s" if reading.owner else "shortly"
                    watching = f"watching {duration} whether that process still renews the lock"
                    print(f"note: {reading} holds {self.file}: {watching}", flush=True)
                watched_reading, watch_start = reading, time.monotonic()
            elif time.monotonic() - watch_start > STALE + POLL:  # filelock cannot remove it on this file system
                self._remove(reading)
            time.sleep(POLL if watched_reading else 0)
        # fsync sends the file to the server, so that other hosts of an NFS see it immediately.
        with self.file.open("rb") as file:
            os.fsync(file.fileno())
        if previous_reading:
            print(
                f"note: this run has taken {self.file} from {previous_reading}, which has ended or is lost", flush=True
            )

    def release(self) -> None:
        """Removes the lock's file, unless another process has taken the lock."""
        self._lease.release()

    def check(self) -> None:
        """Raises: UserError, if another process has taken the lock because this process did not renew it in time."""
        if self._lease.compromise:
            raise UserError(
                f"--workdir {self._workdir}: another process has taken the lock, because this process did not renew it "
                f"for {STALE:.0f} s (it was stopped, or the disk did not answer): stop one of the two runs"
            )

    def _read(self) -> LockReading | None:
        """Returns a reading of the lock's file, or None if the file does not exist."""
        with suppress(FileNotFoundError):
            file_stat = self.file.stat()
            return LockReading(self._lease.owner, file_stat.st_ino, file_stat.st_mtime_ns)
        return None

    def _remove(self, stale_reading: LockReading) -> None:
        """Removes a stale lock on file systems such as NFS, where filelock does not because it cannot swap two names.

        If several processes find the same stale lock, only one removes it, and none removes the new lock of that
        process.
        """
        with suppress(Timeout), SoftFileLock(f"{self.file}.taken", timeout=POLL):
            if self._read() == stale_reading:
                self._lease.force_break()

    def _in_use_message(self, owner: OwnerRecord | None) -> str:
        """Returns the error for a work directory that a running process has locked."""
        with (
            TemporaryFile(dir=self._workdir) as probe_file,
            suppress(FileNotFoundError),
        ):  # the clock of the disk itself
            seconds = max(os.fstat(probe_file.fileno()).st_mtime - self.file.stat().st_mtime, 0)
            return (
                f"--workdir {self._workdir} is in use by {_describe_owner(owner)}, which renewed its lock "
                f"{seconds:.0f} s ago: wait until that run ends, or use another --workdir; if that process no longer "
                f"exists, remove {self.file}"
            )
        return f"--workdir {self._workdir} was in use by {_describe_owner(owner)} until now: start this run again"


class LockReading(NamedTuple):
    """One reading of a lock's file. Two readings differ if the owner has renewed the lock in between."""

    owner: OwnerRecord | None  # None if the owner has not been written yet
    inode: int
    modified: int  # modification time in nanoseconds

    def is_owner_dead(self) -> bool:
        """Returns whether the owner was a process of this host that no longer exists."""
        owner = self.owner
        return owner is not None and owner_is_stale(owner.pid, owner.hostname, owner.start)

    def is_on_this_host(self) -> bool:
        """Returns whether the owner is a process of this host."""
        return self.owner is not None and self.owner.hostname == host_name()

    def __str__(self) -> str:
        return _describe_owner(self.owner)


def _describe_owner(owner: OwnerRecord | None) -> str:
    # filelock appends "?" and the process namespace to the host's name.
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}" if owner else "an unknown process"


@contextmanager
def locked(workdir: Path) -> Iterator[Lock]:
    """Creates the work directory and holds its lock. Removes the folders that it created at the end, if they are empty.

    Raises: UserError, if another process holds the lock or the disk write fails.
    """
    created_folders = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    with writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        lock = Lock(workdir)
        lock.acquire()
    try:
        yield lock
    finally:
        lock.release()
        with suppress(OSError):  # the folder is not empty
            for folder in created_folders:
                folder.rmdir()
