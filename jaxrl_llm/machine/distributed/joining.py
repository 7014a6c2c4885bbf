"""How a process joins the others of a run, and how it ends when one of them has ended."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread, Timer
from typing import Any, NoReturn

import jax

from jaxrl_llm.errors import PeerLost, UserError, printable, report
from jaxrl_llm.machine import hang, progress
from jaxrl_llm.machine.distributed import lifeline
from jaxrl_llm.machine.distributed.processes import count, first, index
from jaxrl_llm.machine.distributed.store import POLL, client, wait

# Seconds without a sign of life after which JAX ends all processes. It gives one every half of them, so that a pause of
# the network may take the other half; gRPC itself breaks off a connection that does not answer for 60 s.
HEARTBEAT = 100
# Seconds for which a process waits for the others at the start: a host may have to load an image first. JAX's own limit
# is 300 s, and at its end JAX aborts without a line.
JOINED = 1800.0
# Key of the exit code, of HUNG or "-", and of the line with which a process has ended.
ENDED, HUNG = "jaxrl_llm/ended", "hung"
# Set when this process ends: the ends of others, and its own line, are nothing new then.
_leaving = Event()
LEAVING = 10  # seconds for which process 0 waits, at an error, until the others have ended


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Joins the processes of a run in this block; address: "" (only this process), "auto" or HOST:PORT,INDEX/COUNT.

    At an error it does not return: it reports the error, tells the other processes and ends this one.
    Raises: UserError, if the address is wrong. If another process does not come, it ends this one.
    """
    if not address:
        yield
        return
    _connect(address)
    watch = Thread(target=_watch, daemon=True)
    watch.start()
    try:
        lifeline.hold(_leaving, _end_without)
        try:
            yield
        except SystemExit as ended:  # with 0 after a signal
            if ended.code:
                raise
        # Process 0 has the store, which the others need until their last step.
        wait("end")
    except BaseException as error:
        # A collective fails without a process that was killed. Then another thread ends this process, with its line.
        if isinstance(error, Exception) and not isinstance(error, UserError) and _leaving.wait(2 * lifeline.GRACE):
            time.sleep(2 * LEAVING)
        _leave(error)
    _leaving.set()
    watch.join()
    jax.distributed.shutdown()


def _connect(address: str) -> None:
    known: dict[str, Any] = {}
    if match := re.fullmatch(r"(.+),(\d+)/(\d+)", address):
        known = dict(coordinator_address=match[1], process_id=int(match[2]), num_processes=int(match[3]))
    elif address != "auto":
        raise UserError(f"--distributed {address}: give auto, or HOST:PORT,INDEX/COUNT")
    # `session.signals` handles SIGTERM, so the service must not.
    jax.config.update("jax_enable_preemption_service", False)
    # A CPU may run two programs at once, in another order in each process: their collectives would be mixed up.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    limits: dict[str, Any] = dict(initialization_timeout=int(JOINED) + 60, heartbeat_timeout_seconds=HEARTBEAT)
    alone = Timer(JOINED, _end_alone, [address])
    alone.daemon = True
    alone.start()
    try:
        with progress.task(f"waiting for the other processes (--distributed {address})"):
            jax.distributed.initialize(**known, **limits)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--distributed {address}: the processes cannot be joined ({reason}): give HOST:PORT,INDEX/COUNT with the "
            "address of process 0, and start all processes"
        ) from error
    finally:
        alone.cancel()


def _end_alone(address: str) -> NoReturn:
    """Ends this process, because another one has not come."""
    print(
        f"error: --distributed {printable(address)}: the processes of the run have not all come in {JOINED / 60:.3g} "
        "minutes: start all of them; the same command tries again",
        file=sys.stderr,
        flush=True,
    )
    os._exit(PeerLost.exit_code)


def _watch() -> None:
    """Runs in a thread: ends this process when another one has ended by an error."""
    # The pause: without process 0 the call below fails at once, and must not spin.
    while not _leaving.wait(POLL / 10_000):
        with suppress(jax.errors.JaxRuntimeError):  # not there yet
            code, hung, line = client().blocking_key_value_get(ENDED, POLL).split(" ", 2)
            if _leaving.is_set():
                return
            # This process may be the one that the other one has waited for: its stacks show at what.
            if hung == HUNG:
                hang.tell_stacks()
            _leaving.set()
            print(printable(line), file=sys.stderr, flush=True)
            _exit(int(code))


def _end_without(process: int) -> NoReturn:
    """Ends this process and the others, because one was killed."""
    _leaving.set()
    line = f"error: process {process} was killed: see its output; the same command goes on from the last checkpoint"
    print(line, file=sys.stderr, flush=True)
    _tell(PeerLost.exit_code, line)
    # This process marks the killed one as ended, because `_exit` waits until every process is marked.
    _mark_ended(process)
    _exit(PeerLost.exit_code)


def _leave(error: BaseException) -> None:
    """Reports the error and ends this process, without the steps at which Python and JAX wait for the others."""
    _leaving.set()
    code = (error.code if isinstance(error.code, int) else 1) if isinstance(error, SystemExit) else report(error)
    # A traceback is no reason to start the others again.
    _tell(
        code if isinstance(error, UserError) else 2,
        _ended(f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"),
    )
    _exit(code)


def end(code: int, line: str) -> NoReturn:
    """Reports an error of one line, and ends this process and the others. Any thread may call it."""
    _leaving.set()
    print(printable(f"error: {line}"), file=sys.stderr, flush=True)
    _tell(code, _ended(line), hung=True)
    _exit(code)


def _ended(why: str) -> str:
    return f"error: process {index()} has ended ({why}): see its output"


def _tell(code: int, line: str, *, hung: bool = False) -> None:
    """Ends the other processes with an exit code and a line; hung: they show their stacks first."""
    # The service may be gone, or another process was faster.
    with suppress(Exception):
        client().key_value_set(ENDED, f"{code} {HUNG if hung else '-'} {line}")


def _mark_ended(process: int) -> None:
    with suppress(Exception):
        client().key_value_set(f"{ENDED}/{process}", "", allow_overwrite=True)


def _exit(code: int) -> NoReturn:
    """Ends this process at once. Process 0 serves the store, and JAX aborts those who lose it: it ends last."""
    sys.stdout.flush()
    sys.stderr.flush()
    _mark_ended(index())
    with suppress(Exception):
        if first():
            end = time.monotonic() + LEAVING
            while len(client().key_value_dir_get(f"{ENDED}/")) < count() and time.monotonic() < end:
                time.sleep(POLL / 10_000)
            # A process makes one more call between its key and its end, so process 0 must not end the store at once.
            time.sleep(POLL / 1000)
    os._exit(code)
