"""A filter for system calls that bubblewrap allows, but that would break a limit of the sandbox.

Without this filter, a program in bubblewrap could use unlimited memory: SysV segments and files of memfd_create count
for no limit of a process, and a child process has its own limits. Some resources belong to a user and not to a
namespace: keys, inotify, asynchronous I/O. A virtual machine's socket to its host is in no network namespace.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache

# {error number: {system call: (number on x86_64, number on aarch64)}}; None if the machine lacks the call. Each call
# fails with the error of a reached limit or of a missing network, so that a program's error message tells the cause.
REFUSED_CALLS = {
    errno.EAGAIN: {"fork": (57, None), "vfork": (58, None)},
    errno.ENETUNREACH: {"socket": (41, 198)},
    errno.EPERM: {
        "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
        "memfd_create": (319, 279), "memfd_secret": (447, 447), "userfaultfd": (323, 282),
        "io_uring_setup": (425, 425), "io_setup": (206, 0), "inotify_init": (253, None), "inotify_init1": (294, 26),
        "fanotify_init": (300, 262), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "bpf": (321, 280), "perf_event_open": (298, 241), "syslog": (103, 116), "unshare": (272, 97),
        "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
        "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    },
    # clone3 is refused, because its flags are in memory, which a filter cannot read. The C library then uses clone.
    errno.ENOSYS: {"clone3": (435, 435)},
}  # fmt: skip
CLONE = (56, 220)  # numbers of the call that makes a thread or a process, on x86_64 and aarch64
# Flag of a clone call that makes a thread.
THREAD = 0x10000
ARCHITECTURES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}  # {machine: (column of the numbers above, AUDIT_ARCH value)}
# Bit that marks the numbers of x32, a second interface of x86_64.
X32 = 0x40000000
LOAD, EQUAL, AT_LEAST, BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of classic BPF, the filter's language
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # results of the filter; REFUSE is combined with the error number of the call


@cache
def seccomp_filter() -> bytes:
    """Returns the filter for `bwrap --seccomp`. Raises: KeyError, on machines other than x86_64 and aarch64."""
    column, architecture = ARCHITECTURES[platform.machine()]
    # Each line is (operation, lines to skip if it holds, lines to skip if not, constant).
    lines = [
        (LOAD, 0, 0, 4),  # Load the architecture.
        # Another architecture is refused, because an x86_64 process may also use the numbers of 32-bit calls.
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (LOAD, 0, 0, 0),  # Load the number of the call.
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
    ]
    for error, calls in REFUSED_CALLS.items():
        for numbers in calls.values():
            if numbers[column] is not None:
                lines += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE | error)]
    # A new thread is allowed, but not a new process, because each process has its own limits. The flags, the first
    # argument of clone, are at offset 16.
    lines += [(EQUAL, 0, 3, CLONE[column]), (LOAD, 0, 0, 16), (BITS, 1, 0, THREAD)]
    lines += [(RETURN, 0, 0, REFUSE | errno.EAGAIN), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
