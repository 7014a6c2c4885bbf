"""A vLLM server for rollouts: `jaxrl serve-vllm --model DIR [--python PYTHON] [-- vLLM's own arguments]`.

Starts vLLM in a separate process group, restarts it when its engine dies, and leaves no process behind.
This module imports no JAX, because it runs in vLLM's environment, or with the Python of that environment. The trainer
needs neither vLLM nor torch.
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import NamedTuple

import httpx

from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.rollout.vllm.address import LOOPBACK, UNIX, check_python, client, is_private

OWN_ARGUMENTS = ("--host", "--port", "--uds", "--model", "--dtype")  # arguments of this command that vLLM must not get
# Arguments that vLLM always gets. With them, a server ignores generation_config.json and samples with the settings of
# each request. The log-probabilities are those of the sampled distribution, after temperature and top-p.
VLLM_ARGUMENTS = (
    "--served-model-name",
    "policy",
    "--generation-config",
    "vllm",
    "--logprobs-mode",
    "processed_logprobs",
    "--disable-uvicorn-access-log",  # the access log would grow by gigabytes a day
    "--enable-scale-out",  # token ids in, token ids and their weight versions out
    "--worker-extension-cls",
    "jaxrl_llm.rollout.vllm.receive.Extension",
    "--weight-transfer-config",
    '{"backend": "pull"}',
)
# `python -m MODULE` would import the API server in each process that vLLM starts.
LAUNCHER = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
# Environment variables of vLLM that weight pushes need, so that the user cannot override them.
ENVIRONMENT = dict(
    VLLM_SERVER_DEV_MODE="1",  # adds the route for weight pushes
    VLLM_NO_USAGE_STATS="1",
)
# Environment variables of vLLM that make it usable on a CPU beside a trainer. The user can override them.
CPU_ENVIRONMENT = dict(
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB; the default is a share of all memory
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # a trainer may use the same cores
    # Without a folder that stays, vLLM would compile for 15 s at each start.
    TORCHINDUCTOR_CACHE_DIR=str(Path.home() / ".cache" / "jaxrl_llm" / "inductor"),
)
# Folder of the shared memory, and beginnings of the names of vLLM's files in it. The weight file of the trainer, which
# may be in the folder too, has another name.
SHM, SHARED_NAMES = Path("/dev/shm"), re.compile(r"psm_|sem\.|vllm_|__KMP_")
TERMINATE_SECONDS, KILL_SECONDS = 10.0, 5.0  # seconds to wait after SIGTERM and after SIGKILL
WAITS = (1.0, 60.0)  # first and longest wait after a failed start in seconds; each failure doubles the wait
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # signals that stop this command
HEALTH_SECONDS = 5.0  # seconds between two health checks, and timeout of a check
LOG = 2**26  # largest size of the log in bytes; older lines go to FILE.1, and then are dropped


def check_port(host: str, port: int) -> None:
    """Raises: UserError, if a server cannot listen at the port."""
    try:
        # The port is tried here, because vLLM loads a model for minutes before it opens the port.
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port} of --host {host} cannot be used ({error}): choose another port") from None


@contextmanager
def socket_folder(uds: Path) -> Iterator[None]:
    """Makes the folder of a socket for this user alone, and removes it at the end.

    Raises: UserError, if the folder cannot be made, or if other users may enter it.
    """
    try:
        uds.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--uds {uds}: the folder cannot be made ({error.strerror}): choose another folder") from None
    if not is_private(uds.parent):
        raise UserError(
            f"--uds {uds}: other users may enter {uds.parent} and could replace the weights: choose a new folder, or a "
            "folder of yours with mode 700"
        )
    try:
        yield
    finally:
        remove_socket(uds)


def remove_socket(uds: Path) -> None:
    """Removes a server's socket, and its folder if it is empty."""
    uds.unlink(missing_ok=True)
    with suppress(OSError):
        uds.parent.rmdir()


class VllmProcess(NamedTuple):
    """A running vLLM: its process, the thread that writes its log, and its shared memory."""

    process: subprocess.Popen[bytes]
    writes: threading.Thread  # thread that writes the output of vLLM into the log
    shared_files: set[Path]  # files in /dev/shm that are removed at the end


def start(args: argparse.Namespace, extra: list[str], temporary: str) -> subprocess.Popen[bytes]:
    """Starts vLLM in a separate process group. extra: further arguments of vLLM; temporary: folder of its files."""
    address = ["--uds", str(args.uds)] if args.uds else ["--host", args.host, "--port", str(args.port)]
    if args.uds:
        # The socket of a killed server is removed, because vLLM could not bind to it.
        args.uds.unlink(missing_ok=True)
    command = [
        args.python,
        "-c",
        LAUNCHER,
        "--model",
        args.model,
        *address,
        "--dtype",
        args.dtype,
        *VLLM_ARGUMENTS,
        *(("--max-model-len", str(args.max_model_len)) if args.max_model_len else ()),
        *extra,
    ]
    # The user's variables override CPU_ENVIRONMENT, but not ENVIRONMENT, which weight pushes need.
    environment = CPU_ENVIRONMENT | os.environ | ENVIRONMENT | {"PYTHONPATH": python_path(), "TMPDIR": temporary}
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # In a new session, vLLM is a process group that `end` can end, and Ctrl-C reaches only this program.
        start_new_session=True,
    )


def write_log(process: subprocess.Popen[bytes], log: Path) -> threading.Thread:
    """Starts to write the output of a process into a log of bounded size."""
    assert process.stdout
    output = io.TextIOWrapper(process.stdout, encoding="utf-8", errors="replace")
    # Errors of a full disk are ignored, because the thread would end, the pipe would fill up, and vLLM would block.
    logging.raiseExceptions = False
    handler = RotatingFileHandler(log, maxBytes=LOG, backupCount=1, encoding="utf-8")
    # The log is copied and truncated, not renamed, because this program's output may be appended to the same file.
    handler.rotator = _rotate_log

    def write() -> None:
        with output:
            for line in output:
                handler.emit(logging.makeLogRecord({"msg": line.rstrip("\n")}))
        handler.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def _rotate_log(log: str, older: str) -> None:
    """Moves the content of a log to the file `older`."""
    shutil.copyfile(log, older)
    os.truncate(log, 0)


def start_guard(process: subprocess.Popen[bytes], uds: Path | None) -> subprocess.Popen[bytes]:
    """Starts a guard process that ends vLLM when this process has ended, even by kill -9.

    The guard's standard input closes at this process's end. uds: socket that the guard removes, None for a port.
    """
    # The guard reads until its standard input closes. Then it ends vLLM's process group and removes the socket.
    code = "import sys; from jaxrl_llm.tools import serve_vllm as s; sys.stdin.read(); s.end(int(sys.argv[1])); "
    code += "[s.remove_socket(s.Path(uds)) for uds in sys.argv[2:]]"
    command = [sys.executable, "-c", code, str(process.pid), *([str(uds)] if uds else [])]
    environment = os.environ | {"PYTHONPATH": python_path()}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)


@contextmanager
def running(args: argparse.Namespace, extra: list[str], temporary: str) -> Iterator[VllmProcess]:
    """Runs vLLM and its guard inside the context, and ends both."""
    process, watchdog, shared_files = None, None, set()
    try:
        # Signals are delayed, because a signal between the two starts would leave vLLM without a guard.
        with undisturbed():
            process = start(args, extra, temporary)
            watchdog = start_guard(process, args.uds)
        yield VllmProcess(process, write_log(process, args.log), shared_files)
    finally:
        if process:
            # vLLM ends before its guard, so that the guard still ends the group after a kill -9 in between.
            end(process.pid, process.poll, shared_files)
            process.wait()
        if watchdog:
            watchdog.kill()
            watchdog.wait()


def python_path() -> str:
    """Returns a PYTHONPATH with this package, because vLLM's environment may not have it installed."""
    return os.pathsep.join(x for x in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")) if x)


def wait(server: VllmProcess, http: httpx.Client, log: Path) -> None:
    """Waits until the server answers. Raises: UserError, if the server ends before."""
    while True:
        with suppress(httpx.TransportError):
            if http.get("/health").is_success:
                return
        if server.process.poll() is not None:
            # The thread is joined, because the last lines of the log, which have the reason, may not be written yet.
            server.writes.join(KILL_SECONDS)
            reason = last_error(log.read_text(errors="replace"))
            raise UserError(f"vLLM did not start ({reason}): read {log}, and correct the arguments")
        time.sleep(0.25)


def last_error(log: str) -> str:
    """Returns the last error in a log, which may be one of vLLM's command line; "" if the log has none."""
    lines = log.splitlines()
    error_indices = [i for i, line in enumerate(lines) if "Error" in line or ": error: " in line]
    if not error_indices:
        return ""
    start = error_indices[-1]
    # An error of pydantic, a "validation error", has its reason in the next line, which is added.
    line_count = 2 if "validation error" in lines[start] else 1
    return " ".join(line.strip() for line in lines[start : start + line_count])[:300]


def wait_for_the_end(process: subprocess.Popen[bytes], http: httpx.Client) -> None:
    """Waits until vLLM has ended, reports a dead engine, or refuses connections. A broken server may never exit."""
    while process.poll() is None:
        try:
            if http.get("/health").is_error:
                return
        except httpx.ConnectError as error:
            # EAGAIN means that the queue of the socket is full, so that the server is busy.
            if f"[Errno {errno.EAGAIN}]" not in str(error):
                return
        except httpx.TransportError:  # the server is busy or hangs, and may recover
            pass
        with suppress(subprocess.TimeoutExpired):
            process.wait(HEALTH_SECONDS)


def end(group: int, reap: Callable[[], object] = lambda: None, files: Iterable[Path] = ()) -> None:
    """Ends a whole process group with SIGTERM, then SIGKILL, and removes its files in shared memory.

    group: process id of vLLM, which is also the id of its group; reap: function that waits for a child in the group;
    files: further files to remove, of processes that have ended.
    """
    # The whole group is ended, because vLLM's worker processes survive if only the server is killed.
    shared_files = {*files, *shared_memory(group)}
    with suppress(ProcessLookupError):  # the group is empty
        for number, seconds in ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            os.killpg(group, number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                # Children are reaped, because a zombie keeps its group alive, so that `killpg` would not fail.
                reap()
                # The files are listed repeatedly, because workers map files until they end, and /proc does not list
                # them afterwards.
                shared_files |= shared_memory(group)
                os.killpg(group, 0)  # sends no signal, but raises ProcessLookupError if the group is empty
                time.sleep(0.1)
    for file in shared_files:
        file.unlink(missing_ok=True)


def shared_memory(group: int) -> set[Path]:
    """Returns the shared-memory files that Python, vLLM and OpenMP made for a process group; none outside Linux."""
    # Files are compared by inode, because /proc lists a semaphore under the temporary name that it was made with.
    inodes: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end, or belong to another user, while /proc is read.
        with suppress(OSError, IndexError):
            fields_after_name = (process / "stat").read_text().rpartition(")")[2].split()
            process_group = int(fields_after_name[2])
            if process_group == group:
                # A line of `maps` describes mapped memory. Its fields 4 and 5 are the inode and the path of the file.
                mappings = map(str.split, (process / "maps").read_text().splitlines())
                inodes |= {int(line[4]) for line in mappings if line[5:] and line[5].startswith(f"{SHM}/")}
    files = set()
    for file in SHM.glob("*"):
        with suppress(OSError):
            if SHARED_NAMES.match(file.name) and file.stat().st_ino in inodes:
                files.add(file)
    return files


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delays the signals that stop this command until the end of the block."""
    signals: list[object] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *arguments: signals.append(arguments))
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, _end)
        if signals:
            _end()


def _end(*_: object) -> None:
    """Ends this program by SystemExit, whose `finally` blocks end vLLM."""
    # Further signals are ignored, because they would interrupt these blocks.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def _end_at_eof() -> None:
    """Ends this program when its standard input closes."""
    while os.read(0, 1):
        pass
    # A signal is sent, because only the main thread can run the `finally` blocks that end vLLM.
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Starts vLLM, restarts it when its engine dies, and ends with it."""
    argv = sys.argv[1:]
    # Arguments after the first "--" are vLLM's own.
    own_count = argv.index("--") if "--" in argv else len(argv)
    parser = Parser("jaxrl_llm.tools.serve_vllm", description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder or hub id")
    parser.add_argument("--python", default=sys.executable, help="Python of vLLM's environment (default: this Python)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    parser.add_argument(
        "--uds",
        type=Path,
        metavar="PATH",
        help="listen at a Unix socket in a folder that only you may enter; engine.servers names it as unix:PATH",
    )
    parser.add_argument("--dtype", default="auto", help="float32 | bfloat16 | auto: that of the model (default)")
    parser.add_argument(
        "--max-model-len", type=int, default=0, help="most tokens of prompt and completion (default: the model's limit)"
    )
    parser.add_argument("--log", type=Path, default=Path("vllm.log"), help="file of the log (default: %(default)s)")
    parser.add_argument("--public", action="store_true", help="allow an address that other machines can reach")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input closes")
    args = parser.parse_args(argv[:own_count])
    extra = argv[own_count + 1 :]
    if misplaced := [word for word in extra if word.split("=")[0] in OWN_ARGUMENTS]:
        raise UserError(f"{misplaced[0]} must be before the --, because it is an argument of serve-vllm")
    if args.host not in LOOPBACK and not args.public:
        raise UserError(
            f"--host {args.host} lets every machine that reaches this address replace the weights, even with "
            "--api-key: use 127.0.0.1, or add --public on a private network"
        )
    check_python(args.python, "--python")
    if not args.uds:
        check_port(args.host, args.port)
    for number in STOP_SIGNALS:
        signal.signal(number, _end)
    if args.with_parent:
        threading.Thread(target=_end_at_eof, daemon=True).start()
    with ExitStack() as resources:
        if args.uds:
            resources.enter_context(socket_folder(args.uds))
        temporary = tempfile.TemporaryDirectory(prefix="jaxrl_llm-vllm-", ignore_cleanup_errors=True)
        serve(args, extra, resources.enter_context(temporary))


def serve(args: argparse.Namespace, extra: list[str], temporary: str) -> None:
    """Runs vLLM, and restarts it when it ends. Raises: UserError, if it ends before its first answer."""
    # vLLM is not restarted before its first answer, because it then has a wrong argument or lacks a file.
    url = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    address = f"{UNIX}{args.uds}" if args.uds else url
    access_note = ""
    if not args.uds:
        access_note = "; each user of this machine may replace its weights: --uds PATH is for you alone"
    has_answered, pause = False, WAITS[0]
    while True:
        try:
            with running(args, extra, temporary) as server, client(address, timeout=HEALTH_SECONDS) as http:
                wait(server, http, args.log)
                has_answered, pause = True, WAITS[0]
                # The files are listed while the engine lives, because /proc no longer lists them after a crash.
                server.shared_files.update(shared_memory(server.process.pid))
                print(f"vLLM answers at {address}; its log is {args.log}{access_note}", flush=True)
                wait_for_the_end(server.process, http)
            print(f"vLLM ended with exit code {server.process.returncode}: restarting it", flush=True)
        except UserError as error:
            if not has_answered:
                raise
            print(f"{error}; restarting vLLM in {pause:g} s", flush=True)
            time.sleep(pause)
            pause = min(2 * pause, WAITS[1])


if __name__ == "__main__":
    run_main(main)
