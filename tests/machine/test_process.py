"""Processes that call functions for another one: limits, ends, and that none is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine.process import Pool, Process, cpus

# Makes three processes, begins a call that never returns in two of them, and says their numbers.
PARENT = """
import sys, time
sys.path.insert(0, {here!r})
import test_process as t
from jaxrl_llm.machine.process import Process
made = [Process(t.number) for _ in range(3)]
made[1].send_call(t.sleep)
made[2].send_call(t.hold_the_lock)
pids = [process.receive_result(60) for process in made]
time.sleep(0.2)  # until both are in their calls
print(*pids, flush=True)
time.sleep(600)
"""


def number() -> int:
    return os.getpid()


def sleep() -> None:
    time.sleep(600)


def hold_the_lock() -> None:
    """One call that never comes back to the interpreter."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def seen() -> tuple[str, list[str], str | None, bool]:
    return os.getcwd(), sys.path, os.environ.get("JAX_PLATFORMS"), "jax" in sys.modules


def fail(kind: str) -> None:
    if kind == "wrong":
        raise UserError("said so")
    if kind == "bug":
        raise ZeroDivisionError("a bug")
    if kind == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGSEGV)


def double(x: int) -> int:
    if x < 0:
        fail("exit") if x == -1 else hold_the_lock()
    return 2 * x


def nothing() -> None:
    pass


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its end to be noted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_a_process_has_the_place_and_the_path_of_this_one_and_no_jax():
    with closing(Process(seen)) as process:
        assert process.receive_result(60) == (os.getcwd(), sys.path, "cpu", False)


@pytest.mark.parametrize("function", [sleep, hold_the_lock])
def test_a_call_that_takes_too_long_is_left_and_ended(function):
    with closing(Process(number)) as process:
        pid = process.receive_result(60)
        process.send_call(function)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            process.receive_result(0.2)
        assert time.monotonic() - began < 5
    assert ends([pid])


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [("wrong", UserError, "^said so$"), ("bug", RuntimeError, "in fail\n(.|\n)*ZeroDivisionError: a bug"),
     ("exit", ChildProcessError, "^exit code 3$"), ("signal", ChildProcessError, "^SIGSEGV$")],
)  # fmt: skip
def test_what_goes_wrong_there_is_raised_here(kind, error, words):
    with closing(Process(nothing)) as process:
        process.receive_result(60)
        process.send_call(fail, kind)
        with pytest.raises(error, match=words):
            process.receive_result(60)


def test_neither_signals_nor_the_end_of_the_thread_that_made_it_end_a_process():
    made: list[Process] = []
    thread = threading.Thread(target=lambda: made.append(Process(number)))
    thread.start()
    thread.join()
    with closing(made[0]) as process:
        pid = process.receive_result(60)
        assert os.getpgid(pid) != os.getpgid(0)
        for sign in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, sign)
        process.send_call(number)
        assert process.receive_result(60) == pid


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_one_that_made_it(sign, tmp_path):
    """Idle, asleep, or in a call that never lets go of the interpreter."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(here=str(Path(__file__).parent)))
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3 and all(map(alive, pids))
    parent.send_signal(sign)
    parent.wait()
    assert ends(pids)


def test_a_pool_answers_in_order_and_leaves_out_calls_that_do_not_return():
    pool = Pool(double, nothing)
    assert pool.map([(i,) for i in range(50)], size=2, call_seconds=30, total_seconds=60) == [2 * i for i in range(50)]
    began = time.monotonic()
    assert pool.map([(1,), (-2,), (2,), (-1,), (3,), (4,)], size=2, call_seconds=1, total_seconds=60) == [
        2,
        None,
        4,
        None,
        6,
        8,
    ]
    assert pool.map([(-2,)] * 9, size=2, call_seconds=30, total_seconds=0.5) == [None] * 9
    assert time.monotonic() - began < 20
    assert pool.map([(5,), (6,)], size=1, call_seconds=30, total_seconds=60) == [10, 12]


@pytest.mark.parametrize(
    ("cores", "environment", "files", "share"),
    [
        (1, {}, {}, 1),  # taskset -c 0
        (96, {}, {}, 96),
        (96, {}, {"cpu.max": "800000 100000"}, 8),  # a container of Kubernetes with cpu: 8
        (96, {}, {"cpu.max": "50000 100000"}, 1),
        (96, {}, {"cpu.max": "max 100000"}, 96),
        (96, {}, {"pod/task/cpu.max": "max 100000", "pod/cpu.max": "400000 100000"}, 4),  # the parent's holds too
        (96, {}, {"cpu,cpuacct/pod/task/cpu.cfs_quota_us": "300000",
                  "cpu,cpuacct/pod/task/cpu.cfs_period_us": "100000"}, 3),
        (96, {}, {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 96),
        (96, {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, {}, 12),
        (12, {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_CPUS_PER_TASK": "12"}, {}, 12),
        (96, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {}, 24),
        (4, {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, {}, 1),
    ],
)  # fmt: skip
def test_a_task_takes_the_cores_that_it_may_use(cores, environment, files, share, tmp_path, monkeypatch):
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    groups = {"proc/self/cgroup": "4:memory:/pod\n3:cpu,cpuacct:/pod/task\n0::/pod/task\n"}
    for name, text in (groups | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpus(tmp_path) == share
