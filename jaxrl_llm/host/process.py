"""Processes that call functions for this one: a call can be ended at a time limit, and none outlives this process."""

from __future__ import annotations

import fcntl
import math
import os
import pickle
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
from typing import Any

from jaxrl_llm.errors import UserError


class Process:
    """A Python process without accelerators that calls functions for this one, one after the other.

    It has this process's sys.path and working folder, and a session of its own: signals to the group of this process
    do not reach it. It ends when it is closed and when this process ends, even by kill -9.
    The processes of Python's own pools import the main module, and so JAX, and may outlive a killed parent.
    """

    def __init__(self, function: Callable[..., Any], *args: Any):
        """The first question is function(*args): what it imports is there when the next one is asked."""
        self.connection, theirs = Pipe()
        self._lifeline, watched = socket.socketpair()
        handed = [theirs.fileno(), watched.fileno()]
        code = f"import sys; sys.path[:] = {sys.path!r}; from jaxrl_llm.host.process import serve; serve(*{handed})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=handed,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        theirs.close()
        watched.close()
        self.ask(function, *args)

    def ask(self, function: Callable[..., Any], *args: Any) -> None:
        """Begins a call. Raises: ChildProcessError, if the process has ended; what cannot be pickled raises too."""
        question = pickle.dumps((function, args))
        try:
            self.connection.send_bytes(question)
        except OSError:
            raise self._ended() from None

    def answer(self, seconds: float) -> Any:
        """What the call that began first, and has no answer yet, returns.

        Raises: TimeoutError, if it is not there within so many seconds; ChildProcessError, if the process has ended;
        UserError, as the function did; RuntimeError, for any other exception of the function.
        """
        try:
            if not self.connection.poll(None if seconds == math.inf else max(0.0, seconds)):
                raise TimeoutError
            error, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._ended() from None
        if error:
            raise error
        return value

    def close(self) -> None:
        """Ends the process, and what it has started in its session."""
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
    """Answers questions until the other side is gone. Both arguments are file descriptors."""
    # The kernel ends this process with SIGIO when the other end of the lifeline closes. A thread that waits for that
    # would need the interpreter lock, which a regular expression or a power of integers may hold for hours.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the other side decides; a handler, for SIG_IGN would be inherited
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
        answer = None, function(*args)
    except UserError as error:
        answer = error, None
    except Exception:
        answer = RuntimeError(traceback.format_exc()), None
    sys.stdout.flush()  # what a function prints is seen when it returns
    return pickle.dumps(answer)


class Pool:
    """Processes that call one function for many arguments, each call within a time limit."""

    def __init__(self, function: Callable[..., Any], prepare: Callable[[], Any]):
        """prepare: what each process calls first; its time does not count for the first item."""
        self._function, self._prepare = function, prepare
        self._processes: list[Process | None] = []

    def map(self, items: Sequence[tuple[Any, ...]], *, size: int, each: float, whole: float) -> list[Any]:
        """function(*item) of each item, in `size` processes; None for a call that did not return.

        A process is ended, and replaced, when its call takes more than `each` seconds, and when all of it takes
        more than `whole`. Raises: RuntimeError, for an exception of the function.
        """
        answers: list[Any] = [None] * len(items)
        numbers, end = iter(range(len(items))), time.monotonic() + whole
        self._processes += [None] * (size - len(self._processes))

        def work(place: int) -> None:
            for number in numbers:  # the threads take turns: each number is given to one of them
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
                process.close()
            self._processes[place] = None
            return None
