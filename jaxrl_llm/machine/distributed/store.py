"""Exchanges small values between processes through the key-value store of JAX's coordination service.

The devices are not used, because all processes must run device programs in the same order, but a thread that samples
ahead or writes the log may exchange values at any time. Large arrays go through the devices (`transfers.gather`),
because process 0 serves the store and would have to send the arrays to every process.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxrl_llm.machine.distributed.processes import count, first, index
from jaxrl_llm.machine.jax_private import global_state

POLL = 1000  # milliseconds
_calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # channel -> numbers of its calls of `exchange`


def exchange(value: Any, channel: str = "step") -> list[Any]:
    """Returns the values of all processes in the order of their indices. All processes must call it.

    value: values of JSON. channel: name of a sequence of calls; threads need different channels, because the calls of
    a channel must come in the same order in all processes.
    """
    # The values are JSON and not pickle, so that no process can run code in another.
    return json.loads(_exchange(json.dumps(value), channel))


def gather(rows: np.ndarray, channel: str = "step") -> np.ndarray:
    """Returns the rows of all processes, concatenated in the order of their indices. All processes must call it.

    rows: a small array. channel: name of a sequence of calls, of which each thread needs its own.
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
    # Process 0 collects the values and sends them to all, which takes 2 N messages. N x N messages would take seconds
    # with hundreds of hosts. It waits for one missing value at a time, and then reads all that have arrived.
    keys = [f"{key(call)}/{process}" for process in range(1, count())]
    values_by_key: dict[str, str] = {}
    while missing_keys := [key_name for key_name in keys if key_name not in values_by_key]:
        _get(missing_keys[-1])
        values_by_key = dict(store.key_value_dir_get(key(call)))
    values = ",".join([value, *(values_by_key[key_name] for key_name in keys)])
    store.key_value_set(f"{key(call)}/all", f"[{values}]")
    # The values of the previous call can go, because each process had read them before it sent a value for this call.
    if call:
        store.key_value_delete(key(call - 1))
    return f"[{values}]"


def client() -> Any:
    """Returns the client of the coordination service, whose type is not public."""
    return global_state.client


def _get(key: str) -> str:
    """Waits for a key without a time limit, because this process ends anyway if the key's process ends."""
    while True:
        try:
            return client().blocking_key_value_get(key, 10 * POLL)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
