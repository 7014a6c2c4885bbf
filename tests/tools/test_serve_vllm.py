"""What becomes of a vLLM server, told from its process and its door; tests/rollout/test_vllm.py asks real ones."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time

import httpx
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.vllm import address
from jaxrl_llm.rollout.vllm.managed_server import ManagedServer
from jaxrl_llm.tools import serve_vllm


class Process:
    """A process that ends once it has been waited for a number of times."""

    def __init__(self, waits: int):
        self.waits = waits

    def poll(self) -> int | None:
        return None if self.waits > 0 else 1

    def wait(self, seconds: float) -> None:
        self.waits -= 1
        raise subprocess.TimeoutExpired("vllm", seconds)


BUSY = httpx.ConnectError("[Errno 11] Resource temporarily unavailable")  # the queue of a socket is full
GONE = httpx.ConnectError("[Errno 111] Connection refused")


@pytest.mark.parametrize(
    ("answers", "left"),
    [([200, GONE], 8), ([503], 9), ([200, httpx.ReadTimeout(""), BUSY, httpx.ReadError("")] + [200] * 5, 0)],
    ids=["closes its door", "says its engine is dead", "hangs and ends"],
)
def test_a_server_has_ended_with_its_process_its_door_or_its_engine(answers, left):
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/health"
        answered = answers.pop(0)
        if isinstance(answered, Exception):
            raise answered
        return httpx.Response(answered)

    process = Process(9)
    client = httpx.Client(base_url="http://vllm", transport=httpx.MockTransport(answer))
    serve_vllm.wait_for_the_end(process, client)
    assert process.waits == left


def test_a_real_server_whose_door_is_closed_has_ended():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = Process(9)
    serve_vllm.wait_for_the_end(process, address.client(f"http://127.0.0.1:{port}", timeout=5.0))
    assert process.waits == 9


# Stands for vLLM's Python. It prints many lines, answers, and ends after its first answer at its first start.
VLLM = """#!{python} -S
import os, socket, sys, time
if len(sys.argv) == 3: sys.exit(0)  # is there a vLLM in this environment?
assert "--disable-uvicorn-access-log" in sys.argv and ("--port" in sys.argv) != ("--uds" in sys.argv)
starts = sys.argv[0] + ".starts"
open(starts, "a").write("x")
start = os.stat(starts).st_size
if start in {failing}:
    sys.exit("MemoryError: another one is still there")
for i in range(3000):
    print(f"request {{i:06}}", flush=i % 1000 == 999)
while "request 002999" not in open(os.path.dirname(sys.argv[0]) + "/log").read(): time.sleep(0.02)
if "--uds" in sys.argv:
    door = socket.socket(socket.AF_UNIX)
    door.bind(sys.argv[sys.argv.index("--uds") + 1])
    door.listen()
else:
    door = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
while True:
    with door.accept()[0] as asked:
        asked.recv(4096)
        asked.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    if start == 1 and {failing}: sys.exit(0)
"""


def keep(folder, *door: str, failing=(), out=subprocess.PIPE) -> subprocess.Popen[str]:
    """Starts serve_vllm with short pauses and a small log over a stand-in for vLLM whose starts `failing` fail."""
    python = folder / "python"
    python.write_text(VLLM.format(python=sys.executable, failing=failing))
    python.chmod(0o755)
    code = "import sys; from jaxrl_llm.tools import serve_vllm as s; s.LOG, s.WAITS = 10000, (0.1, 60.0); "
    command = [sys.executable, "-c", code + "sys.argv[0] = 'x'; s.run_main(s.main)", "--model", "m"]
    command += ["--python", str(python), "--log", str(folder / "log"), *door]
    return subprocess.Popen(command, stdout=out, text=True, umask=0)  # which its modes do not depend on


def test_a_server_that_answered_once_is_started_until_it_answers_again(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keeper = keep(tmp_path, "--port", str(port), failing=(2, 3))
    lines = []
    for line in keeper.stdout:
        lines.append(line)
        if "answers" in line and len(lines) > 1:
            keeper.terminate()
    assert keeper.wait(timeout=60) == 0
    events = ["answers", "exit code 0", "MemoryError.* 0.1 s", "MemoryError.* 0.2 s", "answers"]
    assert len(lines) == len(events)
    for event, line in zip(events, lines, strict=True):
        assert all(words in line for words in event.split(".*"))
    with socket.socket() as door:
        assert door.connect_ex(("127.0.0.1", port)), "its server lives on"


def test_a_server_that_never_answered_is_not_started_again_and_leaves_no_socket(tmp_path):
    keeper = keep(tmp_path, "--uds", str(tmp_path / "door" / "vllm"), failing=(1,))
    assert keeper.communicate(timeout=60)[0] == "" and keeper.returncode == 2
    assert not (tmp_path / "door").exists()


def test_a_server_at_a_socket_is_private_logs_little_and_ends_with_its_keeper(tmp_path):
    folder, log = tmp_path / "door", tmp_path / "log"
    with log.open("ab") as out:  # as the trainer's managed server does
        keeper = keep(tmp_path, "--uds", str(folder / "vllm"), out=out)
    deadline = time.monotonic() + 60
    both = lambda: "".join(file.read_text() for file in (log.with_name("log.1"), log) if file.exists())  # noqa: E731
    while not all(words in both() for words in ("vLLM answers at unix:", "request 002999")):
        assert time.monotonic() < deadline and keeper.poll() is None, both()
        time.sleep(0.02)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(both()) < 25_000 and "request 000000" not in both()
    keeper.kill()
    keeper.wait(timeout=60)
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


PYDANTIC = """Traceback (most recent call last):
(APIServer pid=7) ValidationError: 1 validation error for VllmConfig
(APIServer pid=7)   Value error, torch.float32 is not supported for quantization method fp8. [type=value_error]
(APIServer pid=7)     For further information visit ...
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "  [--level {debug,error}]\nentry.py: error: unrecognized arguments: --foo\n",
            "unrecognized arguments: --foo",
        ),
        (PYDANTIC, "is not supported for quantization method fp8"),
        ("ValueError: of an import\nRuntimeError: no memory\nbye\n", "RuntimeError: no memory"),
        ("", ""),
    ],
)
def test_the_error_of_a_server_that_did_not_start_is_found_in_its_log(log, cause):
    found = serve_vllm.last_error(log)
    assert cause in found and "\n" not in found and "of an import" not in found


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is found in /proc")
def test_a_semaphore_of_a_server_that_is_killed_is_removed():
    code = "import time; from multiprocessing import get_context; lock = get_context('spawn').Lock()\n"
    code += "print(lock._semlock.name, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        semaphore = serve_vllm.SHM / f"sem.{process.stdout.readline().decode().strip()[1:]}"
        found = serve_vllm.shared_memory(process.pid)
        assert semaphore.exists()
        os.killpg(process.pid, signal.SIGKILL)  # also Python's own tracker of semaphores
        serve_vllm.end(process.pid, process.poll, found)
    assert not semaphore.exists()


def test_the_error_of_a_managed_server_is_said_once(tmp_path):
    """That of serve_vllm, which names the cause and the log."""
    (tmp_path / "vllm.log").write_text("INFO\nerror: vLLM did not start (no memory): see vllm.log\n")
    server = ManagedServer.__new__(ManagedServer)
    server._process, server.log = subprocess.Popen(["false"]), tmp_path / "vllm.log"
    server._process.wait()
    with pytest.raises(UserError, match="no memory") as error:
        server.check()
    assert str(error.value).count("did not start") == 1


def test_a_socket_in_a_folder_of_others_is_refused(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(serve_vllm, "check_python", lambda *_: None)
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setattr(sys, "argv", ["serve_vllm", "--model", "m", "--uds", str(tmp_path / "open" / "vllm")])
    with refused("--uds"):
        serve_vllm.main()
