"""System calls that bubblewrap's namespaces leave open, and that would break a limit of the sandbox.

Without this filter, a program in bubblewrap takes any amount of memory: SysV segments and files of memfd_create count
for no limit of a process, and a child process has limits of its own. The kernel keeps some things for a user and not
for a namespace: keys, inotify, asynchronous I/O; a virtual machine's socket to its host is in no network namespace.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache

# Numbers on x86_64 and aarch64; None: the machine has no such call.
# Each fails as it would where a limit is reached or no network is there, so a program's message says what it met.
REFUSED = {
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
    # The flags of clone3 are in memory, where a filter cannot look. Without it, the C library uses clone.
    errno.ENOSYS: {"clone3": (435, 435)},
}  # fmt: skip
CLONE = (56, 220)
# The flag of a clone that is a thread.
THREAD = 0x10000
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the numbers above, and its name
# Bit of the numbers of a second x86 interface.
X32 = 0x40000000
LOAD, EQUAL, AT_LEAST, BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of the kernel's filter language
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


@cache
def refusals() -> bytes:
    """Returns the filter for `bwrap --seccomp`. Raises: KeyError, on another machine than x86_64 and aarch64."""
    column, architecture = ARCHITECTURES[platform.machine()]
    # (operation, lines to skip if it holds, lines to skip if not, constant).
    lines = [
        (LOAD, 0, 0, 4),  # the architecture
        # An x86_64 process may also call by the numbers of 32 bits, which mean other calls.
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (LOAD, 0, 0, 0),  # the number of the call
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
    ]
    for error, calls in REFUSED.items():
        for numbers in calls.values():
            if numbers[column] is not None:
                lines += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE | error)]
    # A new thread is allowed, a new process is not: limits count for a process.
    # 16 is where the first argument begins: the flags.
    lines += [(EQUAL, 0, 3, CLONE[column]), (LOAD, 0, 0, 16), (BITS, 1, 0, THREAD)]
    lines += [(RETURN, 0, 0, REFUSE | errno.EAGAIN), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
