"""Runs Python code that nobody has read, in a process without network, without children and with one folder.

The kernel confines the process, not Python: limits of memory, CPU time and file size (setrlimit), a filter of system
calls (seccomp), and rules about files (Landlock). None of them needs a right or a namespace of its own. This file is
also the program that runs inside: it confines itself, and then runs the code of its standard input.
"""

import ctypes
import ctypes.util
import os
import platform
import resource
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

# Numbers of system calls (x86_64, aarch64); None: the machine has no such call.
FORBIDDEN = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "io_uring_setup": (425, 425),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "setrlimit": (160, 164), "prlimit64": (302, 261),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "chroot": (161, 51), "bpf": (321, 280),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "perf_event_open": (298, 241),
    "setpriority": (141, 140), "memfd_create": (319, 279),
}  # fmt: skip
CAPSET = (126, 91)
CLONE, CLONE3 = (56, 220), (435, 435)
THREAD = 0x10000  # the flag of a clone that is a thread
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the numbers above, and its name
X32 = 0x40000000  # bit of the numbers of a second x86 interface
LANDLOCK = dict(create=444, add=445, restrict=446)  # the same on all machines
EXECUTE, READ_FILE, READ_DIR = 1, 4, 8
EVERY_RIGHT = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}  # by version of Landlock; later ones: 0xFFFF
EPERM, ENOSYS = 1, 38
FILE_SIZE = 16 * 2**20  # bytes of a file
FOLDER_SIZE = 64 * 2**20  # bytes of all files
OPEN_FILES = 64
LOOK = 0.2  # seconds between two looks at a program
UNCONFINED = 97  # exit code: the process could not confine itself


class Result(NamedTuple):
    """How a program ended."""

    output: str  # of standard output and standard error, cut off
    error: str  # "", or what ended it


class NoSandbox(Exception):
    """This machine cannot confine a process."""


def check() -> None:
    """Raises: NoSandbox, if this machine cannot confine a process."""
    if sys.platform != "linux":
        raise NoSandbox(f"this is {sys.platform}")
    run("", seconds=60.0, memory=512, characters=1000)


def run(code: str, *, seconds: float, memory: int, characters: int) -> Result:
    """Runs code in a folder of its own, which is removed after it.

    seconds: of the clock and of the CPU; memory: MiB; characters: of the output.
    Raises: NoSandbox.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        command = [sys.executable, "-I", "-S", __file__, folder, str(memory), str(max(round(seconds), 1))]
        environment = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}  # not the trainer's: it may hold secrets
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        error = _watched(process, code, folder, seconds)
        if process.returncode == UNCONFINED:
            raise NoSandbox(_text(output, 1000))
        if not error and process.returncode:
            error = f"it was ended by signal {-process.returncode}" if process.returncode < 0 else "it failed"
        return Result(_text(output, characters), error)


def _watched(process, code: str, folder: str, seconds: float) -> str:
    """Waits until a process ends. Ends it, and returns why, if it takes too long or writes too much."""
    end = time.monotonic() + seconds
    given: bytes | None = code.encode("utf-8", "replace")
    while True:
        try:
            process.communicate(given, timeout=max(min(LOOK, end - time.monotonic()), 0.001))
            return ""
        except subprocess.TimeoutExpired:
            given = None  # a second call must not give it again
            late, size = time.monotonic() >= end, sum(file.lstat().st_size for file in _files(folder))
        if late or size > FOLDER_SIZE:
            process.kill()  # it has no children
            process.wait()
            return f"it took longer than {seconds:g} seconds" if late else "it wrote too much"


def _files(folder: str):
    return (Path(place, name) for place, _, names in os.walk(folder) for name in names)


def _text(output, characters: int) -> str:
    """Returns the output, without its middle if it is too long: an error is at its end."""
    output.seek(0)
    text, half = output.read().decode("utf-8", "replace"), characters // 2
    return text if len(text) <= characters else f"{text[:half]}\n...\n{text[len(text) - half :]}"


def confine(folder: str, memory: int, seconds: int) -> None:
    """Confines this process for ever. Raises: OSError, KeyError, if the kernel or the machine does not know how."""
    column, architecture = ARCHITECTURES[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    limits = {
        resource.RLIMIT_AS: memory * 2**20,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: FILE_SIZE,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    # No rights of the superuser, if the trainer has them.
    _call(libc.syscall, CAPSET[column], struct.pack("=Ii", 0x20080522, 0), bytes(24))
    _call(libc.prctl, 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which the two others need
    _confine_files(libc, folder)
    _filter_calls(libc, column, architecture)


def _call(function, *arguments) -> int:
    result = function(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _confine_files(libc, folder: str) -> None:
    """Allows all in the folder, and reading in Python's own folders; no other file."""
    version = _call(libc.syscall, LANDLOCK["create"], None, 0, 1)
    every = EVERY_RIGHT.get(version, 0xFFFF)
    # Rights about files, about the network (version 4: TCP) and, from version 6, no signals to other processes.
    attributes = struct.pack("=QQQ", every, 3 if version >= 4 else 0, 2 if version >= 6 else 0)
    rules = _call(libc.syscall, LANDLOCK["create"], attributes, 8 if version < 4 else 16 if version < 6 else 24, 0)
    read = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")} | {"/usr/lib", "/lib", "/lib64"}
    allowed = {folder: every} | {path: READ_FILE | READ_DIR | EXECUTE for path in read if os.path.isdir(path)}
    for path, rights in allowed.items():
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call(libc.syscall, LANDLOCK["add"], rules, 1, struct.pack("=Qi", rights & every, place), 0)
        os.close(place)
    _call(libc.syscall, LANDLOCK["restrict"], rules, 0)
    os.close(rules)


def _filter_calls(libc, column: int, architecture: int) -> None:
    """Refuses the forbidden system calls with an error, and a clone that is no thread."""
    load, equal, at_least, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of the kernel's filter language
    allow, refuse = 0x7FFF0000, 0x00050000
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, architecture),
        (give, 0, 0, refuse | EPERM),
        (load, 0, 0, 0),  # the number of the call
        (at_least, 0, 1, X32),
        (give, 0, 0, refuse | EPERM),
    ]
    for number in (numbers[column] for numbers in FORBIDDEN.values()):
        if number is not None:
            program += [(equal, 0, 1, number), (give, 0, 0, refuse | EPERM)]
    # The flags of clone3 are in memory, where a filter cannot look. Without it, the C library uses clone.
    program += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, refuse | ENOSYS)]
    program += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (bits, 1, 0, THREAD), (give, 0, 0, refuse | EPERM)]
    program += [(give, 0, 0, allow)]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    whole = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _call(libc.prctl, 22, 2, whole, 0, 0)  # PR_SET_SECCOMP, a filter


def main() -> None:
    code = sys.stdin.read()
    folder, memory, seconds = sys.argv[1:]
    try:
        confine(folder, int(memory), int(seconds))
    except (OSError, KeyError, AttributeError) as error:
        print(f"{type(error).__name__} {error}")
        sys.stdout.flush()
        os._exit(UNCONFINED)
    sys.argv = [""]
    try:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})
    except Exception as error:
        # Without this file's own line.
        shown = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        print("".join(shown), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
