"""Several processes, usually one on each host, which run the same program on one mesh over all their devices.

JAX's coordination service connects them (`jax.distributed`). Small values of the hosts go through its key-value store
and not through a program on the devices: the order of these programs must be the same in all processes, and a thread
that samples ahead or writes the log may exchange values at any time.

A process that ends by an error tells the others, which then end too. JAX ends them if it is killed.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src.distributed import global_state  # no public function reaches the key-value store

from jaxrl_llm.errors import UserError, report
from jaxrl_llm.terminal import printable

HEARTBEAT = 30  # seconds without a sign of life after which JAX ends all processes
POLL = 1000  # milliseconds
ENDED = "jaxrl_llm/ended"  # key of the line with which a process has ended
LEAVING = 10  # seconds for which process 0 waits, at an error, until the others have ended
_calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of `exchange`, for each channel


def count() -> int:
    """Returns the number of processes. Unlike JAX's function, it does not initialize the devices."""
    return global_state.num_processes


def index() -> int:
    """Returns the number of this process, from 0."""
    return global_state.process_id


def first() -> bool:
    """Returns whether this process writes the log, the config and the exported model."""
    return index() == 0


def part(size: int) -> slice:
    """Returns this process's part of `size` rows. Raises: UserError, if they cannot be split evenly."""
    if size % count():
        raise UserError(f"{size} prompts cannot be split evenly over {count()} processes: give a multiple")
    each = size // count()
    return slice(index() * each, (index() + 1) * each)


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
    call, client = next(_calls[channel]), _client()
    name = lambda call, process: f"jaxrl_llm/{channel}/{call}/{process}"  # noqa: E731
    client.key_value_set_bytes(name(call, index()), value)
    found = [_get(name(call, process)) for process in range(count())]
    if call:  # everyone has read the value of the call before: they have set one for this call
        client.key_value_delete(name(call - 1, index()))
    return found


def _client() -> Any:
    """Returns the client of the coordination service, whose type is not public."""
    return global_state.client


def _get(key: str) -> bytes:
    """Waits for a key, for any time: if its process has ended, this one ends too."""
    while True:
        try:
            return _client().blocking_key_value_get_bytes(key, 10 * POLL)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Joins the processes of a run in this block; address: "" (only this process), "auto" or HOST:PORT,INDEX/COUNT.

    At an error it does not return: it reports the error, tells the other processes and ends this one.
    Raises: UserError, if the address is wrong or the others cannot be reached.
    """
    if not address:
        yield
        return
    _connect(address)
    leaving = Event()
    watch = Thread(target=_watch, args=(leaving,), daemon=True)
    watch.start()
    try:
        try:
            yield
        except SystemExit as ended:  # with 0 after a signal
            if ended.code:
                raise
        wait("end")
    except BaseException as error:
        leaving.set()  # it would find this process's own line
        _leave(error)
    leaving.set()
    watch.join()
    jax.distributed.shutdown()


def _connect(address: str) -> None:
    if address == "auto":
        known: dict[str, Any] = {}
    else:
        try:
            host, _, place = address.partition(",")
            number, _, size = place.partition("/")
            known = dict(coordinator_address=host, process_id=int(number), num_processes=int(size))
        except ValueError:
            raise UserError(f"--distributed {address}: give auto, or HOST:PORT,INDEX/COUNT") from None
    # Signals are ours (`host.signals`): the service would take SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    # A CPU may run two programs at once, in another order in each process: their collectives would be mixed up.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(**known, heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError) as error:
        said = str(error).splitlines()[0]
        raise UserError(
            f"--distributed {address}: the processes cannot be joined ({said}): give HOST:PORT,INDEX/COUNT with the "
            "address of process 0, and start all processes"
        ) from error


def _watch(leaving: Event) -> None:
    """Runs in a thread: ends this process when another one has ended by an error."""
    while not leaving.is_set():
        with suppress(jax.errors.JaxRuntimeError):  # not there yet
            line = _client().blocking_key_value_get(ENDED, POLL)
            if leaving.is_set():
                return
            print(printable(line), file=sys.stderr, flush=True)
            _exit(2)


def _leave(error: BaseException) -> None:
    """Reports the error and ends this process, without the steps at which Python and JAX wait for the others."""
    code = (error.code if isinstance(error.code, int) else 1) if isinstance(error, SystemExit) else report(error)
    with suppress(Exception):  # the service may be gone, or another process was faster
        said = str(error).splitlines()[:1]
        line = f"error: process {index()} has ended ({type(error).__name__}: {''.join(said)}): see its output"
        _client().key_value_set(ENDED, line)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """Ends this process at once. Process 0 serves the store, and JAX aborts those who lose it: it ends last."""
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(Exception):
        _client().key_value_set(f"{ENDED}/{index()}", "", allow_overwrite=True)
        if first():
            end = time.monotonic() + LEAVING
            while len(_client().key_value_dir_get(f"{ENDED}/")) < count() and time.monotonic() < end:
                time.sleep(POLL / 10_000)
            time.sleep(POLL / 1000)  # from its key to its end a process has one call left
    os._exit(code)
