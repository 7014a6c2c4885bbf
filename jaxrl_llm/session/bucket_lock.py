"""The lock of a work directory in a bucket: one run at a time, also after a host that held it is gone for ever.

An object of a bucket cannot be exchanged in one step, but it can be written on the condition that it is new. So the
lock is a row of claims, lock/1, lock/2 and so on, of which the highest one counts. The store gives a number to one
process alone, and no number is used twice. The owner writes its claim again every RENEW seconds.
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

from filelock._identity import host_name, owner_is_stale, process_start_token  # as in `lock`

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import bucket
from jaxrl_llm.session.lock import LOCK, POLL, RENEW, STALE

FIELD = "--workdir"


class BucketLock:
    """The lock of a workdir in a bucket, which a thread renews."""

    def __init__(self, fs: Any, path: str):
        self._fs, self._path, self._number = fs, path, 0
        self._claim = {"pid": os.getpid(), "host": host_name(), "start": process_start_token(os.getpid())}
        self._claim["token"] = secrets.token_hex(8)
        self._renewed, self._released = time.monotonic(), Event()

    def acquire(self) -> None:
        """Takes the lock. Watches a claim of another host for STALE seconds, unless it is renewed meanwhile.

        It compares no clocks of two hosts. Raises: UserError, if a process holds the lock that has not ended.
        """
        first, since = {}, time.monotonic()
        while True:
            number, owner = self._newest()
            watched = owner == first and time.monotonic() - since > STALE + POLL
            if not owner or owner_is_stale(owner["pid"], owner["host"], owner["start"]) or watched:
                if self._take(number + 1):
                    break
                continue
            if owner["host"] == host_name() or (first and owner["token"] == first["token"] and owner != first):
                raise UserError(
                    f"{FIELD} {self._path} is in use by {_name(owner)}: wait for its end, give another, or, if it has "
                    f"ended, remove the objects {self._path}/{LOCK}/*"
                )
            if owner != first:
                print(
                    f"note: {self._path}/{LOCK} is of {_name(owner)}: watching for {STALE:.0f} s whether it renews it",
                    flush=True,
                )
                first, since = owner, time.monotonic()
            time.sleep(POLL)
        if owner:
            print(f"note: {self._path}/{LOCK} was of {_name(owner)}, which has ended or is lost: taken", flush=True)
        for name, _ in self._claims()[:-1]:
            with suppress(FileNotFoundError):
                self._fs.rm_file(name)
        Thread(target=self._renew, daemon=True).start()

    def release(self) -> None:
        """Empties the claim. It stays, because its number must not be used again."""
        self._released.set()
        if self._newest()[1].get("token") == self._claim["token"]:
            self._fs.pipe_file(self._object(self._number), b"{}")

    def check(self, *, now: bool = False) -> None:
        """Raises: UserError, if another process has taken the lock; now: asks the bucket in any case."""
        if now or time.monotonic() - self._renewed > STALE:
            with bucket.reaching(FIELD, self._path):
                number, owner = self._newest()
            if (number, owner.get("token")) != (self._number, self._claim["token"]):
                raise UserError(
                    f"the lock of {self._path} was taken by {_name(owner)}, because this process did not renew it for "
                    f"{STALE:.0f} s (it was stopped, or the network did not answer): end one of the two runs"
                )

    def _renew(self) -> None:
        """Runs in a thread."""
        count = 0
        while not self._released.wait(RENEW):
            with suppress(Exception):  # the network may be back at the next time
                self.check(now=True)
                count += 1
                self._fs.pipe_file(self._object(self._number), json.dumps(self._claim | {"renewed": count}).encode())
                self._renewed = time.monotonic()

    def _claims(self) -> list[tuple[str, int]]:
        """Returns the claims, as name and number, the highest last."""
        with suppress(FileNotFoundError):
            names = self._fs.ls(f"{self._path}/{LOCK}", detail=False)
            numbered = [(name, name.rpartition("/")[2]) for name in names]
            return sorted(((name, int(x)) for name, x in numbered if x.isdecimal()), key=lambda claim: claim[1])
        return []

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """Returns the number of the highest claim, and its owner; {}: nobody holds the lock."""
        while claims := self._claims():
            with suppress(FileNotFoundError):  # a newer owner has removed it meanwhile
                return claims[-1][1], json.loads(self._fs.cat_file(claims[-1][0]))
        return 0, {}

    def _take(self, number: int) -> bool:
        """Makes a claim. Returns False, if another process has made it."""
        # A repeated request of the library may meet the object that its first one has made, so the content decides.
        with suppress(FileExistsError):
            self._fs.pipe_file(self._object(number), json.dumps(self._claim).encode(), mode="create")
        self._number, (_, owner) = number, self._newest()
        return owner.get("token") == self._claim["token"]

    def _object(self, number: int) -> str:
        return f"{self._path}/{LOCK}/{number}"


def _name(owner: dict[str, Any]) -> str:
    # Behind the host's name, filelock writes the namespace of its processes.
    return f"process {owner['pid']} on {owner['host'].partition('?')[0]}" if owner else "a process that has ended"


@contextmanager
def locked(fs: Any, path: str) -> Iterator[BucketLock]:
    """Holds the lock of a workdir in a bucket. Raises: UserError, if another process holds it."""
    lock = BucketLock(fs, path)
    with bucket.reaching(FIELD, path):
        lock.acquire()
    try:
        yield lock
    finally:
        with suppress(Exception):  # a lock that is not released is taken over
            lock.release()
