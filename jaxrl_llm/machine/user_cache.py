"""The user's cache folder, and a cache of tokenized data in it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

FILES, BYTES = 16, 2**31  # limits of the token cache; the least recently used files are removed first


def home() -> Path:
    """Returns XDG_CACHE_HOME/jaxrl_llm, or ~/.cache/jaxrl_llm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm"


def write_error(folder: Path) -> str:
    """Creates a folder, and returns the error that prevents writing a file there, or "" if writing works."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def load_ids(key: str, count: int) -> list[np.ndarray] | None:
    """Loads the `count` lists of token ids saved under `key`. Returns None if they are missing or damaged."""
    file = home() / "tokens" / f"{key}.npz"
    try:
        with np.load(file) as stored:
            ids, lengths = stored["ids"], stored["lengths"]
        os.utime(file)  # marks the file as used for `remove_least_recent`
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    return np.split(ids, np.cumsum(lengths))[:-1] if len(lengths) == count and lengths.sum() == len(ids) else None


def save_ids(key: str, ids: Sequence[np.ndarray]) -> None:
    """Saves lists of token ids. Does nothing if the folder is not writable."""
    folder = home() / "tokens"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # The temporary name is unique, because two runs may save the same key at the same time.
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, ids=np.concatenate(ids), lengths=np.array([len(tokens) for tokens in ids], np.int64))
            os.replace(partial, folder / f"{key}.npz")
        finally:
            Path(partial).unlink(missing_ok=True)
        remove_least_recent(folder, FILES, BYTES)


def remove_least_recent(folder: Path, files: float, size: int) -> None:
    """Removes the least recently used files of a folder beyond the limits of number and total bytes.

    Another run may remove files at the same time.
    """
    files_by_use, free_bytes = [], size
    with suppress(OSError):  # the folder may not exist yet
        for file in folder.iterdir():
            with suppress(OSError):
                file_stat = file.stat()
                # Linux updates the access time about once a day. Without access times the modification time counts.
                files_by_use.append((max(file_stat.st_mtime, file_stat.st_atime), file_stat.st_size, file))
    for i, (_, length, file) in enumerate(sorted(files_by_use, reverse=True)):
        free_bytes -= length
        if i >= files or free_bytes < 0:
            with suppress(OSError):
                file.unlink(missing_ok=True)
