"""Where a run is kept: in a folder of a disk, or in a bucket.

Orbax writes checkpoints into a bucket itself. The log cannot be there, because an object cannot be appended to: process
0 keeps log, config and decisions in a local folder, and copies them into the bucket before each checkpoint. So the
bucket has all that a checkpoint needs before the checkpoint counts, and a run on an empty disk resumes from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import bucket, distributed, progress
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.session import bucket_lock
from jaxrl_llm.session.bucket_lock import FIELD
from jaxrl_llm.session.lock import locked


class RunFolder:
    """A work directory on a disk."""

    def __init__(self, folder: Path):
        self.folder, self.name, self.checkpoints = folder, str(folder), folder / "checkpoints"
        self.check_lock: Callable[[], None] = lambda: None  # asks a bucket; raises: UserError, if the lock is lost

    def config(self) -> str:
        """Returns the text of the run's config; "": there is no run yet."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.folder / "config.json").read_text()
        return ""

    @contextmanager
    def taken(self, check: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Checks the folder and takes its lock, in process 0. Yields the check of the lock. Raises: UserError."""
        check()
        with locked(self.folder) as lock:
            yield lock.check

    def settle(self, *, shared: bool) -> None:
        """Checks, when process 0 has the lock, that all processes share the folder, if they must. Raises: UserError."""
        if shared:
            agreement.check_shared(self.folder)

    def named(self) -> AbstractContextManager[None]:
        """Makes the errors of a block name the work directory as the user does."""
        return nullcontext()

    def keep(self) -> None:
        """Copies what is in the folder to where the run is kept, before a checkpoint or a decision counts.

        Raises: UserError, if the workdir has vanished. Orbax would make it again, without config and log.
        """
        if not (self.folder / "config.json").is_file():
            raise UserError(f"{self.folder} has vanished: put it back; the same command goes on")

    def publish(self, name: str) -> None:
        """Copies the folder of a model to where the run is kept."""


class RunBucket(RunFolder):
    """A work directory in a bucket, and the local folder of this process for it."""

    def __init__(self, path: str):
        """Raises: MissingHere, if the package for this kind of bucket is not installed."""
        if not path.startswith("gs://"):
            raise UserError(
                f"{FIELD} {path}: Orbax writes checkpoints to gs:// and to disks alone: mount the bucket (mount-s3), "
                "and give the folder where it is mounted"
            )
        self._fs = bucket.file_system(FIELD, path)
        super().__init__(bucket.local_folder(path, f"runs/{distributed.index()}"))
        self.name, self.checkpoints = path, bucket.as_path(path) / "checkpoints"
        self._kept: dict[str, tuple[int, int]] = {}  # size and time of the files that the bucket has

    def config(self) -> str:
        with bucket.reaching(FIELD, self.name):
            file = f"{self.name}/config.json"
            return self._fs.cat_file(file).decode() if self._fs.exists(file) else ""

    @contextmanager
    def taken(self, check: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Takes the lock, fills the local folder from the bucket, and checks it. Yields the check of the lock.

        At the end it copies the last lines of the log, and removes the local folder. Raises: UserError.
        """
        with bucket_lock.locked(self._fs, self.name) as lock:
            try:
                self._restore()
                with self.named():
                    check()
                self.check_lock = lambda: lock.check(now=True)  # another run must not get the log of this one
                try:
                    yield lock.check
                finally:
                    self.keep()
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)

    def settle(self, *, shared: bool) -> None:
        """Empties the local folders of the other processes, when process 0 has the lock."""
        distributed.wait("bucket")
        if not distributed.first():
            self._clear()

    @contextmanager
    def named(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise UserError(str(error).replace(str(self.folder), self.name)) from None

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def _restore(self) -> None:
        with bucket.reaching(FIELD, self.name):
            self._clear()
            if not self.config():
                names = {about["name"].rstrip("/").rpartition("/")[2] for about in self._fs.ls(self.name, detail=True)}
                if names - {"lock", ""}:
                    raise UserError(
                        f"{FIELD} {self.name} is not empty and has no config.json of a run: give a new folder, or put "
                        "config.json back; a model card, hf/README.md, has its text too"
                    )
                return
            for name in bucket.small_files(self._fs, self.name):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(f"{self.name}/{name}", str(self.folder / name))
                self._kept[name] = _state(self.folder / name)

    def keep(self) -> None:
        """Copies the small files that have changed into the bucket, in process 0.

        Raises: UserError, if the bucket cannot be written, or another process has taken the lock.
        """
        if not distributed.first():
            return
        self.check_lock()
        files = [file for file in self.folder.rglob("*") if file.is_file() and not file.name.endswith(".partial")]
        names = {file.relative_to(self.folder).as_posix(): file for file in files}
        with bucket.reaching(FIELD, self.name):
            # The log before the files that speak of it: a rollback counts once its JSON is there.
            for name in sorted(names, key=lambda name: (name.endswith(".json"), name)):
                state = _state(names[name])
                if name.partition("/")[0] not in bucket.RUN and self._kept.get(name) != state:
                    # The bytes of one moment: a logger may be writing.
                    self._fs.pipe_file(f"{self.name}/{name}", names[name].read_bytes())
                    self._kept[name] = state

    def publish(self, name: str) -> None:
        """Replaces the folder of a model in the bucket by the local one.

        Its config is removed first and comes last: no program loads a folder without it.
        """
        self.check_lock()
        target, is_config = f"{self.name}/{name}", lambda file: str(file).endswith("config.json")
        with bucket.reaching(FIELD, self.name), progress.task(f"copying the folder {name}"):
            old = self._fs.find(target) if self._fs.exists(target) else []
            for file in sorted(old, key=is_config, reverse=True):
                self._fs.rm_file(file)
            for file in sorted((self.folder / name).iterdir(), key=is_config):
                self._fs.put_file(str(file), f"{target}/{file.name}")


def store_of(workdir: Path) -> RunFolder:
    """Returns where the run of a work directory is kept."""
    path = bucket.address(workdir)
    return RunBucket(path) if path else RunFolder(workdir)


def _state(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns
