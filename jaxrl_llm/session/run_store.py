"""The storage of a run: a folder on a disk, or a bucket.

Orbax writes checkpoints directly into a bucket. A log cannot be written there, because nothing can be appended to an
object. So process 0 keeps log, config and rollback decisions in a local folder, and copies them into the bucket before
each checkpoint. A run whose local disk is empty resumes from the bucket.
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
    """The storage of a run whose work directory is on a disk."""

    def __init__(self, folder: Path):
        self.folder, self.name, self.checkpoints = folder, str(folder), folder / "checkpoints"
        self.check_lock: Callable[[], None] = lambda: None  # asks a bucket; raises: UserError, if the lock is lost

    def config(self) -> str:
        """Returns the text of the run's config.json, or "" if there is no run yet."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.folder / "config.json").read_text()
        return ""

    @contextmanager
    def locked(self, check: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Calls check() and locks the work directory. Only process 0 calls this.

        Yields a function that raises a UserError if another process has taken the lock. Raises: UserError.
        """
        check()
        with locked(self.folder) as lock:
            yield lock.check

    def prepare_other_processes(self, *, shared: bool) -> None:
        """Checks that all processes see the same folder if `shared`.

        Process 0 holds the lock by now. Raises: UserError.
        """
        if shared:
            agreement.check_shared(self.folder)

    def naming_workdir(self) -> AbstractContextManager[None]:
        """Makes the errors of a block show the user's name of the work directory instead of the local folder."""
        return nullcontext()

    def sync(self) -> None:
        """Makes the files of the run safe before a checkpoint or a rollback decision; a bucket gets copies of them.

        Raises: UserError, if the work directory has vanished, because Orbax would create it without config and log.
        """
        if not (self.folder / "config.json").is_file():
            raise UserError(f"--workdir {self.folder} has vanished: restore it; the same command resumes the run")

    def publish(self, name: str) -> None:
        """Copies the model folder `name` into the bucket of the run, if it has one."""


class RunBucket(RunFolder):
    """The storage of a run whose work directory is in a bucket, with a local folder for this process."""

    def __init__(self, path: str):
        """Raises: MissingHere, if the package for this kind of bucket is not installed."""
        if not path.startswith("gs://"):
            raise UserError(
                f"{FIELD} {path}: Orbax writes checkpoints only to gs:// and to disks: mount the bucket, for example "
                "with mount-s3, and use the folder where it is mounted"
            )
        self._fs = bucket.file_system(FIELD, path)
        super().__init__(bucket.local_folder(path, f"runs/{distributed.index()}"))
        self.name, self.checkpoints = path, bucket.as_path(path) / "checkpoints"
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and modification time of each file in the bucket

    def config(self) -> str:
        with bucket.bucket_errors(FIELD, self.name):
            file = f"{self.name}/config.json"
            return self._fs.cat_file(file).decode() if self._fs.exists(file) else ""

    @contextmanager
    def locked(self, check: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Locks the work directory, downloads it to the local folder, and calls check(). Only process 0 calls this.

        Yields a function that raises a UserError if another process has taken the lock. At the end, uploads the last
        lines of the log and removes the local folder. Raises: UserError.
        """
        with bucket_lock.locked(self._fs, self.name) as lock:
            try:
                self._download()
                with self.naming_workdir():
                    check()
                # Each upload asks the bucket first, because the log of this run must not reach another run.
                self.check_lock = lambda: lock.check(ask_bucket=True)
                try:
                    yield lock.check
                finally:
                    self.sync()
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)

    def prepare_other_processes(self, *, shared: bool) -> None:
        """Empties the local folders of the other processes. Process 0 holds the lock by now."""
        distributed.wait("bucket")
        if not distributed.first():
            self._clear()

    @contextmanager
    def naming_workdir(self) -> Iterator[None]:
        """Replaces the local folder in the message of a UserError by the address that the user named."""
        try:
            yield
        except UserError as error:
            message = str(error).replace(str(self.folder), self.name)
            raise UserError(message) from None

    def _clear(self) -> None:
        """Empties the local folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def _download(self) -> None:
        """Copies the small files of a run from its bucket to the local folder. Refuses a folder of something else."""
        with bucket.bucket_errors(FIELD, self.name):
            self._clear()
            if not self.config():
                entries = self._fs.ls(self.name, detail=True)
                names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in entries}
                # The bucket may hold the lock of this run, and an object for the folder itself.
                if names - {"lock", ""}:
                    raise UserError(
                        f"{FIELD} {self.name} is not empty and has no config.json of a run: use a new folder, or "
                        "restore config.json; a model card, hf/README.md, has the text of config.json too"
                    )
                return
            for name in bucket.small_files(self._fs, self.name):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(f"{self.name}/{name}", str(self.folder / name))
                self._uploaded[name] = _state(self.folder / name)

    def sync(self) -> None:
        """Uploads the small files of the run that have changed, in process 0.

        Raises: UserError, if the bucket cannot be written, or another process has taken the lock.
        """
        if not distributed.first():
            return
        self.check_lock()
        files = [file for file in self.folder.rglob("*") if file.is_file() and not file.name.endswith(".partial")]
        names = {file.relative_to(self.folder).as_posix(): file for file in files}
        with bucket.bucket_errors(FIELD, self.name):
            # JSON files come last, because a rollback counts as soon as its JSON file is in the bucket.
            for name in sorted(names, key=lambda name: (name.endswith(".json"), name)):
                state = _state(names[name])
                if name.partition("/")[0] not in bucket.RUN_FOLDERS and self._uploaded.get(name) != state:
                    # The file is read at once, because a logger may be writing to it.
                    self._fs.pipe_file(f"{self.name}/{name}", names[name].read_bytes())
                    self._uploaded[name] = state

    def publish(self, name: str) -> None:
        """Replaces a model folder in the bucket by the local folder of this name.

        The folder's config.json is removed first and uploaded last, so that no program loads an incomplete folder.
        """
        self.check_lock()
        target, is_config = f"{self.name}/{name}", lambda file: str(file).endswith("config.json")
        with bucket.bucket_errors(FIELD, self.name), progress.task(f"copying the folder {name}"):
            old_files = self._fs.find(target) if self._fs.exists(target) else []
            for file in sorted(old_files, key=is_config, reverse=True):
                self._fs.rm_file(file)
            for file in sorted((self.folder / name).iterdir(), key=is_config):
                self._fs.put_file(str(file), f"{target}/{file.name}")


def store_of(workdir: Path) -> RunFolder:
    """Returns the storage of a work directory: a bucket for an address such as gs://b/x, else a folder."""
    path = bucket.address(workdir)
    return RunBucket(path) if path else RunFolder(workdir)


def _state(file: Path) -> tuple[int, int]:
    """Returns size and modification time of a file, which show whether it has changed since its upload."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns
