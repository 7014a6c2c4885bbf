"""Reads the history in a .wandb file, which W&B writes for each run, also for offline runs.

The file has LevelDB's log format: blocks of 32 KiB that hold parts of records, each part with checksum, size and type.
A record is a protobuf message, of which only the fields of the history are read here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

HEADER, BLOCK, PART = 7, 1 << 15, struct.Struct("<IHB")  # sizes in bytes; checksum, size and type of a part
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # types of parts
HISTORY, ITEM, STEP = 2, 1, 2  # fields of a record and of its history
KEY, NESTED_KEY, VALUE = 1, 2, 16  # fields of an item
FIXED = {1: 8, 5: 4}  # bytes of values of a fixed size


def rows(data: bytes) -> Iterator[dict[str, Any]]:
    """Yields the metrics of each step in the content of a .wandb file. Raises: ValueError, if it is no such file."""
    if data[:4] != b":W&B":
        raise ValueError("it is not a .wandb file of W&B")
    try:
        for record in _records(data):
            for field, history in _fields(record):
                if field == HISTORY:
                    yield _row(history)
    except (IndexError, KeyError) as error:
        raise ValueError("its records are damaged") from error


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the records of a wandb file, which joins parts of records that cross its blocks (LevelDB's log format)."""
    position, record = HEADER, b""
    while position + PART.size <= len(data):
        if (block_rest := BLOCK - position % BLOCK) < PART.size:
            position += block_rest  # Where no part fits, a block ends with zeros.
            continue
        _, size, kind = PART.unpack_from(data, position)
        position += PART.size
        if position + size > len(data) or kind not in (WHOLE, FIRST, MIDDLE, LAST):  # The part is still being written.
            return
        record = (b"" if kind in (WHOLE, FIRST) else record) + data[position : position + size]
        position += size
        if kind in (WHOLE, LAST):
            yield record


def _row(history: bytes) -> dict[str, Any]:
    """Returns the metrics of one history record, a protobuf message, by name."""
    row = dict[str, Any]()
    for field, value in _fields(history):
        if field == STEP:
            row["_step"] = dict(_fields(value)).get(1, 0)
        elif field == ITEM:
            item = [*_fields(value)]
            names = [x.decode() for number, x in item if number in (KEY, NESTED_KEY)]
            texts = [x for number, x in item if number == VALUE]
            row |= {"/".join(names): json.loads(text) for text in texts}
    return row


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of each field of a protobuf message."""
    position = 0
    while position < len(message):
        key, position = _integer(message, position)
        kind = key & 7
        if kind == 0:
            value, position = _integer(message, position)
        else:
            size, position = _integer(message, position) if kind == 2 else (FIXED[kind], position)
            value, position = message[position : position + size], position + size
        yield key >> 3, value


def _integer(message: bytes, position: int) -> tuple[int, int]:
    """Returns the variable-length integer at byte `position` (7 bits per byte), and the index of the byte after it."""
    value = shift = 0
    while True:
        byte, position = message[position], position + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
