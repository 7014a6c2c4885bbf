"""Exchanges of small values through the key-value store of JAX's coordination service.

They do not go through a program on the devices: the order of these programs must be the same in all processes, and a
thread that samples ahead or writes the log may exchange values at any time.
"""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # no public function reaches the key-value store

from jaxrl_llm.distributed.processes import count, index

POLL = 1000  # milliseconds
_calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of `exchange`, for each channel


def exchange(value: Any, channel: str = "step") -> list[Any]:
    """Returns the JSON values of all processes, in their order. All processes must call it.

    channel: calls of different threads need different channels, because each channel keeps its own order.
    """
    return [json.loads(text) for text in _exchange(json.dumps(value).encode(), channel)]


def gather(rows: np.ndarray, channel: str = "step") -> np.ndarray:
    """Returns the rows of all processes, one after the other. All processes must call it; channel: see `exchange`."""
    if count() == 1:
        return rows
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return np.concatenate([np.load(io.BytesIO(x)) for x in _exchange(file.getvalue(), channel)])


def wait(channel: str) -> None:
    """Waits until all processes call it."""
    exchange(None, channel)


def _exchange(value: bytes, channel: str) -> list[bytes]:
    if count() == 1:
        return [value]
    call, store = next(_calls[channel]), client()
    name = lambda call, process: f"jaxrl_llm/{channel}/{call}/{process}"  # noqa: E731
    store.key_value_set_bytes(name(call, index()), value)
    found = [_get(name(call, process)) for process in range(count())]
    if call:  # everyone has read the value of the call before: they have set one for this call
        store.key_value_delete(name(call - 1, index()))
    return found


def client() -> Any:
    """Returns the client of the coordination service, whose type is not public."""
    return global_state.client


def _get(key: str) -> bytes:
    """Waits for a key, for any time: if its process has ended, this one ends too."""
    while True:
        try:
            return client().blocking_key_value_get_bytes(key, 10 * POLL)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
