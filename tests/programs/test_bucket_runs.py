"""Whole runs whose work directory is in a bucket: killed at five moments, and read by tools. A stand-in serves it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_bucket import BucketServer
from test_distributed import free_port
from test_train import ROOT, TINY, call, records, run_here, train_here

from jaxrl_llm.tools import doctor, export, log

SHORT = [
    *TINY, "--config.epochs=1", "--config.microbatch=0", "--config.eval=none",
    "--config.checkpoint.every=1", "--config.reward.timeout=0.0", "--config.log.to=()",
    "--config.kl=none", "--config.prompts_per_update=8", "--config.checkpoint.keep_best=0",  # few programs
]  # fmt: skip
MOMENTS = (
    r"PUT .*/config\.json",  # before the run is one
    r"PUT .*/checkpoints/1/models/.*",  # in the first checkpoint
    r"PUT .*/checkpoints/\d/commit_success\.txt",  # before that counts
    r"DELETE .*/checkpoints/.*",  # while an old one is deleted
    r"PUT .*/hf/config\.json",  # at the end
)


class Killer:
    """Ends processes at their first change of the bucket that matches, before the change is made."""

    def __init__(self, server: BucketServer):
        self.pattern, self.processes, self.killed = "$^", list[subprocess.Popen[bytes]](), 0
        server.changes = self

    def __call__(self, change: str) -> None:
        if re.fullmatch(self.pattern, change):
            self.pattern, self.killed = "$^", self.killed + 1
            for process in self.processes:
                process.kill()
            raise ConnectionAbortedError


def start(path: str, cache: Path, count: int = 1) -> list[subprocess.Popen[bytes]]:
    """Starts the processes of a run, each with an empty disk."""
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    words = [sys.executable, "-m", "fake_bucket", "train", "--config", "configs/grpo.py", "--workdir", path, *SHORT]
    address = f"127.0.0.1:{free_port()}"
    flags = os.environ["XLA_FLAGS"]  # with one process as in this one, for the same bits
    flags = re.sub(r"device_count=\d+", "device_count=1", flags) if count == 2 else flags
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    each = []
    for i in range(count):
        place = ["--distributed", f"{address},{i}/{count}"] if count > 1 else []
        more = {"XLA_FLAGS": flags, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache / str(i))}
        with (cache / f"{i}.out").open("wb") as out:
            pipes = dict(stdout=out, stderr=subprocess.STDOUT)
            each.append(subprocess.Popen([*words, *place], cwd=ROOT, env=os.environ | more, **pipes))
    return each


def said(cache: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(cache.glob("*.out")))


def kill_at_each_moment(
    server: BucketServer, folder: Path, cache: Path, moments: tuple[str, ...], count: int = 1
) -> None:
    """Starts a run again and again, and kills it at these moments."""
    killer = Killer(server)
    for number, moment in enumerate(moments, 1):
        killer.processes, killer.pattern = [], moment
        killer.processes += start(f"gs://bucket/{folder.name}", cache, count)
        assert [process.wait(600) for process in killer.processes] == [-signal.SIGKILL] * count, said(cache)
        assert killer.killed == number, said(cache)


def check_equal(folder: Path, whole: Path) -> None:
    assert [line["step"] for line in records(folder)] == [1, 2, 3, 4]
    for one, two in zip(records(folder), records(whole), strict=True):
        # Two processes compress their own texts, and the largest difference of two roundings is itself rounding.
        expected = two | {name: one[name] for name in ("completion/compressed", "sampler/gap_max", "sampler/gap_mean")}
        assert one == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    assert len({line["step"] for line in completions(folder)}) == len(completions(folder))


def completions(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "completions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The workdir of an undisturbed run on a disk."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train_here(workdir, *SHORT, config="configs/grpo.py")
    return workdir


@pytest.mark.slow
def test_a_run_in_a_bucket_killed_at_five_moments_is_the_undisturbed_one(
    cloud, bucket_server, whole, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kill_at_each_moment(bucket_server, cloud, tmp_path / "killed", MOMENTS)
    run_here(f"gs://bucket/{cloud.name}", *SHORT, config="configs/grpo.py")
    assert records(cloud) == records(whole)
    check_equal(cloud, whole)
    assert completions(cloud) == completions(whole)
    weights = [(run / "hf" / "model.safetensors").read_bytes() for run in (cloud, whole)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_two_processes_with_a_run_in_a_bucket_resume_after_a_kill(cloud, bucket_server, whole, tmp_path):
    """They go on from checkpoint 1. Checkpoint 2 is whole but for what makes it count."""
    cache = tmp_path / "cache"
    kill_at_each_moment(bucket_server, cloud, cache, (r"PUT .*/checkpoints/2/commit_success\.txt",), 2)
    assert [process.wait(600) for process in start(f"gs://bucket/{cloud.name}", cache, 2)] == [0, 0], said(cache)
    assert "after step 1 of 4, resumed" in said(cache)
    check_equal(cloud, whole)
    assert (cloud / "hf" / "config.json").is_file()


@pytest.mark.slow
def test_the_tools_read_a_run_in_a_bucket(cloud, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = f"gs://bucket/{cloud.name}"
    run_here(path, *SHORT, config="configs/grpo.py")
    assert records(cloud) == records(whole)
    call(export, monkeypatch, path, "--to", str(tmp_path / "exported"))
    weights = [(run / "model.safetensors").read_bytes() for run in (tmp_path / "exported", whole / "hf", cloud / "hf")]
    assert weights[0] == weights[1] == weights[2]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        call(doctor, monkeypatch, "--run", path)
    assert "4 records" in capsys.readouterr().out
    call(log, monkeypatch, path, "--send", "tensorboard")
    assert f"4 records and {len(completions(whole))} groups" in capsys.readouterr().out
