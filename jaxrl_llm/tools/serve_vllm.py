"""A vLLM server for rollouts: `jaxrl serve-vllm --model DIR [--python PYTHON] [-- vLLM's own arguments]`.

Starts vLLM in a separate process group, restarts it when its engine dies, and leaves no process behind.
Imports no JAX: runs in vLLM's environment, or takes the Python of that environment. The trainer needs neither vLLM
nor torch.
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

ARGUMENTS = ("--host", "--port", "--uds", "--model", "--dtype")  # of this command, not of vLLM
# A server samples as a request says, and not as generation_config.json; and its log-probabilities are those of the
# distribution that was sampled, after temperature and top-p.
FIXED = (
    "--served-model-name",
    "policy",
    "--generation-config",
    "vllm",
    "--logprobs-mode",
    "processed_logprobs",
    "--disable-uvicorn-access-log",  # a line for each request: gigabytes a day
    "--enable-scale-out",  # token ids in, token ids and their weight versions out
    "--worker-extension-cls",
    "jaxrl_llm.rollout.vllm.receive.Extension",
    "--weight-transfer-config",
    '{"backend": "pull"}',
)
ENVIRONMENT = dict(
    VLLM_SERVER_DEV_MODE="1",  # without it there is no route for weight pushes
    VLLM_NO_USAGE_STATS="1",
)
CPU_ENVIRONMENT = dict(
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB; the default is a share of all memory
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # a trainer may use the same cores
    # Saves 15 s of compiling at each start.
    TORCHINDUCTOR_CACHE_DIR=str(Path.home() / ".cache" / "jaxrl_llm" / "inductor"),
)
# Names of vLLM's files in shared memory. The trainer's weight file, which may be there too, has another name.
SHM, SHARED = Path("/dev/shm"), re.compile(r"psm_|sem\.|vllm_|__KMP_")
TERMINATE, KILLED = 10.0, 5.0  # seconds to wait after SIGTERM and after SIGKILL
WAITS = (1.0, 60.0)  # seconds: the first and the longest pause after a failed start; each failure doubles it
STOPS = (signal.SIGTERM, signal.SIGINT)
HEALTH_SECONDS = 5.0  # between two health checks, and the timeout of one
LOG = 2**26  # bytes of the log; older lines are in FILE.1, and after that dropped


def check_port(host: str, port: int) -> None:
    """Raises: UserError, if a server cannot listen at the port."""
    try:
        # Now: vLLM loads a model for minutes before it finds that a port is taken.
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port} of --host {host}: {error}: give another") from None


@contextmanager
def socket_folder(uds: Path) -> Iterator[None]:
    """Makes the folder of a socket, open to this user alone, and removes it. Raises: UserError, if others may enter."""
    try:
        uds.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--uds {uds}: {error.strerror}: give a path in another folder") from None
    if not is_private(uds.parent):
        raise UserError(
            f"--uds {uds}: other users may enter {uds.parent}, and could replace the weights: give a path in a folder "
            "of yours with mode 700, or in one that is not there yet"
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
    writes: threading.Thread  # its output into the log
    shared_files: set[Path]  # in /dev/shm, to remove at the end


def start(args: argparse.Namespace, extra: list[str], temporary: str) -> subprocess.Popen[bytes]:
    """Starts vLLM in a separate process group."""
    address = ["--uds", str(args.uds)] if args.uds else ["--host", args.host, "--port", str(args.port)]
    if args.uds:
        # A killed server leaves its socket, and a bind to it fails.
        args.uds.unlink(missing_ok=True)
    command = [
        args.python,
        "-m",
        "vllm.entrypoints.launchers.api_server.entry",
        "--model",
        args.model,
        *address,
        "--dtype",
        args.dtype,
        *FIXED,
        *(("--max-model-len", str(args.max_model_len)) if args.max_model_len else ()),
        *extra,
    ]
    # The user's variables win over the first, which are a choice, and not over the last, which pushes need.
    environment = CPU_ENVIRONMENT | os.environ | ENVIRONMENT | {"PYTHONPATH": python_path(), "TMPDIR": temporary}
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A group of its own, which `end` ends as a whole; and Ctrl-C reaches this program alone.
        start_new_session=True,
    )


def write_log(process: subprocess.Popen[bytes], log: Path) -> threading.Thread:
    """Starts to write the output of a process into a log of bounded size."""
    assert process.stdout
    output = io.TextIOWrapper(process.stdout, encoding="utf-8", errors="replace")
    # A full disk loses lines of the log. Without this the thread would die, the pipe fill up, and vLLM block.
    logging.raiseExceptions = False
    handler = RotatingFileHandler(log, maxBytes=LOG, backupCount=1, encoding="utf-8")
    # Copied and cut, not renamed: this program's own output may be appended to the same file.
    handler.rotator = _cut

    def write() -> None:
        with output:
            for line in output:
                handler.emit(logging.makeLogRecord({"msg": line.rstrip("\n")}))
        handler.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def _cut(log: str, older: str) -> None:
    shutil.copyfile(log, older)
    os.truncate(log, 0)


def guard(process: subprocess.Popen[bytes], uds: Path | None) -> subprocess.Popen[bytes]:
    """Starts a guard that ends vLLM when its standard input closes: when this process is gone, even by kill -9."""
    code = "import sys; from jaxrl_llm.tools import serve_vllm as s; sys.stdin.read(); s.end(int(sys.argv[1])); "
    code += "[s.remove_socket(s.Path(uds)) for uds in sys.argv[2:]]"
    command = [sys.executable, "-c", code, str(process.pid), *([str(uds)] if uds else [])]
    environment = os.environ | {"PYTHONPATH": python_path()}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)


@contextmanager
def running(args: argparse.Namespace, extra: list[str], temporary: str) -> Iterator[VllmProcess]:
    """Runs vLLM and its guard, and ends both."""
    process, watchdog, shared_files = None, None, set()
    try:
        # A signal between the two starts would leave a vLLM that no guard ends.
        with undisturbed():
            process = start(args, extra, temporary)
            watchdog = guard(process, args.uds)
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
    """Returns a PYTHONPATH with this package: it may not be installed."""
    return os.pathsep.join(x for x in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")) if x)


def wait(server: VllmProcess, http: httpx.Client, log: Path) -> None:
    """Returns when the server answers. Raises: UserError, if it ends before that."""
    while True:
        with suppress(httpx.TransportError):
            if http.get("/health").is_success:
                return
        if server.process.poll() is not None:
            # The last lines of its log say why; they may still be on their way.
            server.writes.join(KILLED)
            raise UserError(f"vLLM did not start ({last_error(log.read_text(errors='replace'))}): see {log}")
        time.sleep(0.25)


def last_error(log: str) -> str:
    """Returns the last error in a log, also that of vLLM's command line; "": it has none."""
    lines = log.splitlines()
    numbers = [i for i, line in enumerate(lines) if "Error" in line or ": error: " in line][-1:]
    # pydantic says in the next line what is wrong.
    return " ".join(part.strip() for i in numbers for part in lines[i : i + 1 + ("validation error" in lines[i])])[:300]


def wait_for_the_end(process: subprocess.Popen[bytes], http: httpx.Client) -> None:
    """Returns when vLLM has ended, reports a dead engine, or refuses connections: a broken server may never exit."""
    while process.poll() is None:
        try:
            if http.get("/health").is_error:
                return
        except httpx.ConnectError as error:
            # EAGAIN is of a socket whose queue is full: the server is busy, not gone.
            if f"[Errno {errno.EAGAIN}]" not in str(error):
                return
        except httpx.TransportError:
            # The server is busy or hangs, and may recover.
            pass
        with suppress(subprocess.TimeoutExpired):
            process.wait(HEALTH_SECONDS)


def end(group: int, reap: Callable[[], object] = lambda: None, files: Iterable[Path] = ()) -> None:
    """Ends a whole process group with SIGTERM, then SIGKILL, and removes its files in shared memory.

    reap: waits for a child that is in the group; files: others to remove, of processes that may have ended before.
    """
    # The group, because vLLM's workers survive when only the server is killed.
    shared_files = {*files, *shared_memory(group)}
    with suppress(ProcessLookupError):  # the group is empty
        for number, seconds in ((signal.SIGTERM, TERMINATE), (signal.SIGKILL, KILLED)):
            os.killpg(group, number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                # A zombie would keep its group in existence, so `killpg` would never say that the group is empty.
                reap()
                # Each round looks again, because workers map files until they end, and /proc does not list them
                # afterwards.
                shared_files |= shared_memory(group)
                os.killpg(group, 0)
                time.sleep(0.1)
    for file in shared_files:
        file.unlink(missing_ok=True)


def shared_memory(group: int) -> set[Path]:
    """Finds shared-memory files that Python, vLLM and OpenMP made for a process group. Finds none outside Linux."""
    # Files are compared by inode: the C library makes a semaphore under a temporary name, which /proc lists for its
    # maker.
    inodes: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end, or belong to another user, while /proc is read.
        with suppress(OSError, IndexError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                lines = map(str.split, (process / "maps").read_text().splitlines())
                inodes |= {int(line[4]) for line in lines if line[5:] and line[5].startswith(f"{SHM}/")}
    files = set()
    for file in SHM.glob("*"):
        with suppress(OSError):
            if SHARED.match(file.name) and file.stat().st_ino in inodes:
                files.add(file)
    return files


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delays stop signals until the end of the block."""
    signals: list[object] = []
    for number in STOPS:
        signal.signal(number, lambda *arguments: signals.append(arguments))
    try:
        yield
    finally:
        for number in STOPS:
            signal.signal(number, _end)
        if signals:
            _end()


def _end(*_: object) -> None:
    # A second signal must not interrupt the cleanup, which SystemExit runs on its way through the `finally` blocks.
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def _end_at_eof() -> None:
    while os.read(0, 1):
        pass
    # A signal reaches the main thread, which alone can leave through the `finally` blocks that end vLLM.
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser("jaxrl_llm.tools.serve_vllm", description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder or hub id")
    parser.add_argument("--python", default=sys.executable, help="of the environment vLLM is in (default: this one)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    parser.add_argument(
        "--uds",
        type=Path,
        metavar="PATH",
        help="listen at a Unix socket instead, in a folder that only you may enter; engine.servers takes unix:PATH",
    )
    parser.add_argument("--dtype", default="auto", help="float32 | bfloat16 | auto, the model's own (default)")
    parser.add_argument("--max-model-len", type=int, default=0, help="prompt and completion (default: the model's)")
    parser.add_argument("--log", type=Path, default=Path("vllm.log"), help="(default: %(default)s)")
    parser.add_argument("--public", action="store_true", help="allow an address that others can reach")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input closes")
    args = parser.parse_args(argv[:cut])
    extra = argv[cut + 1 :]
    if misplaced := [word for word in extra if word.split("=")[0] in ARGUMENTS]:
        raise UserError(f"{misplaced[0]} belongs before the --: it is an argument of this command")
    if args.host not in LOOPBACK and not args.public:
        raise UserError(
            f"--host {args.host}: whoever reaches the server can replace its weights, and --api-key does not guard "
            "those routes; keep 127.0.0.1, or say --public on a network that is yours alone"
        )
    check_python(args.python, "--python")
    if not args.uds:
        check_port(args.host, args.port)
    for number in STOPS:
        signal.signal(number, _end)
    if args.with_parent:
        threading.Thread(target=_end_at_eof, daemon=True).start()
    with ExitStack() as resources:
        if args.uds:
            resources.enter_context(socket_folder(args.uds))
        temporary = tempfile.TemporaryDirectory(prefix="jaxrl_llm-vllm-", ignore_cleanup_errors=True)
        serve(args, extra, resources.enter_context(temporary))


def serve(args: argparse.Namespace, extra: list[str], temporary: str) -> None:
    """Runs vLLM, and starts it again when it ends. Raises: UserError, if it ends before its first answer."""
    # vLLM that ends before its first answer has a wrong argument or lacks a file, so a restart would not help.
    url = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    address = f"{UNIX}{args.uds}" if args.uds else url
    guarded = "" if args.uds else "; each user of this machine may replace its weights: --uds PATH is for you alone"
    answered, pause = False, WAITS[0]
    while True:
        try:
            with running(args, extra, temporary) as server, client(address, timeout=HEALTH_SECONDS) as http:
                wait(server, http, args.log)
                answered, pause = True, WAITS[0]
                # Now, while the engine lives: after a crash /proc no longer says which files were its own.
                server.shared_files.update(shared_memory(server.process.pid))
                print(f"vLLM answers at {address}; its log is {args.log}{guarded}", flush=True)
                wait_for_the_end(server.process, http)
            print(f"vLLM ended with exit code {server.process.returncode}: it is started again", flush=True)
        except UserError as error:
            if not answered:
                raise
            print(f"{error}: it is started again in {pause:g} s", flush=True)
            time.sleep(pause)
            pause = min(2 * pause, WAITS[1])


if __name__ == "__main__":
    run_main(main)
