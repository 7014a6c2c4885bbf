"""Runs Python code that nobody has read, confined by bubblewrap (`sandbox.bubblewrap`).

`sandbox.inside` is the program that runs in there.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Annotated, NamedTuple

from jaxrl_llm.config.schema import Field
from jaxrl_llm.errors import MissingHere
from jaxrl_llm.sandbox import inside
from jaxrl_llm.sandbox.bubblewrap import ENVIRONMENT, FOLDER, NoSandbox, command, interpreter, remedy
from jaxrl_llm.sandbox.system_calls import refusals

MOST_FILES, MOST_THREADS = 10_000, 32
# Seconds between two looks at a program.
LOOK = 0.1
# Seconds of the clock for each second of the CPU: a machine with other work is slower.
CLOCK = 5.0
# An environment variable, so that the processes of rewards have it too.
UNCONFINED = "JAXRL_LLM_UNCONFINED"
# Why a program failed. The last line of its error says which, or what this process saw; it decides no verdict.
# Below 16 MiB Python cannot start, and no program passes a test: measured, docs/rewards.md. The upper bounds fit the
# integers of the limits that the kernel keeps.
Mebibytes = Annotated[int, Field(int, low=16, high=2**20)]
Seconds = Annotated[float, Field(float, low=0, exclusive=True, high=86_400.0)]
REASONS = ("error", "memory", "disk", "processes", "network", "files")
# The numbers: EFBIG, ENOSPC and EDQUOT; EAGAIN; ENETUNREACH; EROFS.
LAST_LINES = {
    "memory": r"MemoryError",
    "disk": r"OSError: \[Errno (27|28|122)\]",
    "processes": r"BlockingIOError: \[Errno 11\]|RuntimeError: can't start new thread",
    "network": r"OSError: \[Errno 101\]",
    "files": r"PermissionError|OSError: \[Errno 30\]",
}
INSIDE = Path(inside.__file__).read_text(encoding="utf-8")  # the text of the program in there


class Result(NamedTuple):
    """How a program ended."""

    output: str  # of standard output, cut off
    errors: str  # of standard error, cut off
    error: str = ""  # "", or what ended it
    reason: str = ""  # "", "time", or one of REASONS


def allow_unconfined(allowed: bool) -> None:
    """Lets programs run without a sandbox, in this process and in those that it starts (config.reward.unconfined)."""
    os.environ[UNCONFINED] = "1" if allowed else ""


def is_unconfined() -> bool:
    return bool(os.environ.get(UNCONFINED))


def check() -> None:
    """Raises: NoSandbox, if this machine cannot confine a process."""
    if sys.platform != "linux":
        raise NoSandbox(f"this is {sys.platform}")
    try:
        refusals()
    except KeyError as machine:
        raise NoSandbox(f"its filter of system calls knows x86_64 and aarch64, not {machine.args[0]}") from None
    if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
        raise NoSandbox("its kernel does not list the children of a process (CONFIG_PROC_CHILDREN)")
    # The proof: what an administrator has forbidden shows only when bwrap runs.
    run("", seconds=10.0, memory=512, characters=1000)


@cache
def _problem() -> str:
    try:
        check()
    except NoSandbox as problem:
        return str(problem)
    return ""


def refuse_without() -> None:
    """Raises: MissingHere, if this machine cannot confine a program, and the config does not allow unconfined ones."""
    if not is_unconfined() and (problem := _problem()):
        raise MissingHere(
            f"programs of the policy run in bubblewrap, on Linux: {problem}; or set config.reward.unconfined = True "
            "(evaluate: --unconfined), and they can do all that you can"
        )


def run(code: str, *, seconds: float, memory: int, characters: int, stdin: str = "", end: float = math.inf) -> Result:
    """Runs code in a temporary folder, which is deleted when the code ends.

    seconds: limit of CPU time, and CLOCK times as many seconds by the clock; memory: limit in MiB; characters: number
    that is kept of the output, and of the errors; stdin: text of the standard input; end: time.monotonic() at which the
    program is killed. Raises: NoSandbox.
    """
    with started(code, seconds=seconds, memory=memory, stdin=stdin) as program:
        error, reason = program.wait(min(time.monotonic() + CLOCK * seconds, end))
        return Result(_text(program.stdout, characters), _text(program.stderr, characters), error, reason)


class SandboxProgram(NamedTuple):
    """A program that runs in a sandbox."""

    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    seconds: float  # of the CPU
    began: float  # time.monotonic()

    def wait(self, end: float, beside: SandboxProgram | None = None) -> tuple[str, str]:
        """Waits until the program ends, and returns error and reason.

        It is killed at the time `end`, and if it, or the one `beside` it, has too many files or threads.
        """
        while not self.ends_within(max(min(LOOK, end - time.monotonic()), 0.001)):
            problem = self.problem() or (beside.problem() if beside else None)
            if problem or time.monotonic() >= end:
                self.kill()
                return problem or (f"it took longer than {self.seconds:g} seconds", "time")
        return self.ended()

    def ends_within(self, seconds: float) -> bool:
        """Waits until the program has ended, for so long at most. Returns whether it has."""
        try:
            descriptor = os.pidfd_open(self.process.pid)
        except (AttributeError, OSError):
            # Another system, or Linux before 5.3.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
            return self.process.returncode is not None
        try:
            # Popen.wait would look again and again.
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            return bool(ended.poll(1000 * seconds))
        finally:
            os.close(descriptor)

    def problem(self) -> tuple[str, str] | None:
        """Returns error and reason, if the program has more files or threads than allowed."""
        with suppress(OSError, ValueError, IndexError):  # it may end meanwhile
            pid = self.process.pid
            for _ in () if is_unconfined() else range(2):
                # Bwrap outside, bwrap as process 1, the program.
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            if len(os.listdir(f"/proc/{pid}/task")) > MOST_THREADS:
                return "it has too many threads", "processes"
            room = None if is_unconfined() else os.statvfs(f"/proc/{pid}/root{FOLDER}")
            # Files and not bytes: an empty one takes nothing of the folder's size, but memory of the kernel.
            if room and room.f_files - room.f_ffree > MOST_FILES:
                return "it wrote too much", "disk"
        return None

    def ended(self) -> tuple[str, str]:
        """Returns error and reason of a program that has ended by itself."""
        code = self.process.wait()
        # Bubblewrap gives 128 + the signal that ended the program.
        number = -code if code < 0 else code - 128
        late = f"it took longer than {self.seconds:g} seconds", "time"
        if code == 0:
            return "", ""
        if number <= 0:
            return "it failed", reason_of(_text(self.stderr, 2000))
        # A program may choose the code, but not the time that it took.
        limited = number in (signal.SIGXCPU, signal.SIGKILL) and time.monotonic() - self.began >= 0.9 * self.seconds
        return late if limited else (f"it was ended by signal {number}", "error")

    def kill(self) -> None:
        if is_unconfined():
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        # The kernel then ends bubblewrap's process 1, and with it all others.
        self.process.kill()
        self.process.wait()


def reason_of(errors: str) -> str:
    """Returns why a program failed, as the last line of its error says: one of REASONS."""
    last = errors.rstrip().rpartition("\n")[2]
    return next((reason for reason, text in LAST_LINES.items() if re.match(text, last)), "error")


def _text(file: IO[bytes], characters: int) -> str:
    """Returns the text of a file, without its middle if it is too long: an error is at its end."""
    file.seek(0)
    text, half = file.read(inside.FILE_SIZE).decode("utf-8", "replace"), characters // 2
    return text if len(text) <= characters else f"{text[:half]}\n...\n{text[len(text) - half :]}"


@contextmanager
def started(
    code: str, *, seconds: float, memory: int, stdin: str = "", descriptors: Sequence[int] = ()
) -> Iterator[SandboxProgram]:
    """Starts code in a sandbox, as `run` does, and kills it at the end. descriptors: more that it inherits.

    Raises: NoSandbox.
    """
    with ExitStack() as opened:
        texts = [opened.enter_context(tempfile.TemporaryFile()) for _ in (code, stdin)]
        for text, file in zip((code, stdin), texts, strict=True):
            file.write(text.encode("utf-8", "replace"))
            file.seek(0)
        # Output goes to files and not to pipes, because nobody reads while the program runs. RLIMIT_FSIZE bounds files.
        stdout, stderr = (opened.enter_context(tempfile.TemporaryFile()) for _ in "oe")
        (is_ready, ready), (filter_, to_filter) = (pipe(opened) for _ in "rf")
        alone = is_unconfined()
        # RLIMIT_CPU takes whole seconds.
        numbers = memory, max(math.ceil(seconds), 1), texts[0].fileno(), ready.fileno(), int(alone)
        # The options take user site, site and the program's folder off sys.path, which leaves the standard library.
        program = [interpreter(), "-s", "-S", "-P", "-c", INSIDE, *map(str, numbers)]
        folder, environment, handed = "/", {}, [texts[0].fileno(), ready.fileno(), *descriptors]
        if alone:
            folder = opened.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            # The trainer's environment is not inherited, because it may hold secrets.
            environment = ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
        else:
            # The write does not wait for a reader, because the whole filter fits into a pipe.
            to_filter.write(refusals())
            # The input is opened again, because descriptors of one opening share their position in the file.
            again = opened.enter_context(open(f"/proc/self/fd/{texts[1].fileno()}", "rb"))
            program = command(filter_.fileno(), again.fileno(), program)
            handed += [filter_.fileno(), again.fileno()]
        # bwrap reads the filter to its end.
        to_filter.close()
        process = subprocess.Popen(
            program,
            stdin=texts[1],
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=environment,
            pass_fds=handed,
            start_new_session=True,
        )
        started_program = SandboxProgram(process, stdout, stderr, seconds, time.monotonic())
        try:
            # This process's own end: while it is open, the read below would never see that the program has ended.
            ready.close()
            # No exit code says that a process is confined: its program chooses the code.
            if not is_ready.read(1):
                process.wait()
                message = _text(started_program.stderr, 1000).strip() or f"bwrap ended with {process.returncode}"
                raise NoSandbox(message if alone else f"{message}; {remedy(message)}")
            yield started_program
        finally:
            started_program.kill()


def pipe(opened: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Returns the two ends of a new pipe, to read and to write, which `opened` closes."""
    read, write = os.pipe()
    return opened.enter_context(open(read, "rb", buffering=0)), opened.enter_context(open(write, "wb", buffering=0))
