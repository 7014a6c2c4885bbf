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


def refused(folder: Path) -> str:
    """Makes a folder, and returns why no file can be written there; "": one can."""
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
        os.utime(file)  # marks it as used for `forget`
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    return np.split(ids, np.cumsum(lengths))[:-1] if len(lengths) == count and lengths.sum() == len(ids) else None


def save_ids(key: str, ids: Sequence[np.ndarray]) -> None:
    """Saves lists of token ids. Does nothing if the folder is not writable."""
    folder = home() / "tokens"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # A name that nobody else has: two runs may save the same key at once.
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, ids=np.concatenate(ids), lengths=np.array([len(tokens) for tokens in ids], np.int64))
            os.replace(partial, folder / f"{key}.npz")
        finally:
            Path(partial).unlink(missing_ok=True)
        forget(folder, FILES, BYTES)


def forget(folder: Path, files: float, size: int) -> None:
    """Removes the least recently used files beyond the limits. Another run may remove files at the same time."""
    by_use, room = [], size
    with suppress(OSError):  # no folder yet
        for file in folder.iterdir():
            with suppress(OSError):
                about = file.stat()
                # Linux keeps the time of the last read to a day. Where it keeps none, that of the writing counts.
                by_use.append((max(about.st_mtime, about.st_atime), about.st_size, file))
    for i, (_, length, file) in enumerate(sorted(by_use, reverse=True)):
        room -= length
        if i >= files or room < 0:
            with suppress(OSError):
                file.unlink(missing_ok=True)
