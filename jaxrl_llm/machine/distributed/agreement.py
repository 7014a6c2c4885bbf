"""What all processes of a run must have and see alike. Where they do not, one line says what, and in which process."""

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
# Seconds for which NFS shows a host an old listing of a folder (acdirmax), or that a file is not there.
LISTED = 60
TOKEN = "shared."  # begins the name of the file by which processes find that they share a folder
TOLD = 4  # differences in a line


def check_alike(shown: Mapping[str, Any], hashed: Mapping[str, str]) -> None:
    """Checks that all processes have the same values.

    shown: by what they are; an error tells both values. hashed: hashes; an error tells what they are of.
    Raises: UserError, in all processes.
    """
    text = json.dumps([shown, hashed], sort_keys=True, default=str)
    # First 64 characters from each: with hundreds of processes, all values are sent only if there is a difference.
    if len(set(exchange(hashlib.sha256(text.encode()).hexdigest(), CHANNEL))) == 1:
        return
    (values, hashes), *others = exchange(json.loads(text), CHANNEL)
    for process, (their_values, their_hashes) in enumerate(others, 1):
        names = [name for name in sorted({*values, *their_values}) if values.get(name) != their_values.get(name)]
        differ = [f"{x} is {their_values.get(x, 'missing')!r}, not {values.get(x, 'missing')!r}" for x in names]
        files = sorted({*hashes, *their_hashes})
        differ += [f"{name} is another" for name in files if hashes.get(name) != their_hashes.get(name)]
        if differ:
            more = [f"{len(differ) - TOLD} more"] if len(differ) > TOLD else []
            raise UserError(
                f"process {process} differs from process 0: {'; '.join([*differ[:TOLD], *more])}: "
                "give all processes the same command, files and versions"
            )


def check_seen(folder: Path, look: Callable[[], list[str]], remedy: str) -> None:
    """Checks that all processes see the same files in a folder, as look() lists them. Tries again for LISTED seconds.

    Raises: UserError, in all processes, naming a file and the process that does not see it.
    """
    seen = exchange(look(), CHANNEL)
    # A count, and not a time, so that all look equally often.
    for _ in range(LISTED):
        if all(files == seen[0] for files in seen):
            return
        time.sleep(1)
        seen = exchange(look(), CHANNEL)
    for process, files in enumerate(seen):
        for file in sorted({*files} ^ {*seen[0]}):
            lacks, sees = (process, 0) if file in seen[0] else (0, process)
            raise UserError(f"process {lacks} does not see {folder / file}, which process {sees} sees: {remedy}")


def check_shared(folder: Path) -> None:
    """Checks that all processes share a folder, which process 0 has made. Raises: UserError, in all processes."""
    if count() == 1:
        return
    # A new name each time: a host may have kept that an older one was not there.
    name = exchange(TOKEN + secrets.token_hex(8), CHANNEL)[0]
    file = folder / name
    if first():
        file.touch()
    # Nobody looks before the file is there: the host of one that did would keep for LISTED seconds that it is not.
    exchange(None, CHANNEL)

    def look() -> list[str]:
        with suppress(OSError):
            # Asks the server, where a host has kept that the folder was not there.
            os.listdir(folder.parent)
        return [name] if file.is_file() else []

    try:
        check_seen(folder, look, "give a --workdir on a disk that all processes share")
    finally:
        if first():
            file.unlink(missing_ok=True)
