"""The lock of a work directory in a bucket, which allows one run at a time, and survives the loss of a host.

A bucket cannot replace an object conditionally, but it can create an object on the condition that it is new. Therefore
the lock is a series of claims, lock/1, lock/2 and so on, of which the highest counts. The bucket lets only one process
create each number, and no number is used twice. The owner rewrites its claim every RENEW seconds.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

from filelock._identity import host_name, owner_is_stale, process_start_token  # the version is pinned, as in `lock`

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import bucket
from jaxrl_llm.session.lock import LOCK, POLL, RENEW, STALE

FIELD = "--workdir"  # argument that errors name


class BucketLock:
    """The lock of a work directory in a bucket. A thread renews it."""

    def __init__(self, fs: Any, path: str):
        self._fs, self._path, self._number = fs, path, 0
        self._claim = {"pid": os.getpid(), "host": host_name(), "start": process_start_token(os.getpid())}
        self._claim["token"] = secrets.token_hex(8)
        self._renewal_time, self._released = time.monotonic(), Event()

    def acquire(self) -> None:
        """Acquires the lock. If another host holds it, watches for STALE seconds whether that host renews its claim.

        The clocks of two hosts are never compared. Raises: UserError, if a running process holds the lock.
        """
        watched_owner, watch_start = {}, time.monotonic()
        while True:
            number, owner = self._newest_claim()
            is_stale = owner == watched_owner and time.monotonic() - watch_start > STALE + POLL
            if not owner or owner_is_stale(owner["pid"], owner["host"], owner["start"]) or is_stale:
                if self._claim_number(number + 1):
                    break
                continue
            # An owner that has renewed its claim since the last reading is running, and so is an owner on this host.
            has_renewed = watched_owner and owner["token"] == watched_owner["token"] and owner != watched_owner
            if owner["host"] == host_name() or has_renewed:
                raise UserError(
                    f"{FIELD} {self._path} is in use by {_describe_owner(owner)}: wait until that run ends, or use "
                    f"another {FIELD}; if that process no longer exists, remove the objects {self._path}/{LOCK}/*"
                )
            if owner != watched_owner:
                print(
                    f"note: {_describe_owner(owner)} holds {self._path}/{LOCK}: watching for {STALE:.0f} s whether "
                    "that process still renews the lock",
                    flush=True,
                )
                watched_owner, watch_start = owner, time.monotonic()
            time.sleep(POLL)
        if owner:
            print(
                f"note: {self._path}/{LOCK} was of {_describe_owner(owner)}, which has ended or is lost: taken",
                flush=True,
            )
        # Lower claims no longer count, so their objects are removed.
        for name, _ in self._claims()[:-1]:
            with suppress(FileNotFoundError):
                self._fs.rm_file(name)
        Thread(target=self._renew, daemon=True).start()

    def release(self) -> None:
        """Empties the claim. Its object stays, because its number must not be used again."""
        self._released.set()
        if self._newest_claim()[1].get("token") == self._claim["token"]:
            self._fs.pipe_file(self._object_path(self._number), b"{}")

    def check(self, *, ask_bucket: bool = False) -> None:
        """Raises: UserError, if another process has taken the lock.

        ask_bucket: True to read the claims now; False to read them only if the last renewal is older than STALE.
        """
        if ask_bucket or time.monotonic() - self._renewal_time > STALE:
            with bucket.bucket_errors(FIELD, self._path):
                number, owner = self._newest_claim()
            if (number, owner.get("token")) != (self._number, self._claim["token"]):
                raise UserError(
                    f"{FIELD} {self._path}: {_describe_owner(owner)} has taken the lock, because this process did not "
                    f"renew it for {STALE:.0f} s (it was stopped, or the network did not answer): stop one of the runs"
                )

    def _renew(self) -> None:
        """Renews the claim every RENEW seconds, in a thread."""
        renewals = 0
        while not self._released.wait(RENEW):
            with suppress(Exception):  # the next renewal may succeed, because network failures are often short
                self.check(ask_bucket=True)
                renewals += 1
                self._fs.pipe_file(
                    self._object_path(self._number), json.dumps(self._claim | {"renewed": renewals}).encode()
                )
                self._renewal_time = time.monotonic()

    def _claims(self) -> list[tuple[str, int]]:
        """Returns (object name, number) of each claim, the highest number last."""
        with suppress(FileNotFoundError):
            names = self._fs.ls(f"{self._path}/{LOCK}", detail=False)
            numbered = [(name, name.rpartition("/")[2]) for name in names]
            return sorted(((name, int(x)) for name, x in numbered if x.isdecimal()), key=lambda claim: claim[1])
        return []

    def _newest_claim(self) -> tuple[int, dict[str, Any]]:
        """Returns the number of the highest claim and its owner, which is {} if no process holds the lock."""
        while claims := self._claims():
            with suppress(FileNotFoundError):  # a newer owner has removed it meanwhile
                return claims[-1][1], json.loads(self._fs.cat_file(claims[-1][0]))
        return 0, {}

    def _claim_number(self, number: int) -> bool:
        """Creates the claim with this number. Returns False if another process has created it."""
        # The library may repeat a request and then find the object of its first request, so the content decides.
        with suppress(FileExistsError):
            self._fs.pipe_file(self._object_path(number), json.dumps(self._claim).encode(), mode="create")
        self._number, (_, owner) = number, self._newest_claim()
        return owner.get("token") == self._claim["token"]

    def _object_path(self, number: int) -> str:
        return f"{self._path}/{LOCK}/{number}"


def _describe_owner(owner: dict[str, Any]) -> str:
    # filelock appends "?" and the process namespace to the host's name.
    return f"process {owner['pid']} on {owner['host'].partition('?')[0]}" if owner else "a process that has ended"


@contextmanager
def locked(fs: Any, path: str) -> Iterator[BucketLock]:
    """Holds the lock of a work directory in a bucket. Raises: UserError, if another process holds the lock."""
    lock = BucketLock(fs, path)
    with bucket.bucket_errors(FIELD, path):
        lock.acquire()
    try:
        yield lock
    finally:
        with suppress(Exception):  # an unreleased lock becomes stale, and the next run takes it
            lock.release()
