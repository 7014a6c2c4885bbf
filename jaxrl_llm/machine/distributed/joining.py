"""Connects the processes of a run, and ends all of them when one process ends early."""

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

# Seconds without a heartbeat after which JAX ends all processes. JAX sends a heartbeat every half of this time, so the
# network may pause for the other half. gRPC closes a connection that does not answer for 60 s.
HEARTBEAT_SECONDS = 100
# Seconds for which a process waits for the other processes at the start, because a host may have to load a container
# image first. JAX's default is 300 s, after which it aborts without a message.
JOIN_SECONDS = 1800.0
# Key under which an ending process stores its exit code, HUNG or "-", and its last line.
END_KEY, HUNG = "jaxrl_llm/ended", "hung"
# Set when this process ends, because from then on it need not report the end of other processes.
_is_ending = Event()
EXIT_SECONDS = 10  # time for which process 0 waits after an error until the other processes have ended


@contextmanager
def join_processes(address: str) -> Iterator[None]:
    """Connects the processes of a run for the duration of the block.

    address: "" for a single process, "auto", or HOST:PORT,INDEX/COUNT. After an error in the block, or if a process
    does not come, reports the error, informs the other processes and exits this process.
    Raises: UserError, if the address is wrong.
    """
    if not address:
        yield
        return
    _connect(address)
    watch = Thread(target=_watch_for_ends, daemon=True)
    watch.start()
    try:
        lifeline.open_lifeline(_is_ending, _end_after_death)
        try:
            yield
        except SystemExit as exit_error:  # a signal ends the run with exit code 0
            if exit_error.code:
                raise
        # All processes wait here, because process 0 serves the store, which the others need until their last step.
        wait("end")
    except BaseException as error:
        # If a process was killed, collectives of the others fail. Then another thread exits this process with the
        # right message, so this thread waits for it.
        if (
            isinstance(error, Exception)
            and not isinstance(error, UserError)
            and _is_ending.wait(2 * lifeline.RECONNECT_SECONDS)
        ):
            time.sleep(2 * EXIT_SECONDS)
        _leave(error)
    _is_ending.set()
    watch.join()
    jax.distributed.shutdown()


def _connect(address: str) -> None:
    """Connects this process to the other processes of the run. address: value of --distributed."""
    coordinates: dict[str, Any] = {}
    if match := re.fullmatch(r"(.+),(\d+)/(\d+)", address):
        coordinates = dict(coordinator_address=match[1], process_id=int(match[2]), num_processes=int(match[3]))
    elif address != "auto":
        raise UserError(f"--distributed {address}: must be auto, or HOST:PORT,INDEX/COUNT")
    if coordinates and coordinates["process_id"] >= coordinates["num_processes"]:
        raise UserError(f"--distributed {address}: INDEX counts from 0, so it must be less than COUNT")
    # JAX must not handle SIGTERM, because `session.signals` does.
    jax.config.update("jax_enable_preemption_service", False)
    # A CPU could run two programs at the same time, in a different order in each process, which would mix up their
    # collectives.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    limits: dict[str, Any] = dict(
        initialization_timeout=int(JOIN_SECONDS) + 60, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    join_timer = Timer(JOIN_SECONDS, _end_without_others, [address])
    join_timer.daemon = True
    join_timer.start()
    try:
        with progress.task(f"waiting for the other processes (--distributed {address})"):
            jax.distributed.initialize(**coordinates, **limits)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--distributed {address}: the processes cannot be connected ({reason}): HOST:PORT must be the address of "
            "process 0, and all processes must be started"
        ) from error
    finally:
        join_timer.cancel()


def _end_without_others(address: str) -> NoReturn:
    """Exits this process, because another process has not connected in time."""
    print(
        f"error: --distributed {printable(address)}: some processes of the run did not connect within "
        f"{JOIN_SECONDS / 60:.3g} minutes: start all processes; the same command tries again",
        file=sys.stderr,
        flush=True,
    )
    os._exit(PeerLost.exit_code)


def _watch_for_ends() -> None:
    """Exits this process when another process has ended by an error. Runs in a thread."""
    # The pause is needed because `blocking_key_value_get` fails immediately without process 0.
    while not _is_ending.wait(POLL / 10_000):
        with suppress(jax.errors.JaxRuntimeError):  # no process has ended yet
            code, hung, line = client().blocking_key_value_get(END_KEY, POLL).split(" ", 2)
            if _is_ending.is_set():
                return
            # The stacks are printed because the hanging process may have waited for this process.
            if hung == HUNG:
                hang.print_stacks()
            _is_ending.set()
            print(printable(line), file=sys.stderr, flush=True)
            _exit(int(code))


def _end_after_death(process: int) -> NoReturn:
    """Exits this process and the other processes, because `process` was killed."""
    _is_ending.set()
    line = f"error: process {process} was killed: see its output; the same command resumes from the last checkpoint"
    print(line, file=sys.stderr, flush=True)
    _announce_end(PeerLost.exit_code, line)
    # This process marks the killed one as ended, because `_exit` waits until every process is marked.
    _mark_ended(process)
    _exit(PeerLost.exit_code)


def _leave(error: BaseException) -> None:
    """Reports the error and exits this process at once, because a normal exit waits for the other processes."""
    _is_ending.set()
    code = (error.code if isinstance(error.code, int) else 1) if isinstance(error, SystemExit) else report(error)
    # The other processes end with 2 after a bug, which prints a traceback, so that no launcher restarts them.
    _announce_end(
        code if isinstance(error, UserError) else 2,
        _end_line(f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"),
    )
    _exit(code)


def end(code: int, line: str) -> NoReturn:
    """Prints an error of one line, and exits this process and the other processes. Any thread may call it."""
    _is_ending.set()
    print(printable(f"error: {line}"), file=sys.stderr, flush=True)
    _announce_end(code, _end_line(line), hung=True)
    _exit(code)


def _end_line(reason: str) -> str:
    """Returns the line that the other processes print when this process has ended."""
    return f"error: process {index()} has ended ({reason}): see its output"


def _announce_end(code: int, line: str, *, hung: bool = False) -> None:
    """Makes the other processes exit with a code and a line. hung: True if they shall print their stacks first."""
    # The call fails if the service has ended, or if another process has announced its end already.
    with suppress(Exception):
        client().key_value_set(END_KEY, f"{code} {HUNG if hung else '-'} {line}")


def _mark_ended(process: int) -> None:
    """Stores that a process has ended, because process 0 exits only after all others."""
    with suppress(Exception):
        client().key_value_set(f"{END_KEY}/{process}", "", allow_overwrite=True)


def _exit(code: int) -> NoReturn:
    """Exits this process at once. Process 0 exits last, because JAX aborts the processes that lose its store."""
    sys.stdout.flush()
    sys.stderr.flush()
    _mark_ended(index())
    with suppress(Exception):
        if first():
            deadline = time.monotonic() + EXIT_SECONDS
            while len(client().key_value_dir_get(f"{END_KEY}/")) < count() and time.monotonic() < deadline:
                time.sleep(POLL / 10_000)
            # A process makes one more call between its key and its exit, so process 0 keeps the store for a moment.
            time.sleep(POLL / 1000)
    os._exit(code)
