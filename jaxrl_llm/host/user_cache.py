"""The user's cache folder, and lists of token ids kept there from run to run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

FILES, BYTES = 16, 2**31  # kept at most; those longest unused go first


def home() -> Path:
    """XDG_CACHE_HOME/jaxrl_llm, or ~/.cache/jaxrl_llm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm"


def load_ids(key: str, count: int) -> list[np.ndarray] | None:
    """The `count` lists that were saved under `key`; None if they are not there, or damaged."""
    file = home() / "tokens" / f"{key}.npz"
    try:
        with np.load(file) as stored:
            ids, lengths = stored["ids"], stored["lengths"]
        os.utime(file)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    return split(ids, lengths) if len(lengths) == count and lengths.sum() == len(ids) else None


def save_ids(key: str, ids: Sequence[np.ndarray]) -> None:
    """Saves lists of token ids; where the folder cannot be written nothing is kept."""
    folder = home() / "tokens"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, ids=np.concatenate(ids), lengths=np.array([len(tokens) for tokens in ids], np.int64))
            os.replace(partial, folder / f"{key}.npz")
        finally:
            Path(partial).unlink(missing_ok=True)
        _forget(folder)


def split(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Pieces of these lengths, one after the other."""
    ends = np.cumsum(lengths)
    return [flat[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _forget(folder: Path) -> None:
    """Removes what is beyond the limits; a file that another run removes at the same time is gone as well."""
    found = []
    for file in folder.iterdir():
        with suppress(OSError):
            found.append((file.stat().st_mtime, file.stat().st_size, file))
    room = BYTES
    for i, (_, size, file) in enumerate(sorted(found, reverse=True)):
        room -= size
        if i >= FILES or room < 0:
            file.unlink(missing_ok=True)
