"""The lock of a workdir: one run at a time, on any disk, also after a host that held it is gone for ever.

Locks of the kernel do not serve: a server of NFSv3 keeps those of a vanished host, and a bucket has none. So the lock
is a file that names its owner, and whose time the owner renews (`filelock.SoftFileLease`).
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

# No public function says under which name a lock knows this host, and whether an owner has ended. pyproject.toml pins
# the version.
from filelock._identity import host_name, owner_is_stale

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine.disk import writing

LOCK = "lock"  # file in a workdir that a run has locked
RENEW, STALE = 30.0, 150.0  # seconds between renewals, and without one until others may take the lock
POLL = 1.0  # seconds


class Lock:
    """The lock of a workdir, which a thread renews."""

    def __init__(self, workdir: Path):
        self._workdir, self.file = workdir, workdir / LOCK
        # thread_local: after a signal, another thread closes the run.
        self._lease = SoftFileLease(
            self.file, lease_duration=STALE, heartbeat_interval=RENEW, thread_local=False, blocking=False
        )

    def acquire(self) -> None:
        """Takes the lock. Watches one of another host for STALE seconds, unless it is renewed meanwhile.

        It compares no clocks of two hosts. Raises: UserError, if a process holds the lock that has not ended.
        """
        first, former, since = None, None, time.monotonic()
        while True:
            before = self._seen()
            former = before or former
            with suppress(Timeout, LeaseSettingsMismatch):
                self._lease.acquire()
                break
            if not before:
                continue
            if before.ended():
                self._remove(before)
            elif before.here() or (first and first != before and before.owner):
                raise UserError(self._in_use(before.owner))
            elif first != before:  # the first one seen, or one that was made just now and does not name its owner yet
                if not first:
                    # filelock takes a file without an owner after some seconds.
                    time_limit = f"for {STALE:.0f} s" if before.owner else "shortly"
                    print(f"note: {self.file} is of {before}: watching {time_limit} whether it renews it", flush=True)
                first, since = before, time.monotonic()
            elif time.monotonic() - since > STALE + POLL:  # filelock has not done it: see `_remove`
                self._remove(before)
            time.sleep(POLL if first else 0)
        # Another host of NFS sees what is written here at once only if it is on the server.
        with self.file.open("rb") as file:
            os.fsync(file.fileno())
        if former:
            print(f"note: {self.file} was of {former}, which has ended or is lost: this run has taken it", flush=True)

    def release(self) -> None:
        """Removes the file, unless another process has taken it."""
        self._lease.release()

    def check(self) -> None:
        """Raises: UserError, if another process has taken the lock, because this one could not renew it for long."""
        if self._lease.compromise:
            raise UserError(
                f"the lock of {self._workdir} was taken by another process, because this one did not renew it for "
                f"{STALE:.0f} s (it was stopped, or the disk did not answer): end one of the two runs"
            )

    def _seen(self) -> Seen | None:
        """Returns what the lock's file shows; None: there is no file."""
        with suppress(FileNotFoundError):
            found = self.file.stat()
            return Seen(self._lease.owner, found.st_ino, found.st_mtime_ns)
        return None

    def _remove(self, judged: Seen) -> None:
        """Removes a stale lock where the file system cannot exchange two names, as NFS: there filelock does not do it.

        Of several processes that judged the same lock, only one removes it: none may remove the lock of the first.
        """
        with suppress(Timeout), SoftFileLock(f"{self.file}.taken", timeout=POLL):
            if self._seen() == judged:
                self._lease.force_break()

    def _in_use(self, owner: OwnerRecord | None) -> str:
        with TemporaryFile(dir=self._workdir) as now, suppress(FileNotFoundError):  # the clock of the disk itself
            seconds = max(os.fstat(now.fileno()).st_mtime - self.file.stat().st_mtime, 0)
            return (
                f"--workdir {self._workdir} is in use by {_name(owner)}, which was last seen {seconds:.0f} s ago: wait "
                f"for its end, give another, or, if it has ended, remove {self.file}"
            )
        return f"--workdir {self._workdir} was in use by {_name(owner)} until now: start again"


class Seen(NamedTuple):
    """A lock's file: while its owner renews it, it changes."""

    owner: OwnerRecord | None  # None: not yet written
    inode: int
    modified: int  # nanoseconds

    def ended(self) -> bool:
        """Returns whether the owner was a process of this host, and has ended."""
        owner = self.owner
        return owner is not None and owner_is_stale(owner.pid, owner.hostname, owner.start)

    def here(self) -> bool:
        """Returns whether the owner is a process of this host."""
        return self.owner is not None and self.owner.hostname == host_name()

    def __str__(self) -> str:
        return _name(self.owner)


def _name(owner: OwnerRecord | None) -> str:
    # filelock writes the process namespace behind the host's name.
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}" if owner else "an unknown process"


@contextmanager
def locked(workdir: Path) -> Iterator[Lock]:
    """Creates the workdir and holds its lock. At the end it removes the folders that it created, if they are empty.

    Raises: UserError, if another process holds the lock or the disk write fails.
    """
    made = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    with writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        lock = Lock(workdir)
        lock.acquire()
    try:
        yield lock
    finally:
        lock.release()
        with suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()
