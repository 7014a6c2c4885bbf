"""Writes TensorBoard events in the calling thread.

The writer of tensorboardX has a thread with a queue. On a full disk the thread dies and the queue blocks.
"""

from __future__ import annotations

import os
import textwrap
import time
from contextlib import suppress
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto  # pyright: ignore[reportAttributeAccessIssue]

from jaxrl_llm.loggers.sample import Sample


class TensorBoardWriter:
    """Writes scalars of the steps after `start`, and tells TensorBoard to drop those of an earlier attempt."""

    def __init__(self, folder: Path, start: int):
        folder.mkdir(parents=True, exist_ok=True)
        # The library's name of the file has only seconds and the host: the process tells two starts in a second apart.
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        # START makes TensorBoard drop what other files of the folder have of this step and later ones. A new run drops
        # step 0 as well, which has an evaluation.
        again = Event(session_log=SessionLog(status=SessionLog.START), step=start + 1 if start else 0)
        self._writer.write_event(again)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Writes one event with all scalars, and flushes it before this returns."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        # Flushed at once: a full disk then raises in this call, which comes again, and not in a later one.
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Writes a text, and flushes it before this returns."""
        # What tf.summary.text writes: the text dashboard looks for tags of this plugin.
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        value = Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))
        self._writer.flush()

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        """Writes completions as one text, and flushes it before this returns."""
        # TensorBoard shows Markdown, where four spaces keep a text as it is.
        indented = lambda text: textwrap.indent(text, "    ", lambda line: True)  # noqa: E731
        parts = [f"prompt\n\n{indented(samples[0].prompt)}"]
        parts += [f"reward {sample.reward}\n\n{indented(sample.completion)}" for sample in samples]
        self.write_text(step, "completions", "\n\n".join(parts))

    def close(self) -> None:
        # A full disk refuses the rest of an event again, and has been told.
        with suppress(OSError):
            self._writer.close()
