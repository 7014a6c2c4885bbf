"""Reads the history in a .wandb file, which W&B keeps of each run, also of one that is offline.

The file is a log of LevelDB: blocks of 32 KiB with parts of records, each with checksum, size and type. A record is a
message of protobuf, of which only the fields of the history are read here.
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
    """Yields the values of each step. Raises: ValueError, if this is no .wandb file."""
    if data[:4] != b":W&B":
        raise ValueError("it is no file of W&B")
    try:
        for record in _records(data):
            for field, history in _fields(record):
                if field == HISTORY:
                    yield _row(history)
    except (IndexError, KeyError) as error:
        raise ValueError("its records are broken") from error


def _records(data: bytes) -> Iterator[bytes]:
    at, record = HEADER, b""
    while at + PART.size <= len(data):
        if (left := BLOCK - at % BLOCK) < PART.size:
            at += left  # a block ends with zeros where no part fits
            continue
        _, size, kind = PART.unpack_from(data, at)
        at += PART.size
        if at + size > len(data) or kind not in (WHOLE, FIRST, MIDDLE, LAST):  # it is being written
            return
        record = (b"" if kind in (WHOLE, FIRST) else record) + data[at : at + size]
        at += size
        if kind in (WHOLE, LAST):
            yield record


def _row(history: bytes) -> dict[str, Any]:
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
    """Yields number and value of each field of a message of protobuf."""
    at = 0
    while at < len(message):
        key, at = _integer(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _integer(message, at)
        else:
            size, at = _integer(message, at) if kind == 2 else (FIXED[kind], at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def _integer(message: bytes, at: int) -> tuple[int, int]:
    """Returns the integer that begins at a byte, 7 bits in each, and where it ends."""
    value = shift = 0
    while True:
        byte, at = message[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
