"""Runs Python code that nobody has read, in a process without network, without children and with one folder.

`host.confined` is the program that runs inside, and says how the kernel confines it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import IO, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.host import confined
from jaxrl_llm.host.confined import REASONS, UNCONFINED

FOLDER_SIZE = 64 * 2**20  # bytes of all files
DEEPEST, MOST_FILES = 64, 10_000
LOOK = 0.2  # seconds between two looks at a program
READ = ("/usr/lib", "/lib", "/lib64", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


class Result(NamedTuple):
    """How a program ended."""

    output: str  # of standard output and standard error, cut off
    error: str = ""  # "", or what ended it
    reason: str = ""  # "", "time", or one of `confined.REASONS`


class NoSandbox(Exception):
    """This machine cannot confine a process."""


def check() -> None:
    """Raises: NoSandbox, if this machine cannot confine a process."""
    if sys.platform != "linux":
        raise NoSandbox(f"this is {sys.platform}")
    run("", seconds=60.0, memory=512, characters=1000)


@cache
def refuse_without() -> None:
    """Raises: UserError, if this machine cannot confine a program."""
    try:
        check()
    except NoSandbox as problem:
        raise UserError(f"programs of the policy need Linux 5.13 with Landlock and seccomp: {problem}") from None


def run(code: str, *, seconds: float, memory: int, characters: int, stdin: str = "") -> Result:
    """Runs code in a folder of its own, which is removed after it.

    seconds: of the clock and of the CPU; memory: MiB; characters: of the output; stdin: what it can read.
    Raises: NoSandbox.
    """
    with started(code, seconds=seconds, memory=memory, stdin=stdin) as program:
        error, reason = program.wait(time.monotonic() + seconds)
        if error == LATE:
            error = f"it took longer than {seconds:g} seconds"
        return Result(program.text(characters), error, reason)


LATE = "it took too long"


class Program(NamedTuple):
    """A program that runs in a sandbox."""

    process: subprocess.Popen[bytes]
    folder: str
    output: IO[bytes]

    def wait(self, end: float, beside: Program | None = None) -> tuple[str, str]:
        """Waits until the program ends, and returns error and reason.

        It is killed at the time `end`, and if it, or the one `beside` it, writes too much. Raises: NoSandbox.
        """
        folders = [self.folder, *([beside.folder] if beside else [])]
        while True:
            try:
                self.process.wait(max(min(LOOK, end - time.monotonic()), 0.001))
                return self._ended(self.process.returncode)
            except subprocess.TimeoutExpired:
                late = time.monotonic() >= end
            if late or max(map(_size, folders)) > FOLDER_SIZE:
                self.kill()
                return (LATE, "time") if late else ("it wrote too much", "disk")

    def kill(self) -> None:
        self.process.kill()  # it has no children
        self.process.wait()

    def text(self, characters: int) -> str:
        """Returns the output, without its middle if it is too long: an error is at its end."""
        self.output.seek(0)
        text, half = self.output.read().decode("utf-8", "replace"), characters // 2
        return text if len(text) <= characters else f"{text[:half]}\n...\n{text[len(text) - half :]}"

    def _ended(self, code: int) -> tuple[str, str]:
        if code == UNCONFINED:
            raise NoSandbox(self.text(1000))
        if code < 0:
            reason = "time" if -code in (signal.SIGXCPU, signal.SIGKILL) else "error"
            return f"it was ended by signal {-code}", reason
        reasons = {number: reason for reason, number in REASONS.items()}
        return ("it failed", reasons.get(code, "error")) if code else ("", "")


@contextmanager
def started(
    code: str, *, seconds: float, memory: int, stdin: str = "", descriptors: Sequence[int] = ()
) -> Iterator[Program]:
    """Starts code in a sandbox, as `run` does, and kills it at the end. descriptors: more that it inherits."""
    with (
        _folder() as folder,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as file,
        tempfile.TemporaryFile() as given,
    ):
        for text, to in ((code, file), (stdin, given)):
            to.write(text.encode("utf-8", "replace"))
            to.seek(0)
        limits = str(memory), str(max(round(seconds), 1))
        command = [sys.executable, "-I", "-S", confined.__file__, folder, *limits, str(file.fileno()), *READ]
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},  # not the trainer's: it may hold secrets
            pass_fds=(file.fileno(), *descriptors),
            start_new_session=True,
        )
        program = Program(process, folder, output)
        try:
            yield program
        finally:
            program.kill()


def _size(folder: str) -> float:
    """Returns the bytes of all files below a folder; infinity, if there are too many, or too deep ones."""
    size, count, waiting = 0, 0, [(folder, 0)]
    while waiting:
        place, depth = waiting.pop()
        with suppress(OSError), os.scandir(place) as entries:  # the program may remove or close folders meanwhile
            for entry in entries:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))
                else:
                    size += entry.stat(follow_symlinks=False).st_size
                if depth > DEEPEST or count > MOST_FILES:
                    return math.inf
    return size


@contextmanager
def _folder() -> Iterator[str]:
    made = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    try:
        yield made.name
    finally:
        try:
            made.cleanup()
        except RecursionError:  # folders in folders, thousands deep
            subprocess.run(["rm", "-rf", made.name], check=False)
