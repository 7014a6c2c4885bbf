"""Writes TensorBoard events in the calling thread.

tensorboardX's own writer has a thread with a queue, which is not used because a full disk kills the thread and then
the queue blocks.
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
    """Writes the steps after `start`, and makes TensorBoard ignore later steps of an earlier attempt."""

    def __init__(self, folder: Path, start: int):
        folder.mkdir(parents=True, exist_ok=True)
        # The file name gets the process id, because the library's name has only the host and the time in seconds.
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        # START makes TensorBoard ignore this step and later steps in other files of the folder. For a new run this
        # includes step 0, which has an evaluation.
        restart = Event(session_log=SessionLog(status=SessionLog.START), step=start + 1 if start else 0)
        self._writer.write_event(restart)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Writes one event with all scalars, and flushes it before this returns."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        # The flush makes a full disk raise in this call, which is repeated, and not in a later call.
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Writes a text, and flushes it before this returns."""
        # The event has the form of tf.summary.text, because the text dashboard shows only tags of this plugin.
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        value = Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))
        self._writer.flush()

    def write_samples(self, step: int, samples: list[Sample]) -> None:
        """Writes completions as one text, and flushes it before this returns."""

        def indented(text: str) -> str:
            # TensorBoard renders Markdown, in which four spaces mark preformatted text.
            return textwrap.indent(text, "    ", lambda line: True)

        parts = [f"prompt\n\n{indented(samples[0].prompt)}"]
        parts += [f"reward {sample.reward}\n\n{indented(sample.completion)}" for sample in samples]
        self.write_text(step, "completions", "\n\n".join(parts))

    def close(self) -> None:
        # An error is ignored, because a full disk has been reported by `write` already.
        with suppress(OSError):
            self._writer.close()
