"""TensorBoard's events, written by the thread that calls.

tensorboardX's own writer has a thread with a queue: where the disk is full, the thread dies and the queue blocks.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]


class TensorBoardWriter:
    """Scalars of the steps after `start`; those of an earlier try are to be forgotten."""

    def __init__(self, folder: Path, start: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        again = Event(session_log=SessionLog(status=SessionLog.START), step=start + 1 if start else 0)
        self._writer.write_event(again)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One event with all of them; the file has it before this returns."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        with suppress(OSError):  # the rest of an event that a full disk has refused already
            self._writer.close()
