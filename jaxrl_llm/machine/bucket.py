"""Access to buckets, whose paths start with gs:// or s3://, and copies of their files in the user's cache.

fsspec reads and writes the objects, because Orbax uses it too, and because it can write on the condition that an object
is new.
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

from jaxrl_llm.errors import MissingHere, PeerLost, UserError, summarize_error
from jaxrl_llm.machine import progress, user_cache

PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # package that fsspec needs for each kind of bucket
ACCESS = {"gs": "gcloud auth application-default login", "s3": "aws configure"}  # commands that give access
# Folders of a run that are not copied with its small files.
RUN_FOLDERS = ("checkpoints", "hf", "adapter", "lock", "samples")


def address(path: str | Path) -> str:
    """Returns the address of a path in a bucket, such as gs://b/x; "" if the path is local.

    A `Path` of an address has only one of the two slashes, which this function restores.
    """
    parts = re.match(r"(gs|s3):/+(.*?)/*$", str(path))
    return f"{parts[1]}://{parts[2]}" if parts else ""


def as_path(path: str) -> Path:
    """Returns the path of an address, with the methods of a `Path`."""
    return cast(Path, epath.Path(path))


def file_system(field: str, path: str) -> Any:
    """Returns the fsspec file system of an address. Raises: MissingHere, if its package is not installed."""
    # The import is here because it is slow and only buckets need it.
    import fsspec
    from fsspec.config import conf

    scheme = path.partition(":")[0]
    # Listings must not be cached, because a cached listing hides what another process writes. The setting also applies
    # to the file systems that Orbax makes.
    for name in {scheme, *({"gcs"} if scheme == "gs" else ())}:
        conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    try:
        return fsspec.filesystem(scheme)
    except ImportError:
        remedy = f"needs {PACKAGES[scheme]}, which is not installed: pip install 'jaxrl_llm[bucket]'"
        raise MissingHere(f"{field} = {path!r} {remedy}") from None


@contextmanager
def bucket_errors(field: str, path: str) -> Iterator[None]:
    """Turns any error of a block that uses a bucket into a UserError. field, path: flag or field, and its value."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise MissingHere(f"{field} = {path!r} does not exist ({error}): use a path that exists") from error
    except Exception as error:
        # The error classes of cloud libraries have no common base, so the code or the name of the class decides.
        busy = str(getattr(error, "code", "")).startswith(("429", "5"))
        if busy or re.search("Connect|Timeout", type(error).__name__):
            raise PeerLost(
                f"{field} = {path!r} does not answer ({summarize_error(error):.300}): start the command again"
            ) from error
        raise UserError(
            f"{field} = {path!r} cannot be used ({summarize_error(error):.300}): check its name, the network, the free "
            f"space on this disk, and your access ({ACCESS[path.partition(':')[0]]})"
        ) from error


def fetch_files(field: str, path: str) -> list[Path]:
    """Returns local copies of the file at an address, or of all files that match a pattern, sorted by name."""
    fs = file_system(field, path)
    with bucket_errors(field, path):
        names = sorted(fs.glob(path)) if has_magic(path) else [path]
        if not names:
            raise MissingHere(f"{field} = {path!r} matches no file: use a pattern that matches files")
        return [_cached_copies(fs, [fs.info(name)])[0] for name in names]


def fetch_folder(field: str, path: str, endings: Sequence[str], fetched_endings: Sequence[str]) -> Path:
    """Returns the local folder for a folder's files with these endings.

    fetched_endings: endings of the files that are copied now; the others determine the name of the local folder only.
    """
    fs = file_system(field, path)
    with bucket_errors(field, path):
        objects = [info for info in fs.ls(path, detail=True) if info["name"].endswith(tuple(endings))]
        if not objects:
            raise FileNotFoundError("it has no file of a model")
        return _cached_copies(fs, objects, tuple(fetched_endings))[0].parent


def _cached_copies(fs: Any, objects: Sequence[Mapping[str, Any]], endings: tuple[str, ...] = ("",)) -> list[Path]:
    """Copies files into a folder of the cache that depends on their versions, unless they are there already."""
    versions = [(str(info["name"]), info["size"], _object_version(info)) for info in objects]
    digest = hashlib.sha256(repr([type(fs).__name__, *sorted(versions)]).encode()).hexdigest()[:16]
    folder = user_cache.home() / "bucket" / digest
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for name, size, _ in versions:
        copies.append(folder / PurePosixPath(name).name)
        if not name.endswith(endings) or copies[-1].is_file():
            continue
        with progress.task(f"fetching {copies[-1].name}"):
            # The temporary name is unique, because two processes may fetch the same file at the same time.
            handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
            os.close(handle)
            try:
                fs.get_file(name, partial)
                if os.path.getsize(partial) != size:
                    raise OSError(f"{name} changed during its download")
                os.replace(partial, copies[-1])
            finally:
                Path(partial).unlink(missing_ok=True)
    return copies


def _object_version(info: Mapping[str, Any]) -> str:
    """Returns a version of an object, which differs between two contents; "" if the bucket has none."""
    return next((str(info[key]) for key in ("generation", "ETag", "etag", "mtime") if info.get(key)), "")


def fetch_run(workdir: Path, field: str = "WORKDIR") -> Path:
    """Returns the local folder of a run's work directory. Copies the small files, such as the log, from a bucket.

    field: flag or argument that the path comes from.
    """
    path = address(workdir)
    if not path:
        return workdir
    fs, folder = file_system(field, path), local_folder(path, "read")
    with bucket_errors(field, path):
        for name in small_files(fs, path):
            with tempfile.NamedTemporaryFile(dir=_make_folder(folder), suffix=".partial", delete=False) as partial:
                partial.write(fs.cat_file(f"{path}/{name}"))
            os.replace(partial.name, _make_folder((folder / name).parent) / PurePosixPath(name).name)
    return folder


def download_folder(path: str, folder: Path, field: str) -> None:
    """Copies a folder with all its files from a bucket into a new folder. field: flag that the path comes from."""
    fs = file_system(field, path)
    with bucket_errors(field, path), progress.task(f"fetching {path}"):
        fs.get(f"{path}/", f"{folder}/", recursive=True)


def local_folder(path: str, use: str) -> Path:
    """Returns the cache folder for files of a run in a bucket, whose name is that of the run. use: such as "read"."""
    return user_cache.home() / use / hashlib.sha256(path.encode()).hexdigest()[:16] / PurePosixPath(path).name


def small_files(fs: Any, path: str) -> list[str]:
    """Returns the names of a run's files in a bucket outside of RUN_FOLDERS. config.json comes last."""
    names, root = [], path.partition("://")[2]
    for info in fs.ls(path, detail=True):
        name = info["name"].rstrip("/")
        if name != root and PurePosixPath(name).name not in RUN_FOLDERS:  # some programs write an object for a folder
            names += fs.find(name) if info["type"] == "directory" else [name]
    return sorted((name.removeprefix(f"{root}/") for name in names), key=lambda name: (name == "config.json", name))


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
