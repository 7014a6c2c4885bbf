"""Checks that all processes of a run have the same values and see the same files. An error names the difference."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine.distributed.processes import count, first
from jaxrl_llm.machine.distributed.store import exchange

CHANNEL = "agreement"
# Seconds for which NFS may show a host an old listing of a folder (acdirmax), or hide a new file.
NFS_CACHE_SECONDS = 60
TOKEN = "shared."  # prefix of the file by which processes check that they share a folder
MAX_DIFFERENCES = 4  # maximum number of differences in an error message


def check_alike(values_by_name: Mapping[str, Any], hashes_by_name: Mapping[str, str]) -> None:
    """Checks that all processes have the same values.

    values_by_name: values that an error shows. hashes_by_name: hashes, of which an error shows the names only.
    Raises: UserError, in all processes, naming the differences.
    """
    text = json.dumps([values_by_name, hashes_by_name], sort_keys=True, default=str)
    # The processes compare hashes first, so that hundreds of processes send all values only if they differ.
    if len(set(exchange(hashlib.sha256(text.encode()).hexdigest(), CHANNEL))) == 1:
        return
    (values, hashes), *other_processes = exchange(json.loads(text), CHANNEL)
    for process, (their_values, their_hashes) in enumerate(other_processes, 1):
        names = [name for name in sorted({*values, *their_values}) if values.get(name) != their_values.get(name)]
        differences = [
            f"{name} is {their_values.get(name, 'missing')!r}, not {values.get(name, 'missing')!r}" for name in names
        ]
        files = sorted({*hashes, *their_hashes})
        differences += [f"{name} is another" for name in files if hashes.get(name) != their_hashes.get(name)]
        if differences:
            further = [f"{len(differences) - MAX_DIFFERENCES} more"] if len(differences) > MAX_DIFFERENCES else []
            raise UserError(
                f"process {process} differs from process 0: {'; '.join([*differences[:MAX_DIFFERENCES], *further])}: "
                "all processes must have the same command, files and versions"
            )


def check_same_listing(folder: Path, list_files: Callable[[], list[str]], remedy: str) -> None:
    """Checks that all processes see the same files in a folder. Repeats the check for NFS_CACHE_SECONDS.

    list_files() -> names of the files that this process sees. remedy: fix that the error proposes.
    Raises: UserError, in all processes, naming a file and the process that does not see it.
    """
    listings = exchange(list_files(), CHANNEL)
    # The loop counts instead of measuring time, because all processes must exchange equally often.
    for _ in range(NFS_CACHE_SECONDS):
        if all(files == listings[0] for files in listings):
            return
        time.sleep(1)
        listings = exchange(list_files(), CHANNEL)
    for process, files in enumerate(listings):
        for file in sorted({*files} ^ {*listings[0]}):
            lacking_process, seeing_process = (process, 0) if file in listings[0] else (0, process)
            raise UserError(
                f"process {lacking_process} does not see {folder / file}, which process {seeing_process} sees: {remedy}"
            )


def check_shared(folder: Path) -> None:
    """Checks that all processes share a folder that process 0 has made. Raises: UserError, in all processes."""
    if count() == 1:
        return
    # Each check uses a new name, because NFS may have cached on a host that an older name does not exist.
    name = exchange(TOKEN + secrets.token_hex(8), CHANNEL)[0]
    file = folder / name
    if first():
        file.touch()
    # This is a barrier, because NFS caches a failed lookup: no process may look before the file exists.
    exchange(None, CHANNEL)

    def list_files() -> list[str]:
        with suppress(OSError):
            # Listing the parent asks the server, in case this host has cached that the folder does not exist.
            os.listdir(folder.parent)
        return [name] if file.is_file() else []

    try:
        check_same_listing(folder, list_files, "--workdir must be on a disk that all processes share")
    finally:
        if first():
            file.unlink(missing_ok=True)
