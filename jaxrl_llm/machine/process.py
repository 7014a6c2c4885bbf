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
    """Returns the cores that this task of the host may use: its affinity, its cgroup's quota, the other tasks' share.

    root: folder that holds the kernel's file systems.
    """
    # os.cpu_count() alone is too high in a container, which sees all cores of its host.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if allotted := os.environ.get("SLURM_CPUS_PER_TASK"):
        cores = min(cores, int(allotted))
    else:
        # The first number of "4(x2),3": tasks on the first hosts of a Slurm step; MPI gives one number.
        text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or ""
        tasks = re.match(r"[1-9]\d*", text)
        cores //= int(tasks[0]) if tasks else 1
    return max(int(min(cores, _quota(root))), 1)


def _quota(root: Path) -> float:
    """Returns the cores that the cgroups of this process allow, in version 2 or 1; infinity without a quota."""
    least = math.inf
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # Version 2 has one line without controllers, 0::PATH; version 1 one for each kind of resource.
            if controllers and "cpu" not in controllers.split(","):
                continue
            mounted = root / "sys/fs/cgroup" / controllers
            # A container sees its own group as the root; a parent's quota holds too.
            folder = mounted / path.strip("/")
            for place in (folder, *folder.parents):
                if place.is_relative_to(mounted):
                    least = min(least, _quota_of(place))
    return least


def _quota_of(group: Path) -> float:
    """Returns the cores that one cgroup allows."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        # Version 1 writes -1 for no quota.
        return math.inf if int(quota) <= 0 else int(quota) / int(period)
    return math.inf


class Process:
    """A Python process without accelerators that calls functions for this process, one after the other.

    It has the parent's sys.path and working folder, but a separate session, so that signals to the parent's process
    group do not reach it. It ends when it is closed and when the parent ends, even by kill -9.
    Python's process pools do not fit: they import the main module, and so JAX, and may outlive a killed parent.
    """

    def __init__(self, function: Callable[..., Any], *args: Any):
        """Starts the process and its first call, function(*args), which can do the imports for later calls."""
        self.connection, theirs = Pipe()
        self._lifeline, watched = socket.socketpair()
        handed = [theirs.fileno(), watched.fileno()]
        # The path before any import: the module of the function may be the user's, beside the config.
        code = f"import sys; sys.path[:] = {sys.path!r}; from jaxrl_llm.machine.process import serve; serve(*{handed})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=handed,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # A reward function that imports JAX must not take the memory of the accelerator.
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        # Only the child keeps these ends open, so this process reads an end of file when the child ends.
        theirs.close()
        watched.close()
        self.ask(function, *args)

    def ask(self, function: Callable[..., Any], *args: Any) -> None:
        """Starts a call, whose `answer` tells if the process has ended. Raises: pickle's error, if pickling fails."""
        # Whole before it is sent: an error of pickle leaves no half a question in the pipe.
        question = pickle.dumps((function, args))
        with suppress(OSError):
            self.connection.send_bytes(question)

    def answer(self, seconds: float) -> Any:
        """Returns the result of the oldest call without an answer.

        Raises: TimeoutError, if there is no answer within `seconds`; ChildProcessError, if the process has ended;
        UserError, if the function raised it; RuntimeError, for any other exception of the function.
        """
        if self.connection.closed:
            raise self._ended()
        try:
            # `poll` takes no infinity.
            if not self.connection.poll(None if seconds == math.inf else max(0.0, seconds)):
                raise TimeoutError
            error, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._ended() from None
        if error:
            raise error
        return value

    def close(self) -> None:
        """Kills the process and all processes of its process group."""
        # The process leads its group, so both have one number. After `wait` the number may belong to another process.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.connection.close()
        self._lifeline.close()

    def _ended(self) -> ChildProcessError:
        code = self._process.wait()
        return ChildProcessError(signal.Signals(-code).name if code < 0 else f"exit code {code}")


def serve(connection: int, lifeline: int) -> None:
    """Answers the calls of the parent until it closes the connection. Both arguments are file descriptors."""
    # The kernel kills this process with SIGIO when the parent's end of the lifeline closes. A waiting thread would need
    # the GIL, which a regular expression or a power of integers may hold for hours.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent decides when this process ends. Not SIG_IGN, because children inherit it.
        signal.signal(number, lambda *_: None)
    for descriptor in (connection, lifeline):
        os.set_inheritable(descriptor, False)
    questions = Connection(connection)
    while True:
        try:
            question = questions.recv_bytes()
        except EOFError:
            return
        questions.send_bytes(_answer(question))


def _answer(question: bytes) -> bytes:
    try:
        function, args = pickle.loads(question)
        # pickle.dumps stands in the try, because a value that cannot be pickled is an error of the function.
        answer = pickle.dumps((None, function(*args)))
    except UserError as error:
        answer = pickle.dumps((error, None))
    except Exception:
        # The error travels as text: many exceptions do not survive pickle, and the parent may not know their class.
        answer = pickle.dumps((RuntimeError(traceback.format_exc()), None))
    # Python writes to a pipe in blocks, so what the function printed appears now.
    sys.stdout.flush()
    return answer


class Pool:
    """Processes that call one function for many arguments, with a time limit for each call."""

    def __init__(self, function: Callable[..., Any], prepare: Callable[[], Any]):
        """prepare: each process calls it first, and its time does not count for the first item."""
        self._function, self._prepare = function, prepare
        self._processes: list[Process | None] = []

    def map(self, items: Sequence[tuple[Any, ...]], *, size: int, each: float, whole: float) -> list[Any]:
        """Returns function(*item) of each item, computed in `size` processes; None for a call that did not return.

        A process is killed and replaced when its call takes more than `each` seconds, or when the whole map takes more
        than `whole` seconds. Raises: RuntimeError, for an exception of the function.
        """
        answers: list[Any] = [None] * len(items)
        numbers, end = iter(range(len(items))), time.monotonic() + whole
        # They stay for the next call: each has done its imports.
        self._processes += [None] * (size - len(self._processes))

        def work(place: int) -> None:
            # All threads share the iterator, so each number goes to one thread.
            for number in numbers:
                answers[number] = self._call(place, items[number], each, end)

        with ThreadPoolExecutor(size) as threads:
            list(threads.map(work, range(size)))
        return answers

    def _call(self, place: int, item: tuple[Any, ...], each: float, end: float) -> Any:
        process = self._processes[place]
        if time.monotonic() >= end:
            return None
        try:
            if process is None:
                process = self._processes[place] = Process(self._prepare)
                process.answer(end - time.monotonic())
            process.ask(self._function, *item)
            return process.answer(min(each, end - time.monotonic()))
        except (TimeoutError, ChildProcessError):
            if process:
                # A call cannot be stopped, only its process.
                process.close()
            self._processes[place] = None
            return None
