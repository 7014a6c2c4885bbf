"""Runs untrusted Python code, confined by bubblewrap (`sandbox.bubblewrap`); `sandbox.inside` launches it there."""

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
from jaxrl_llm.sandbox.bubblewrap import ENVIRONMENT, FOLDER, NoSandbox, confined_command, python_path, remedy
from jaxrl_llm.sandbox.system_calls import seccomp_filter

MAX_FILES, MAX_THREADS = 10_000, 32  # most files and threads of a program at a time
# Seconds between two checks of a running program.
POLL_SECONDS = 0.1
# Wall-clock seconds that are allowed for each second of CPU time, because a busy machine is slower.
CLOCK_FACTOR = 5.0
# Name of the environment variable that allows programs without a sandbox. Reward processes inherit the variable.
UNCONFINED = "JAXRL_LLM_UNCONFINED"
# With less than 16 MiB, Python cannot start (measured, docs/rewards.md). The upper bounds fit the kernel's integers.
Mebibytes = Annotated[int, Field(int, low=16, high=2**20)]
Seconds = Annotated[float, Field(float, low=0, exclusive=True, high=86_400.0)]
# Why a program failed, found by the last line of its error or by this process. A reason never decides a verdict.
REASONS = ("error", "memory", "disk", "processes", "network", "files")
# {reason: pattern of the last line of a program's standard error}. The error numbers are EFBIG, ENOSPC and EDQUOT;
# EAGAIN; ENETUNREACH; EROFS.
LAST_LINES = {
    "memory": r"MemoryError",
    "disk": r"OSError: \[Errno (27|28|122)\]",
    "processes": r"BlockingIOError: \[Errno 11\]|RuntimeError: can't start new thread",
    "network": r"OSError: \[Errno 101\]",
    "files": r"PermissionError|OSError: \[Errno 30\]",
}
INSIDE = Path(inside.__file__).read_text(encoding="utf-8")  # text of the launcher in the sandbox


class ProgramResult(NamedTuple):
    """The output of a program, and how it ended."""

    output: str  # standard output, shortened
    errors: str  # standard error, shortened
    error: str = ""  # how the program failed, in words; "" if it succeeded
    reason: str = ""  # "time" or one of REASONS; "" if it succeeded


def allow_unconfined(allowed: bool) -> None:
    """Sets whether programs may run without a sandbox, for this process and its children (config.reward.unconfined)."""
    os.environ[UNCONFINED] = "1" if allowed else ""


def is_unconfined() -> bool:
    """Returns whether programs may run without a sandbox."""
    return bool(os.environ.get(UNCONFINED))


def check_sandbox() -> None:
    """Raises: NoSandbox, if this machine cannot confine a process."""
    if sys.platform != "linux":
        raise NoSandbox(f"this system is {sys.platform}")
    try:
        seccomp_filter()
    except KeyError as error:
        machine = error.args[0]
        raise NoSandbox(f"the filter of system calls supports x86_64 and aarch64, not {machine}") from None
    if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
        raise NoSandbox("the kernel does not list the children of a process (CONFIG_PROC_CHILDREN)")
    # Run an empty program, because an administrator's restrictions show only when bwrap runs.
    run_program("", seconds=10.0, memory=512, characters=1000)


@cache
def _sandbox_problem() -> str:
    """Returns why this machine cannot confine a process; "" if it can."""
    try:
        check_sandbox()
    except NoSandbox as problem:
        return str(problem)
    return ""


def require_sandbox() -> None:
    """Raises: MissingHere, if this machine has no sandbox, and the config does not allow unconfined programs."""
    if not is_unconfined() and (problem := _sandbox_problem()):
        raise MissingHere(
            "config.reward.unconfined = False: programs of the policy must run in bubblewrap on Linux, which does "
            f"not work on this machine: {problem}; or set config.reward.unconfined = True (evaluate: --unconfined), "
            "which gives these programs all your permissions"
        )


def run_program(
    code: str, *, seconds: float, memory: int, characters: int, stdin: str = "", deadline: float = math.inf
) -> ProgramResult:
    """Runs untrusted code in a sandbox, in a temporary folder, and returns its output and how it ended.

    seconds: limit of CPU time; the limit of wall-clock time is CLOCK_FACTOR times as long. memory: limit in MiB.
    characters: length to which output and errors are shortened. stdin: text of the standard input. deadline: time of
    time.monotonic() at which the program is killed. Raises: NoSandbox, if this machine has no sandbox.
    """
    with start_program(code, seconds=seconds, memory=memory, stdin=stdin) as program:
        error, reason = program.wait(min(time.monotonic() + CLOCK_FACTOR * seconds, deadline))
        return ProgramResult(
            _read_text(program.stdout, characters), _read_text(program.stderr, characters), error, reason
        )


class SandboxProgram(NamedTuple):
    """A running program in a sandbox."""

    process: subprocess.Popen[bytes]
    stdout: IO[bytes]  # file of the standard output
    stderr: IO[bytes]  # file of the standard error
    seconds: float  # limit of CPU time
    start_time: float  # time.monotonic() at the start

    def wait(self, deadline: float, companion: SandboxProgram | None = None) -> tuple[str, str]:
        """Waits until the program ends, and returns (error, reason), which are "" if it succeeded.

        deadline: time of time.monotonic() at which the program is killed. companion: another program; if either has too
        many files or threads, this program is killed.
        """
        while not self.ends_within(max(min(POLL_SECONDS, deadline - time.monotonic()), 0.001)):
            problem = self.problem() or (companion.problem() if companion else None)
            if problem or time.monotonic() >= deadline:
                self.kill()
                return problem or (f"it took longer than {self.seconds:g} seconds", "time")
        return self.exit_reason()

    def ends_within(self, seconds: float) -> bool:
        """Waits at most `seconds` for the end of the program, and returns whether it has ended."""
        try:
            descriptor = os.pidfd_open(self.process.pid)
        except (AttributeError, OSError):
            # Other systems, and Linux before 5.3, have no pidfd_open.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
            return self.process.returncode is not None
        try:
            # A poll is used, because Popen.wait with a time limit would check again and again.
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(1000 * seconds))
        finally:
            os.close(descriptor)

    def problem(self) -> tuple[str, str] | None:
        """Returns (error, reason) if the program has more files or threads than allowed, else None."""
        with suppress(OSError, ValueError, IndexError):  # The program may end meanwhile.
            pid = self.process.pid
            # The child of bwrap is process 1 of the sandbox, and the child of process 1 is the program.
            levels_above_program = 0 if is_unconfined() else 2
            for _ in range(levels_above_program):
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            if len(os.listdir(f"/proc/{pid}/task")) > MAX_THREADS:
                return "it has too many threads", "processes"
            folder = None if is_unconfined() else os.statvfs(f"/proc/{pid}/root{FOLDER}")
            # Files are counted too, because an empty file needs kernel memory but no bytes of the folder.
            if folder and folder.f_files - folder.f_ffree > MAX_FILES:
                return "it wrote too much", "disk"
        return None

    def exit_reason(self) -> tuple[str, str]:
        """Returns (error, reason) of a program that has ended by itself; both are "" if it succeeded."""
        code = self.process.wait()
        # bubblewrap exits with 128 + the signal that ended the program.
        signal_number = -code if code < 0 else code - 128
        timeout = f"it took longer than {self.seconds:g} seconds", "time"
        if code == 0:
            return "", ""
        if signal_number <= 0:
            return "it failed", reason_of(_read_text(self.stderr, 2000))
        # The time is checked too, because a program may choose its exit code, but not the time that it took.
        limited = (
            signal_number in (signal.SIGXCPU, signal.SIGKILL)
            and time.monotonic() - self.start_time >= 0.9 * self.seconds
        )
        return timeout if limited else (f"it was ended by signal {signal_number}", "error")

    def kill(self) -> None:
        """Kills the program and all its processes, and waits for their end."""
        if is_unconfined():
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        # The end of bubblewrap ends its process 1, and with it all processes of the sandbox.
        self.process.kill()
        self.process.wait()


def reason_of(errors: str) -> str:
    """Returns why a program failed, by the last line of its standard error: one of REASONS."""
    last = errors.rstrip().rpartition("\n")[2]
    return next((reason for reason, text in LAST_LINES.items() if re.match(text, last)), "error")


def _read_text(file: IO[bytes], characters: int) -> str:
    """Returns the text of a file, without its middle if it is too long, because errors are at the end."""
    file.seek(0)
    text, half = file.read(inside.FILE_SIZE).decode("utf-8", "replace"), characters // 2
    return text if len(text) <= characters else f"{text[:half]}\n...\n{text[len(text) - half :]}"


@contextmanager
def start_program(
    code: str, *, seconds: float, memory: int, stdin: str = "", descriptors: Sequence[int] = ()
) -> Iterator[SandboxProgram]:
    """Starts untrusted code in a sandbox, and kills it at the end of the `with` block.

    The arguments are those of `run_program`. descriptors: further file descriptors that the program inherits. Raises:
    NoSandbox, if this machine has no sandbox.
    """
    with ExitStack() as stack:
        texts = [stack.enter_context(tempfile.TemporaryFile()) for _ in (code, stdin)]
        for text, file in zip((code, stdin), texts, strict=True):
            file.write(text.encode("utf-8", "replace"))
            file.seek(0)
        # Output goes to files, because a full pipe would block the program. RLIMIT_FSIZE limits the files.
        stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in "oe")
        (is_ready, ready), (filter_end, to_filter) = (open_pipe(stack) for _ in "rf")
        unconfined = is_unconfined()
        # Seconds are rounded up, because RLIMIT_CPU needs whole seconds.
        arguments = memory, max(math.ceil(seconds), 1), texts[0].fileno(), ready.fileno(), int(unconfined)
        # The options -s, -S and -P leave only the standard library in sys.path.
        program = [python_path(), "-s", "-S", "-P", "-c", INSIDE, *map(str, arguments)]
        folder, environment, inherited = "/", {}, [texts[0].fileno(), ready.fileno(), *descriptors]
        if unconfined:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            # The trainer's environment is not inherited, because it may hold secrets.
            environment = ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
        else:
            # The write does not wait for a reader, because the whole filter fits into a pipe.
            to_filter.write(seccomp_filter())
            # The input file is opened again, because copies of a descriptor share their position in the file.
            stdin_copy = stack.enter_context(open(f"/proc/self/fd/{texts[1].fileno()}", "rb"))
            program = confined_command(filter_end.fileno(), stdin_copy.fileno(), program)
            inherited += [filter_end.fileno(), stdin_copy.fileno()]
        # The pipe must be closed, because bwrap reads the filter to the end of the pipe.
        to_filter.close()
        process = subprocess.Popen(
            program,
            stdin=texts[1],
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=environment,
            pass_fds=inherited,
            start_new_session=True,
        )
        started_program = SandboxProgram(process, stdout, stderr, seconds, time.monotonic())
        try:
            # Close this process's end, because otherwise the read below would not notice that the program has ended.
            ready.close()
            # The byte proves that the limits are set. An exit code would prove nothing, because the program chooses it.
            if not is_ready.read(1):
                process.wait()
                message = _read_text(started_program.stderr, 1000).strip() or f"bwrap ended with {process.returncode}"
                raise NoSandbox(message if unconfined else f"{message}; {remedy(message)}")
            yield started_program
        finally:
            started_program.kill()


def open_pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Returns the ends of a new pipe, for reading and for writing, which `stack` closes."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", buffering=0)), stack.enter_context(open(write, "wb", buffering=0))
