"""Exchanges of small values through the key-value store of JAX's coordination service.

They do not go through a program on the devices: the order of these programs must be the same in all processes, and a
thread that samples ahead or writes the log may exchange values at any time. Arrays of tokens go by the devices
(`sharding.gather`): the store is in process 0, which would send them to each process.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

# No public function reaches the key-value store.
from jax._src.distributed import global_state

from jaxrl_llm.machine.distributed.processes import count, first, index

POLL = 1000  # milliseconds
_calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of `exchange`, for each channel


def exchange(value: Any, channel: str = "step") -> list[Any]:
    """Returns the JSON values of all processes, in their order. All processes must call it.

    channel: calls of different threads need different channels, because each channel keeps its own order.
    """
    # JSON and not pickle: a process runs nothing that another one sends.
    return json.loads(_exchange(json.dumps(value), channel))


def gather(rows: np.ndarray, channel: str = "step") -> np.ndarray:
    """Returns the rows of all processes, in their order. Rows must be few, and all processes must call it.

    channel: name of the sequence of calls, as for `exchange`.
    """
    if count() == 1:
        return rows
    lists = exchange(rows.tolist(), channel)
    return np.concatenate([np.array(x, rows.dtype).reshape(-1, *rows.shape[1:]) for x in lists])


def wait(channel: str) -> None:
    """Waits until all processes call it."""
    exchange(None, channel)


def _exchange(value: str, channel: str) -> str:
    """Returns the JSON list of the values of all processes."""
    if count() == 1:
        return f"[{value}]"
    call, store = next(_calls[channel]), client()

    def key(call: int) -> str:
        return f"jaxrl_llm/{channel}/{call}"

    if not first():
        store.key_value_set(f"{key(call)}/{index()}", value)
        return _get(f"{key(call)}/all")
    # Process 0 joins the values: N + N messages, where N x N would take seconds with hundreds of hosts. It waits for
    # one that it lacks, and then takes all that have come meanwhile.
    names = [f"{key(call)}/{process}" for process in range(1, count())]
    came: dict[str, str] = {}
    while lacking := [name for name in names if name not in came]:
        _get(lacking[-1])
        came = dict(store.key_value_dir_get(key(call)))
    values = ",".join([value, *(came[name] for name in names)])
    store.key_value_set(f"{key(call)}/all", f"[{values}]")
    # Everyone has read the values of the call before: they have set one for this call.
    if call:
        store.key_value_delete(key(call - 1))
    return f"[{values}]"


def client() -> Any:
    """Returns the client of the coordination service, whose type is not public."""
    return global_state.client


def _get(key: str) -> str:
    """Waits for a key, for any time: if its process has ended, this one ends too."""
    while True:
        try:
            return client().blocking_key_value_get(key, 10 * POLL)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
