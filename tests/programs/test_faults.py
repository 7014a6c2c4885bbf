"""Whole runs that meet a fault: what they say, what they leave, and what the same command makes of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import jax
import pytest
from test_train import ROOT, TINY, command, log_of, records, run, train_here

from jaxrl_llm.errors import UserError

MINE = """
import gc, time, jax
import orbax.checkpoint as ocp

calls, bytes_alive = 0, []

def fails_at_the_third(prompts, completions, **columns):
    global calls
    calls += 1
    if calls == 3:
        raise ValueError("own fault")
    return [0.0 for _ in completions]

def measures(prompts, completions, **columns):
    gc.collect()
    bytes_alive.append(sum(x.nbytes for x in jax.live_arrays()))
    return [float(len(c) % 2) for c in completions]

def saves_slowly():  # as a large model on a slow disk
    real = ocp.CheckpointManager._finalize
    def slow(*args):
        time.sleep(1)
        real(*args)
        time.sleep(1)
    ocp.CheckpointManager._finalize = slow
"""
SHORT = [
    "--config.num_steps=4", "--config.eval=none", "--config.checkpoint.every=1", "--config.mesh.data=1",
    "--config.epochs=1", "--config.prompts_per_update=8", "--config.microbatch=0", "--config.optim.warmup_steps=0",
]  # fmt: skip
# Few programs, and no processes of rewards.
FEW = ["--config.kl=none", "--config.reward.timeout=0.0"]
FAILS = ["--config.reward.functions=mine.fails_at_the_third", "--config.reward.weights=1."]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's own module."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def start(workdir: Path, *extra: str) -> subprocess.Popen[str]:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    words = command(workdir, *TINY, *SHORT, *extra)
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True, **pipes)


def until(process: subprocess.Popen[str], word: str) -> None:
    assert any(word in line for line in process.stdout or ())


def fill(file: Path) -> None:
    """Takes all the room there is."""
    with file.open("wb", buffering=0) as out, suppress(OSError):
        while True:
            out.write(bytes(2**16))


def checkpoints(workdir: Path) -> list[str]:
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


@pytest.mark.slow
def test_an_error_right_after_a_save_leaves_that_checkpoint_whole(mine):
    program = "import mine, sys; mine.saves_slowly(); from jaxrl_llm import train, errors; errors.run_main(train.main)"
    argv = [*command(mine / "run", *TINY, *SHORT, *FAILS)[3:]]
    result = subprocess.run([sys.executable, "-c", program, *argv], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "mine.fails_at_the_third raised ValueError: own fault" in result.stderr
    assert result.stderr.count("\n") == 1
    assert checkpoints(mine / "run") == ["1", "2"]


@pytest.mark.slow
def test_a_second_start_is_refused_and_the_first_run_goes_on(tmp_path):
    fields = ["--config.kl=none", "--config.num_steps=500", "--config.checkpoint.every=1000"]
    first = start(tmp_path / "run", *fields)
    until(first, "step   1/500")
    with pytest.raises(UserError, match=f"--workdir {tmp_path / 'run'} is in use by process {first.pid} on "):
        train_here(tmp_path / "run", *TINY, *SHORT, *fields, config="configs/grpo.py")
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    out, error = first.communicate(timeout=60)
    assert (first.returncode, error) == (0, "")
    last = records(tmp_path / "run")[-1]["step"]
    assert "stopped by Ctrl-C (" in out
    assert f", after step {last}: " in out and str(tmp_path / "run") in out
    assert checkpoints(tmp_path / "run") == [str(last)]  # of the signal: the config asks for none this early
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "lock").exists()


@pytest.mark.slow
def test_a_closed_pipe_ends_the_run_with_a_checkpoint(tmp_path):
    process = start(tmp_path / "run", *FEW, "--config.num_steps=500")
    until(process, "step   1/500")
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""
    assert str(records(tmp_path / "run")[-1]["step"]) in checkpoints(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(workdir)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no mounts here")
    try:
        process = start(workdir, *FEW, "--config.num_steps=500")
        until(process, "step   5/500")  # by then the checkpoint of step 2 is whole: that of step 4 waited for it
        fill(workdir / "filler")
        _, error = process.communicate(timeout=60)
        assert process.returncode == 2
        assert error.count("\n") == 1
        assert str(workdir) in error and "No space left on device" in error
        (workdir / "filler").unlink()
        before = log_of(workdir)
        last = max(int(name) for name in checkpoints(workdir) if name.isdigit())
        result = run(workdir, *TINY, *SHORT, *FEW, f"--config.num_steps={last + 1}")
        assert (result.returncode, result.stderr) == (0, "")
        kept = [line for line in before.splitlines() if line.endswith("}") and json.loads(line)["step"] <= last]
        assert log_of(workdir).splitlines()[: len(kept)] == kept
        assert all(name.isdigit() for name in checkpoints(workdir))
    finally:
        subprocess.run(["umount", str(workdir)], check=True)


@pytest.mark.slow
def test_a_resumed_run_holds_no_more_memory_than_a_fresh_one(mine):
    measured = [
        "--config.kl.refresh.every=2", "--config.critic.warmup_steps=0", "--config.critic.optim.warmup_steps=0",
        "--config.checkpoint.every=2", "--config.reward.functions=mine.measures", "--config.reward.weights=1.",
        "--config.reward.timeout=0",  # in this process, whose arrays it counts
    ]  # fmt: skip
    alive = []
    for gone in ("", "4"):  # measured in step 4, a step after what was saved or restored in step 2
        if gone:
            shutil.rmtree(mine / "run" / "checkpoints" / gone)
        sys.modules.pop("mine", None)
        before = jax.live_arrays()  # of other tests; none of them may be freed while this one counts
        train_here(mine / "run", *TINY, *SHORT, *measured, config="configs/ppo.py")
        alive.append(sys.modules["mine"].bytes_alive[-1] - sum(x.nbytes for x in before))
    fresh, resumed = alive
    print(f"{fresh:,} bytes alive in step 4 of a fresh run, {resumed:,} of a resumed one")
    assert resumed <= 1.01 * fresh
