"""Buckets: paths that begin with gs:// or s3://, and copies of their files in the user's cache.

fsspec reads and writes them, because Orbax does so too, and because a write of it can ask that the object is new.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, cast

from etils import epath

from jaxrl_llm.errors import MissingHere, PeerLost, UserError, briefly
from jaxrl_llm.machine import progress, user_cache

PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # which fsspec needs
ACCESS = {"gs": "gcloud auth application-default login", "s3": "aws configure"}
RUN = ("checkpoints", "hf", "adapter", "lock")  # folders of a run in a bucket; its other files are small


def address(path: str | Path) -> str:
    """Returns the address of a path in a bucket, such as gs://b/x; "" if the path is local.

    A `Path` has one slash of the two.
    """
    parts = re.match(r"(gs|s3):/+(.*?)/*$", str(path))
    return f"{parts[1]}://{parts[2]}" if parts else ""


def check_output(field: str, path: Path | None) -> None:
    """Raises: UserError, if a tool is to write into a bucket."""
    if path and (remote := address(path)):
        raise UserError(f"{field} = {remote!r} is in a bucket: give a path on a disk, and copy what it has then")


def as_path(path: str) -> Path:
    """Returns the path of an address, with the methods of a `Path`."""
    return cast(Path, epath.Path(path))


def file_system(field: str, path: str) -> Any:
    """Returns the fsspec file system of an address. Raises: MissingHere, if its package is not installed."""
    # Slow to import, and only needed for buckets.
    import fsspec
    from fsspec.config import conf

    scheme = path.partition(":")[0]
    # Also for the file systems that Orbax makes: a listing in memory would hide what another process writes.
    for name in {scheme, *({"gcs"} if scheme == "gs" else ())}:
        conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    try:
        return fsspec.filesystem(scheme)
    except ImportError:
        remedy = f"needs {PACKAGES[scheme]}, which is not installed: pip install 'jaxrl_llm[bucket]'"
        raise MissingHere(f"{field} = {path!r} {remedy}") from None


@contextmanager
def reaching(field: str, path: str) -> Iterator[None]:
    """Turns an error of a block that uses a bucket into a UserError. Libraries of clouds raise many types."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise MissingHere(f"{field} = {path!r} does not exist ({error}): give a path that does") from error
    except Exception as error:
        # The classes of these libraries have no common base.
        busy = str(getattr(error, "code", "")).startswith(("429", "5"))
        if busy or re.search("Connect|Timeout", type(error).__name__):
            raise PeerLost(f"{field} = {path!r} does not answer ({briefly(error):.300}): start again") from error
        raise UserError(
            f"{field} = {path!r} cannot be used ({briefly(error):.300}): check its name, the network, the room on this "
            f"disk, and your access ({ACCESS[path.partition(':')[0]]})"
        ) from error


def fetch_files(field: str, path: str) -> list[Path]:
    """Returns local copies of the file at an address, or of all that match its pattern, sorted by name."""
    fs = file_system(field, path)
    with reaching(field, path):
        names = sorted(fs.glob(path)) if has_magic(path) else [path]
        if not names:
            raise MissingHere(f"{field} = {path!r} matches no file: give a pattern that does")
        return [_copies(fs, [fs.info(name)])[0] for name in names]


def fetch_folder(field: str, path: str, endings: Sequence[str], endings_now: Sequence[str]) -> Path:
    """Returns a local copy of a folder's files with these endings.

    endings_now: of the files that the copy must have now.
    """
    fs = file_system(field, path)
    with reaching(field, path):
        objects = [about for about in fs.ls(path, detail=True) if about["name"].endswith(tuple(endings))]
        if not objects:
            raise FileNotFoundError("it has no file of a model")
        return _copies(fs, objects, tuple(endings_now))[0].parent


def _copies(fs: Any, objects: Sequence[Mapping[str, Any]], endings: tuple[str, ...] = ("",)) -> list[Path]:
    """Copies files into one folder of the cache, unless they are there. A changed file gets another folder."""
    versions = [(str(about["name"]), about["size"], _version(about)) for about in objects]
    digest = hashlib.sha256(repr([type(fs).__name__, *sorted(versions)]).encode()).hexdigest()[:16]
    folder = user_cache.home() / "bucket" / digest
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for name, size, _ in versions:
        copies.append(folder / PurePosixPath(name).name)
        if not name.endswith(endings) or copies[-1].is_file():
            continue
        with progress.task(f"fetching {copies[-1].name}"):
            # A name that nobody else has: two processes may fetch the same file at once.
            handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
            os.close(handle)
            try:
                fs.get_file(name, partial)
                if os.path.getsize(partial) != size:
                    raise OSError(f"{name} has changed while it was fetched")
                os.replace(partial, copies[-1])
            finally:
                Path(partial).unlink(missing_ok=True)
    return copies


def _version(about: Mapping[str, Any]) -> str:
    """Returns what differs between two contents of an object."""
    return next((str(about[key]) for key in ("generation", "ETag", "etag", "mtime") if about.get(key)), "")


def fetch_run(workdir: Path, field: str = "WORKDIR") -> Path:
    """Returns the local folder of a run's workdir: of one in a bucket, a copy of its log and its other small files."""
    path = address(workdir)
    if not path:
        return workdir
    fs, folder = file_system(field, path), local_folder(path, "read")
    with reaching(field, path):
        for name in small_files(fs, path):
            with tempfile.NamedTemporaryFile(dir=_made(folder), suffix=".partial", delete=False) as partial:
                partial.write(fs.cat_file(f"{path}/{name}"))
            os.replace(partial.name, _made((folder / name).parent) / PurePosixPath(name).name)
    return folder


def local_folder(path: str, use: str) -> Path:
    """Returns the folder of the cache that has, for a use, files of a run in a bucket. It has the name of the run."""
    return user_cache.home() / use / hashlib.sha256(path.encode()).hexdigest()[:16] / PurePosixPath(path).name


def small_files(fs: Any, path: str) -> list[str]:
    """Returns the names of a run's files in a bucket that are in no folder of RUN, the config last."""
    names, root = [], path.partition("://")[2]
    for about in fs.ls(path, detail=True):
        name = about["name"].rstrip("/")
        if name != root and PurePosixPath(name).name not in RUN:  # some programs write an object for a folder
            names += fs.find(name) if about["type"] == "directory" else [name]
    return sorted((name.removeprefix(f"{root}/") for name in names), key=lambda name: (name == "config.json", name))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
