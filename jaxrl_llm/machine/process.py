"""Helper processes that call functions under a time limit. They end when this process ends."""

from __future__ import annotations

import fcntl
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError


def cpus(root: Path = Path("/")) -> int:
    """Returns the number of CPU cores that this process may use.

    It is limited by CPU affinity, by the quota of the cgroup, and by the share of other tasks of Slurm or MPI on the
    host. root: folder of the kernel's file systems, for tests.
    """
    # os.cpu_count() alone is too high in a container, which sees all cores of its host.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if slurm_cores := os.environ.get("SLURM_CPUS_PER_TASK"):
        cores = min(cores, int(slurm_cores))
    else:
        # Divide the cores by the number of tasks on this host. Slurm writes the tasks per host as "4(x2),3", of which
        # the first number is taken. MPI writes one number.
        task_text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or ""
        task_count = re.match(r"[1-9]\d*", task_text)
        cores //= int(task_count[0]) if task_count else 1
    return max(int(min(cores, _cgroup_quota(root))), 1)


def _cgroup_quota(root: Path) -> float:
    """Returns the number of cores that the cgroups (version 1 or 2) of this process allow; infinity without a quota."""
    smallest_quota = math.inf
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # Version 2 has one line without controllers, 0::PATH. Version 1 has one line for each kind of resource.
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount_point = root / "sys/fs/cgroup" / controllers
            # The quotas of parent groups apply too. A container sees its own group as the root.
            folder = mount_point / path.strip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(mount_point):
                    smallest_quota = min(smallest_quota, _group_quota(group))
    return smallest_quota


def _group_quota(group: Path) -> float:
    """Returns the number of cores that one cgroup allows; infinity without a quota."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        # A quota of -1 means no limit in version 1 of cgroups.
        return math.inf if int(quota) <= 0 else int(quota) / int(period)
    return math.inf


class Process:
    """A helper process without accelerators that calls functions for this process, one after the other.

    The helper has the parent's sys.path and working folder, but a session of its own, so that signals to the parent's
    process group do not reach it. It ends when it is closed, and when the parent ends, even by kill -9. Python's
    process pools are not used, because they import the main module and so JAX, and may outlive a killed parent.
    """

    def __init__(self, function: Callable[..., Any], *args: Any):
        """Starts the process and its first call, function(*args), which can do the imports for later calls."""
        self.connection, child_connection = Pipe()
        self._lifeline, child_lifeline = socket.socketpair()
        descriptors = [child_connection.fileno(), child_lifeline.fileno()]
        # sys.path is set before any import, because the function may be in a module of the user beside the config.
        child_code = f"import sys; sys.path[:] = {sys.path!r}; from jaxrl_llm.machine.process import serve; "
        child_code += f"serve(*{descriptors})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", child_code],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # A reward function that imports JAX must not allocate memory of the accelerator.
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        # Only the child keeps these ends open, so this process reads an end of file when the child ends.
        child_connection.close()
        child_lifeline.close()
        self.send_call(function, *args)

    def send_call(self, function: Callable[..., Any], *args: Any) -> None:
        """Starts a call of function(*args), whose result `receive_result` returns.

        If the process has ended, `receive_result` reports it. Raises: the error of pickle, if pickling fails.
        """
        # The call is pickled completely before it is sent, so that a pickling error leaves nothing in the pipe.
        call = pickle.dumps((function, args))
        with suppress(OSError):
            self.connection.send_bytes(call)

    def receive_result(self, seconds: float) -> Any:
        """Returns the result of the oldest call whose result has not been received.

        Raises: TimeoutError, if the call lasts longer than `seconds`; ChildProcessError, if the process has ended;
        UserError, if the function raised it; RuntimeError, for any other exception of the function.
        """
        if self.connection.closed:
            raise self._death_error()
        try:
            # `poll` does not accept infinity.
            if not self.connection.poll(None if seconds == math.inf else max(0.0, seconds)):
                raise TimeoutError
            error, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._death_error() from None
        if error:
            raise error
        return value

    def close(self) -> None:
        """Kills the process and all processes of its process group."""
        # The process leads its group, so both have the same id. After `wait` another process may get this id.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.connection.close()
        self._lifeline.close()

    def _death_error(self) -> ChildProcessError:
        """Waits for the end of the process, and returns an error with its signal or exit code."""
        exit_code = self._process.wait()
        return ChildProcessError(signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}")


def serve(connection: int, lifeline: int) -> None:
    """Executes the parent's calls in the helper process until the parent closes the connection.

    connection, lifeline: file descriptors.
    """
    # The kernel kills this process with SIGIO when the parent's end of the lifeline closes. A waiting thread could not
    # do this, because a regular expression or a power of integers may hold the GIL for hours.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        # The parent decides when this process ends. SIG_IGN is not used, because children would inherit it.
        signal.signal(signal_number, lambda *_: None)
    for descriptor in (connection, lifeline):
        os.set_inheritable(descriptor, False)
    calls = Connection(connection)
    while True:
        try:
            call = calls.recv_bytes()
        except EOFError:
            return
        calls.send_bytes(_run_call(call))


def _run_call(call: bytes) -> bytes:
    """Runs a pickled call of the parent, and returns the pickled pair of an error (None without one) and the result."""
    try:
        function, args = pickle.loads(call)
        # pickle.dumps is inside the try block, because a value that cannot be pickled is an error of the function.
        result = pickle.dumps((None, function(*args)))
    except UserError as error:
        result = pickle.dumps((error, None))
    except Exception:
        # The error is sent as text, because many exceptions cannot be pickled, and the parent may not know their class.
        result = pickle.dumps((RuntimeError(traceback.format_exc()), None))
    # Output to a pipe is buffered, so the flush shows what the function has printed.
    sys.stdout.flush()
    return result


class Pool:
    """Helper processes that call one function for many arguments, with a time limit for each call."""

    def __init__(self, function: Callable[..., Any], prepare: Callable[[], Any]):
        """prepare: function that each process calls first; its time does not count toward the first call's limit."""
        self._function, self._prepare = function, prepare
        self._processes: list[Process | None] = []

    def map(
        self, items: Sequence[tuple[Any, ...]], *, size: int, call_seconds: float, total_seconds: float
    ) -> list[Any]:
        """Returns function(*item) for each item, computed in `size` processes; None for a call that exceeds a limit.

        call_seconds: time limit of each call. total_seconds: time limit of all calls together. The process of a call
        that exceeds a limit is killed and replaced. Raises: RuntimeError, for an exception of the function.
        """
        results: list[Any] = [None] * len(items)
        item_numbers, deadline = iter(range(len(items))), time.monotonic() + total_seconds
        # The processes stay for the next call of `map`, because they have done their imports.
        self._processes += [None] * (size - len(self._processes))

        def run_calls(process_number: int) -> None:
            # All threads share the iterator, so each item is computed once.
            for item_number in item_numbers:
                results[item_number] = self._call(process_number, items[item_number], call_seconds, deadline)

        # One thread waits for each process. `list` raises the error of a thread here.
        with ThreadPoolExecutor(size) as threads:
            list(threads.map(run_calls, range(size)))
        return results

    def _call(self, process_number: int, item: tuple[Any, ...], call_seconds: float, deadline: float) -> Any:
        """Calls the function in a process, which it starts if needed. Returns None if the call takes too long."""
        process = self._processes[process_number]
        if time.monotonic() >= deadline:
            return None
        try:
            if process is None:
                # A new process first calls the function `prepare`, within the limit of all calls.
                process = self._processes[process_number] = Process(self._prepare)
                process.receive_result(deadline - time.monotonic())
            process.send_call(self._function, *item)
            return process.receive_result(min(call_seconds, deadline - time.monotonic()))
        except (TimeoutError, ChildProcessError):
            if process:
                # The process must be killed, because a running call cannot be interrupted.
                process.close()
            self._processes[process_number] = None
            return None
