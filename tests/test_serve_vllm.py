"""What becomes of a vLLM server, told from its process and its door; tests/test_vllm.py asks real ones."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.vllm import address
from jaxrl_llm.tools import serve_vllm

SERVER = """
import http.server, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int({code})); self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", {port}), Handler)
server.timeout = 60
for _ in range({answers}): server.handle_request()
server.server_close()
time.sleep(60)
"""


@contextmanager
def watched(code: int, answers: int) -> Iterator[tuple[subprocess.Popen[bytes], Future[None]]]:
    """A server that gives some answers, then closes its door and lives on, and what watches it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVER.format(port=port, code=code, answers=answers)]
    process = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as door:
                if door.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
            door = stack.enter_context(address.client(url, timeout=serve_vllm.HEALTH_SECONDS))
            yield process, pool.submit(serve_vllm.wait_for_the_end, process, door)
            process.kill()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("code", "answers"), [(200, 3), (503, 100)])
def test_a_server_that_closes_its_door_or_says_its_engine_is_dead_has_ended_though_its_process_lives(
    code, answers, monkeypatch
):
    monkeypatch.setattr(serve_vllm, "HEALTH_SECONDS", 0.5)
    with watched(code, answers) as (process, watch):
        watch.result(timeout=15)
        assert process.poll() is None


@pytest.mark.slow
def test_a_server_that_hangs_has_not_ended_and_one_whose_process_is_gone_has():
    with watched(200, 100) as (process, watch):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            watch.result(timeout=7)  # longer than a question to it may take
        process.send_signal(signal.SIGCONT)
        process.kill()
        watch.result(timeout=15)


KEPT = """#!{python}
import http.server, pathlib, sys, time
if sys.argv[1] == "-c": sys.exit(0)  # is there a vLLM in this environment?
count = pathlib.Path(sys.argv[0]).with_name("starts")
start = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(start))
if start in {failing}:
    sys.exit("MemoryError: another one is still there")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
end = time.monotonic() + (1 if start == 1 else 60)
server.timeout = 0.1
while time.monotonic() < end: server.handle_request()
"""


@pytest.mark.parametrize(("failing", "code"), [((2, 3), 0), ((1,), 2)])
def test_a_server_that_answered_once_is_started_until_it_answers_again_and_one_that_never_did_is_not(
    tmp_path, failing, code
):
    python = tmp_path / "python"
    python.write_text(KEPT.format(python=sys.executable, failing=failing))
    python.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxrl_llm.tools.serve_vllm", "--model", "m", "--python", str(python)]
    command += ["--port", str(port), "--log", str(tmp_path / "log")]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    told = []
    for line in keeper.stdout:
        told.append(line)
        if "answers" in line and len(told) > 1:
            keeper.terminate()
    assert keeper.wait(timeout=30) == code
    events = ["answers", "exit code 0", "MemoryError", "MemoryError", "answers"] if code == 0 else []
    assert len(told) == len(events)
    assert all(event in line for event, line in zip(events, told, strict=True))
    with socket.socket() as door:
        assert door.connect_ex(("127.0.0.1", port)), "its server lives on"


TALKS = """#!{python}
import pathlib, socket, sys, time
if sys.argv[1] == "-c": sys.exit(0)  # is there a vLLM in this environment?
assert "--disable-uvicorn-access-log" in sys.argv and "--port" not in sys.argv
door = socket.socket(socket.AF_UNIX)
door.bind(sys.argv[sys.argv.index("--uds") + 1])
for i in range(3000):
    print(f"request {{i:06}}", flush=i % 1000 == 999)
time.sleep(0.5)  # its keeper has written most of it by then
door.listen()
for _ in range(2):
    with door.accept()[0] as asked:
        asked.recv(4096)
        asked.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["asked", "killed"])
def test_a_server_at_a_socket_is_open_to_its_user_alone_its_log_is_bounded_and_both_are_cleared_away(tmp_path, how):
    python, log, folder = tmp_path / "python", tmp_path / "log", tmp_path / "door"
    python.write_text(TALKS.format(python=sys.executable))
    python.chmod(0o755)
    code = (
        "import sys; from jaxrl_llm.tools import serve_vllm as s; s.LOG = 10000; sys.argv[0] = 'x'; s.run_main(s.main)"
    )
    command = [sys.executable, "-c", code, "--model", "m", "--python", str(python), "--uds", str(folder / "vllm")]
    old = os.umask(0)  # the folder's mode must not depend on it
    try:
        with log.open("ab") as out:  # as the trainer's managed server does
            keeper = subprocess.Popen([*command, "--log", str(log)], stdout=out, stderr=subprocess.STDOUT)
    finally:
        os.umask(old)
    try:
        deadline = time.monotonic() + 30
        both = lambda: "".join(file.read_text() for file in (log.with_name("log.1"), log) if file.exists())  # noqa: E731
        while not all(words in both() for words in ("vLLM answers at unix:", "request 002999")):
            assert time.monotonic() < deadline and keeper.poll() is None, both()
            time.sleep(0.05)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(both()) < 25_000 and "request 000000" not in both()
    finally:
        keeper.send_signal(signal.SIGTERM if how == "asked" else signal.SIGKILL)
        keeper.wait(timeout=30)
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_socket_in_a_folder_of_others_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_vllm, "check_python", lambda *_: None)
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setattr(sys, "argv", ["serve_vllm", "--model", "m", "--uds", str(tmp_path / "open" / "vllm")])
    with pytest.raises(UserError, match="other users may enter"):
        serve_vllm.main()
