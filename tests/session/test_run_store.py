"""A run's work directory in a bucket: its lock, its small files, its checkpoints. A stand-in serves the bucket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path

import jax.numpy as jnp
import pytest
from etils import epath
from test_stop import KEEP, MESH

from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import bucket
from jaxrl_llm.session import bucket_lock
from jaxrl_llm.session.bucket_lock import BucketLock, locked
from jaxrl_llm.session.checkpoint import COMMIT_MARK, MODELS, Checkpoints, has_checkpoint
from jaxrl_llm.session.run_store import RunBucket
from jaxrl_llm.structs import PartState

OTHER = {"pid": 1, "host": "another", "start": None, "token": "theirs"}


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, seconds in {"RENEW": 0.1, "STALE": 0.6, "POLL": 0.02}.items():
        monkeypatch.setattr(bucket_lock, name, seconds)


@pytest.fixture
def path(cloud) -> str:
    return f"gs://bucket/{cloud.name}"


def claim(cloud: Path, number: int, **owner) -> None:
    (cloud / "lock").mkdir(parents=True, exist_ok=True)
    (cloud / "lock" / str(number)).write_text(json.dumps(OTHER | owner))


def lock_of(path: str) -> BucketLock:
    return BucketLock(bucket.file_system("--workdir", path), path)


def hold(run: RunBucket) -> AbstractContextManager[object]:
    return run.locked(lambda: None)


def numbers(cloud: Path) -> list[str]:
    return sorted(os.listdir(cloud / "lock"))


def test_a_workdir_in_a_bucket_has_one_run_at_a_time(cloud, path):
    fs = bucket.file_system("--workdir", path)
    with locked(fs, path) as lock:
        with pytest.raises(UserError, match=f"{path} is in use by process {os.getpid()} on "), locked(fs, path):
            pass
        lock.check(ask_bucket=True)
    with locked(fs, path):  # with a new number, which no process before it may write
        assert numbers(cloud) == ["2"]


def test_the_lock_of_a_process_of_this_host_that_has_ended_is_taken(cloud, path, capsys):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    claim(cloud, 4, pid=ended.pid, host=socket.gethostname())
    with locked(bucket.file_system("--workdir", path), path):
        assert numbers(cloud) == ["5"]
    assert f"process {ended.pid} on" in capsys.readouterr().out


def test_the_lock_of_another_host_is_watched_before_it_is_taken(cloud, path):
    claim(cloud, 1)
    began = time.monotonic()
    with locked(bucket.file_system("--workdir", path), path):
        assert time.monotonic() - began > bucket_lock.STALE
    claim(cloud, 9)
    with ThreadPoolExecutor() as threads:
        threads.submit(lambda: [time.sleep(0.3), claim(cloud, 9, renewed=1)])
        with pytest.raises(UserError, match="in use by process 1 on another"):
            lock_of(path).acquire()


def test_of_several_that_take_a_stale_lock_one_gets_it(cloud, path):
    claim(cloud, 1)
    locks = [lock_of(path) for _ in range(4)]

    def acquire(lock: BucketLock) -> str:
        try:
            lock.acquire()
        except UserError:
            return "refused"
        return "taken"

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(acquire, locks)) == ["refused"] * 3 + ["taken"]
    for lock in locks:
        lock.release()
    assert (cloud / "lock" / "2").read_text() == "{}"


def test_a_run_whose_lock_was_taken_writes_nothing_more(cloud, path):
    run, opened = RunBucket(path), ExitStack()
    opened.enter_context(hold(run))
    (run.folder / "config.json").write_text("{}")
    run.sync()
    claim(cloud, 2)
    (run.folder / "config.json").write_text("ours")
    for write in (run.sync, lambda: run.publish("hf"), opened.close):
        with pytest.raises(UserError, match="process 1 on another"):
            write()
    assert (cloud / "config.json").read_text() == "{}"
    assert "theirs" in (cloud / "lock" / "2").read_text()


def test_small_files_come_back_on_an_empty_disk(cloud, path):
    run = RunBucket(path)
    with hold(run):
        (run.folder / "rollbacks" / "1").mkdir(parents=True)
        (run.folder / "checkpoints").mkdir()
        written = {
            "config.json": "{}",
            "metrics.jsonl": "1\n",
            "rollbacks/1.json": "{}",
            "rollbacks/1/metrics.jsonl": "",
        }
        for name, text in {**written, "checkpoints/x": "local alone", "config.json.partial": "torn"}.items():
            (run.folder / name).write_text(text)
        run.sync()
        (run.folder / "metrics.jsonl").write_text("1\n2\n")
    assert not run.folder.exists()
    again = RunBucket(path)
    assert again.config() == "{}"
    with hold(again):
        files = {str(file.relative_to(again.folder)): file.read_text() for file in again.folder.rglob("*.json*")}
        assert files == written | {"metrics.jsonl": "1\n2\n"}  # the end of the run has kept the last line


def test_a_file_that_has_not_changed_is_not_written_again(cloud, path, bucket_server):
    run, changes = RunBucket(path), []
    with hold(run):
        (run.folder / "config.json").write_text("{}")
        (run.folder / "rollbacks").mkdir()
        (run.folder / "rollbacks" / "1.json").write_text("{}")
        (run.folder / "metrics.jsonl").write_text("1\n")
        bucket_server.changes = changes.append
        run.sync()
        (run.folder / "metrics.jsonl").write_text("1\n2\n")
        run.sync()
    order = [change.rpartition("/")[2] for change in changes if "/lock/" not in change]
    assert order[0] == "metrics.jsonl"  # before the decision that speaks of it
    assert sorted(order) == ["1.json", "config.json", "metrics.jsonl", "metrics.jsonl"]


def test_a_folder_of_a_model_has_no_config_while_it_is_replaced(cloud, path, bucket_server):
    run, seen = RunBucket(path), []
    with hold(run):
        (run.folder / "config.json").write_text("{}")
        (run.folder / "hf").mkdir()
        for name in ("config.json", "model.safetensors"):
            (run.folder / "hf" / name).write_text(name)
        run.publish("hf")
        bucket_server.changes = lambda change: seen.append((change, (cloud / "hf" / "config.json").exists()))
        run.publish("hf")
    # The first change removes it, the last one writes it.
    assert [there for change, there in seen if "/hf/" in change] == [True, False, False, False]
    assert sorted(os.listdir(cloud / "hf")) == ["config.json", "model.safetensors"]


def test_a_folder_of_something_else_and_s3_are_refused_for_a_run(cloud, path, refused):
    cloud.mkdir()
    (cloud / "thesis.tex").write_text("!")
    with pytest.raises(UserError, match=f"{path} is not empty"), hold(RunBucket(path)):
        pass
    assert sorted(os.listdir(cloud)) == ["lock", "thesis.tex"]
    with refused("--workdir s3://b/run", "mount"):
        RunBucket("s3://b/run")


@pytest.mark.slow
def test_checkpoints_in_a_bucket_are_resumed_and_a_torn_one_is_none(cloud, path):
    folder, arrays = epath.Path(path) / "checkpoints", {"policy": jnp.arange(4.0)}
    with closing(Checkpoints(folder, {}, KEEP, MESH)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {MODELS: PartState({"step": step}, arrays)})
        checkpoints.wait()
        assert checkpoints.steps() == [3]
    (cloud / "checkpoints" / "4").mkdir()
    (cloud / "checkpoints" / "4" / "_CHECKPOINT_METADATA").write_text("{}")
    assert has_checkpoint(folder)
    with closing(Checkpoints(folder, {}, KEEP, MESH)) as checkpoints:
        step, parts = checkpoints.resume(arrays)
        assert (step, parts[MODELS].notes, parts[MODELS].arrays["policy"].tolist()) == (3, {"step": 3}, [0, 1, 2, 3])
        checkpoints.go_back(2)
        assert not has_checkpoint(folder)


def test_a_deleted_checkpoint_of_a_bucket_counts_no_more_at_once(cloud, path, bucket_server):
    folder, changes = epath.Path(path) / "checkpoints", []
    with closing(Checkpoints(folder, {}, KEEP, MESH)) as checkpoints:
        checkpoints.save(1, {MODELS: PartState({}, {"policy": jnp.ones(1)})})
        checkpoints.wait()
        bucket_server.changes = changes.append
        checkpoints.go_back(0)
    assert changes[0] == f"DELETE {cloud.name}/checkpoints/1/{COMMIT_MARK}"
    assert len(changes) > 3


def test_a_checkpoint_in_a_bucket_whose_lock_was_lost_never_counts(cloud, path):
    def check_lock() -> None:
        raise UserError("the lock was taken")

    folder = epath.Path(path) / "checkpoints"
    checkpoints = Checkpoints(folder, {}, KEEP, MESH, check_lock=check_lock)
    checkpoints.save(1, {MODELS: PartState({}, {"policy": jnp.ones(1)})})
    with pytest.raises(UserError, match="the lock was taken"):
        checkpoints.wait()
    assert (cloud / "checkpoints" / "1").is_dir() and not has_checkpoint(folder)
    with suppress(UserError):
        checkpoints.close()
