"""Writes TensorBoard events in the calling thread.

The writer of tensorboardX has a thread with a queue. On a full disk the thread dies and the queue blocks.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportAttributeAccessIssue]


class TensorBoardWriter:
    """Writes scalars of the steps after `start`, and tells TensorBoard to drop those of an earlier attempt."""

    def __init__(self, folder: Path, start: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        again = Event(session_log=SessionLog(status=SessionLog.START), step=start + 1 if start else 0)
        self._writer.write_event(again)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Writes one event with all scalars, and flushes it before this returns."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Writes a text, and flushes it before this returns."""
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        value = Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))
        self._writer.flush()

    def close(self) -> None:
        with suppress(OSError):  # a full disk refuses the rest of an event again
            self._writer.close()
