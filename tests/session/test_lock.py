"""The lock of a workdir: who holds it, and who may take it over. Processes under other names stand in for hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.session import lock
from jaxrl_llm.session.lock import locked

PROGRAM = """
import socket, sys, time
from pathlib import Path
host, kind, workdir, start, seconds = sys.argv[1:]
socket.gethostname = lambda: host
import filelock._soft, filelock._util
from jaxrl_llm.errors import UserError
from jaxrl_llm.session import lock
lock.RENEW, lock.STALE, lock.POLL = 0.2, 1.0, 0.05
if kind == "nfs":  # there Linux cannot exchange two names
    filelock._soft.exchange_supported = filelock._util.exchange_supported = lambda: False
time.sleep(max(float(start) - time.time(), 0))
try:
    with lock.locked(Path(workdir)) as held:
        print("locked", flush=True)
        time.sleep(float(seconds))
        held.check()
except UserError as error:
    print(error, flush=True)
"""
KINDS = pytest.mark.parametrize("kind", ["local", "nfs"])


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for name, seconds in {"RENEW": 0.2, "STALE": 1.0, "POLL": 0.05}.items():
        monkeypatch.setattr(lock, name, seconds)


def run_on(host: str, workdir: Path, *, kind: str = "local", start: float = 0, seconds: float = 60) -> subprocess.Popen:
    words = [sys.executable, "-c", PROGRAM, host, kind, str(workdir), str(start), str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@contextmanager
def holder(host: str, workdir: Path, *, stopped: bool = False) -> Iterator[subprocess.Popen]:
    """A process of a host that holds the lock; stopped: it has stopped to renew it, as one whose host is gone."""
    process = run_on(host, workdir)
    try:
        assert process.stdout.readline() == "locked\n"
        if stopped:
            process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_workdir_has_one_run_at_a_time_and_a_killed_one_does_not_hold_it(tmp_path, capsys):
    workdir = tmp_path / "a" / "run"
    with holder(os.uname().nodename, workdir) as process:
        said = rf"process {process.pid} on .*/a/run/lock"
        began = time.monotonic()
        with pytest.raises(UserError, match=said), locked(workdir):
            pass
        assert time.monotonic() - began < lock.STALE / 2  # on the same host it need not watch
        assert names(workdir) == ["lock"]
        process.kill()
        process.wait()
        began = time.monotonic()
        with locked(workdir):
            (workdir / "config.json").touch()
        assert time.monotonic() - began < lock.STALE / 2
        assert f"process {process.pid} on" in capsys.readouterr().out
    assert names(workdir) == ["config.json"]


def test_a_workdir_that_stays_empty_is_not_left_behind(tmp_path):
    with locked(tmp_path / "a" / "run"):
        assert (tmp_path / "a" / "run").is_dir()
    assert not (tmp_path / "a").exists()


def test_a_lock_that_another_host_renews_is_not_taken(tmp_path, capsys):
    with holder("host-a", tmp_path) as process:
        said = rf"process {process.pid} on host-a.*{tmp_path}/lock"
        with pytest.raises(UserError, match=said), locked(tmp_path):
            pass
        assert f"process {process.pid} on host-a" in capsys.readouterr().out
    assert names(tmp_path) == ["lock"]


def test_a_lock_is_renewed_by_a_host_whose_clock_is_years_behind(tmp_path):
    with holder("host-a", tmp_path, stopped=True):
        renewing = subprocess.Popen(["sh", "-c", f"while sleep 0.2; do touch -d @$((1000000000 + $$)) {tmp_path}/lock; "
                                     f"touch -d @1000000000 {tmp_path}/lock; done"])  # fmt: skip
        try:
            with pytest.raises(UserError, match="process"), locked(tmp_path):
                pass
        finally:
            renewing.kill()
            renewing.wait()


def test_a_lock_that_another_host_takes_meanwhile_is_in_use_by_its_new_owner(tmp_path):
    with holder("host-a", tmp_path, stopped=True) as gone:
        owner = (tmp_path / "lock").read_text().replace(f"pid={gone.pid}", "pid=77").replace("host-a", "host-c")
        (tmp_path / "owner").write_text(owner)
        steps = "sleep 0.3; : > new; mv new lock; sleep 0.3; cat owner > lock; rm owner"
        taking = subprocess.Popen(["sh", "-c", steps], cwd=tmp_path)
        with pytest.raises(UserError, match="process 77 on host-c"), locked(tmp_path):
            pass
        assert taking.wait() == 0


@KINDS
def test_the_lock_of_a_host_that_is_gone_is_taken_over(tmp_path, kind):
    with holder("host-a", tmp_path, stopped=True) as gone:
        began, taker = time.monotonic(), run_on("host-b", tmp_path, kind=kind, seconds=0.5)
        said = [taker.stdout.readline() for _ in range(3)]
        assert time.monotonic() - began > lock.STALE
        assert f"process {gone.pid} on host-a" in said[0]
        assert f"process {gone.pid} on host-a" in said[1]
        assert said[2] == "locked\n"
        assert f"pid={taker.pid}\n" in (tmp_path / "lock").read_text()
        (tmp_path / "config.json").touch()
        gone.kill()
        assert taker.communicate()[0] == "" and names(tmp_path) == ["config.json"]


@pytest.mark.slow
def test_a_process_that_was_stopped_for_long_ends_when_its_lock_was_taken(tmp_path):
    process = run_on("host-a", tmp_path, seconds=4)
    assert process.stdout.readline() == "locked\n"
    process.send_signal(signal.SIGSTOP)
    with locked(tmp_path):
        process.send_signal(signal.SIGCONT)
        assert "another process has taken the lock" in process.communicate()[0]
        assert f"pid={os.getpid()}\n" in (tmp_path / "lock").read_text()  # it has not removed it


def test_the_lock_of_an_earlier_version_is_taken_over(tmp_path, capsys):
    (tmp_path / "lock").touch()
    with locked(tmp_path):
        pass
    printed = capsys.readouterr().out
    assert "an unknown process" in printed and f"{lock.STALE:.0f} s" not in printed  # the lock is taken at once


@pytest.mark.slow
@KINDS
def test_of_five_processes_that_take_over_one_lock_at_once_one_has_it(tmp_path, kind):
    with holder("host-a", tmp_path, stopped=True):
        start = time.time() + 1
        takers = [run_on(f"host-{i}", tmp_path, kind=kind, start=start, seconds=2.5) for i in range(5)]
        said = [taker.communicate()[0] for taker in takers]
    assert sum("locked\n" in text for text in said) == 1, said
    assert sum("in use by process" in text for text in said) == 4, said
