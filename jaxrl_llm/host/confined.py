"""The program inside a sandbox: it confines itself, and then runs the code of a file descriptor.

The kernel confines the process, not Python: limits of memory, CPU time and file size (setrlimit), a filter of system
calls (seccomp), and rules about files (Landlock). None of them needs a right or a namespace of its own.
`host.sandbox` starts it. It imports little, because it starts once for each program.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import traceback

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
OPEN_FILES = 64
UNCONFINED = 97  # exit code: the process could not confine itself
# Why a program failed, and the exit code that says so.
REASONS = {"error": 1, "memory": 101, "disk": 102, "processes": 103, "network": 104, "files": 105}
EVENTS = {"processes": ("os.fork", "os.exec", "os.posix_spawn", "os.system", "subprocess."), "network": ("socket.",)}

last_event = ""  # the last thing that the program tried and may be forbidden


def confine(folder: str, memory: int, seconds: int, read: list[str]) -> None:
    """Confines this process for ever. seconds: of the CPU; read: folders that it may read.

    Raises: OSError, KeyError, if the kernel or the machine does not know how.
    """
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
    _confine_files(libc, folder, read)
    _filter_calls(libc, column, architecture)


def _call(function, *arguments) -> int:
    result = function(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _confine_files(libc, folder: str, read: list[str]) -> None:
    """Allows all in the folder, and reading in some others; no other file."""
    version = _call(libc.syscall, LANDLOCK["create"], None, 0, 1)
    every = EVERY_RIGHT.get(version, 0xFFFF)
    # Rights about files, about the network (version 4: TCP) and, from version 6, no signals to other processes.
    attributes = struct.pack("=QQQ", every, 3 if version >= 4 else 0, 2 if version >= 6 else 0)
    rules = _call(libc.syscall, LANDLOCK["create"], attributes, 8 if version < 4 else 16 if version < 6 else 24, 0)
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


def watch(event: str, _: object) -> None:
    """Remembers what the program tries: an audit hook, which a program cannot take away."""
    global last_event
    for names in EVENTS.values():
        if event.startswith(names):
            last_event = event
            return
    if event == "open" or event.startswith("os."):
        last_event = event


def reason_of(error: BaseException) -> str:
    """Returns why a program failed: one of REASONS."""
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "disk"
    if isinstance(error, PermissionError):
        return next((reason for reason, names in EVENTS.items() if last_event.startswith(names)), "files")
    return "error"


def main() -> None:
    folder, memory, seconds, program, *read = sys.argv[1:]
    with open(int(program), encoding="utf-8") as file:
        code = file.read()
    try:
        confine(folder, int(memory), int(seconds), read)
    except (OSError, KeyError, AttributeError) as error:
        print(f"{type(error).__name__} {error}")
        sys.stdout.flush()
        os._exit(UNCONFINED)
    sys.argv = [""]
    sys.addaudithook(watch)
    try:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})
    except Exception as error:
        reason = reason_of(error)
        # Without this file's own line.
        shown = traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        print("".join(shown), file=sys.stderr)
        sys.exit(REASONS[reason])


if __name__ == "__main__":
    main()
