"""Processes that would train something else, or see another disk, are told in one line, before the first step."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict
from test_distributed import ROOT, TINY, Processes

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.config.names import own_files
from jaxrl_llm.config.records import Table
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import sharding
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.session.checkpoint import MODELS, Checkpoints, check_workdir
from jaxrl_llm.structs import PartState

# ---- what a line says, without processes


@pytest.fixture
def others(monkeypatch):
    """Sets what the other processes give to an exchange, by a function of what this process gives."""
    pauses: list[float] = []
    monkeypatch.setattr(agreement.time, "sleep", pauses.append)
    monkeypatch.setattr(agreement, "count", lambda: 2)
    return lambda give: monkeypatch.setattr(agreement, "exchange", lambda own, _: [own, *give(own)]) or pauses


def test_the_same_values_pass_after_one_exchange_of_a_hash(others):
    calls: list[str] = []
    others(lambda own: [calls.append(own) or own] * 63)
    agreement.check_alike({"config.kl.coef": 0.1}, {"the code": "a" * 64})
    assert [len(own) for own in calls[::63]] == [64]


def test_what_differs_is_told_with_both_values_and_of_a_file_with_its_name(others):
    there = [{"config.a": 1, "config.b": [1], "JAX": "0.11.0"}, {"the file of own.f": "x"}]
    others(lambda own: [own, "hash" if isinstance(own, str) else there])
    with pytest.raises(UserError) as refused:
        agreement.check_alike({"config.a": 1, "config.b": (2,), "JAX": "0.12.0"}, {"the file of own.f": "y"})
    assert str(refused.value) == (
        "process 2 differs from process 0: JAX is '0.11.0', not '0.12.0'; config.b is [1], not [2]; the file of own.f "
        "is another: give all processes the same command, files and versions"
    )


def test_of_many_differences_a_few_are_told(others):
    others(lambda own: ["hash"] if isinstance(own, str) else [[{f"config.{i}": 1 for i in range(9)}, {}]])
    with pytest.raises(UserError, match=r"config.0 is 1, not 0; .*config.3 is 1, not 0; 5 more: give all"):
        agreement.check_alike({f"config.{i}": 0 for i in range(9)}, {})


@pytest.mark.parametrize(("own", "told"), [(["1"], "0 does not see x/2, which process 1"), (["1", "2"], None)])
def test_a_process_that_sees_less_looks_again_for_a_minute(others, own, told):
    pauses = others(lambda _: [["1", "2"]])
    if told:
        with pytest.raises(UserError, match=f"process {told} sees: mend"):
            agreement.check_seen(Path("x"), lambda: own, "mend")
    else:
        agreement.check_seen(Path("x"), lambda: own, "mend")
    assert pauses == ([1] * 60 if told else [])


def test_the_files_of_ones_own_functions_are_compared_also_those_that_a_config_file_defines(tmp_path, monkeypatch):
    (tmp_path / "shorter.py").write_text("def reward(completions, **_):\n    return [0.0] * len(completions)\n")
    config = tmp_path / "my_run.py"
    config.write_text(
        "from jaxrl_llm.configs import grpo\n"
        "def polite(completions, **_):\n"
        "    return [1.0] * len(completions)\n"
        "def get_config():\n"
        "    c = grpo.get_config()\n"
        "    c.reward.functions, c.reward.weights = (polite, 'shorter.reward', 'arithmetic.accuracy'), (1.0,) * 3\n"
        "    return c\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = load(config)
    recipes.read(made)
    files = {"my_run.polite": config, "shorter.reward": tmp_path / "shorter.py"}
    assert own_files(flatten(made).values()) == files


def test_a_run_that_was_killed_while_its_processes_looked_for_each_other_starts_again(tmp_path):
    (tmp_path / f"{agreement.TOKEN}0123").touch()
    check_workdir(tmp_path, {}, Table({}, {}, {}, set()))
    (tmp_path / "another").touch()
    with pytest.raises(UserError, match="not a run of ours"):
        check_workdir(tmp_path, {}, Table({}, {}, {}, set()))


# ---- real processes


def end(processes: Processes) -> str:
    """Returns what the processes say at their end, which all must have come to before a step."""
    assert processes.end(120) == [2, 2], processes.said()
    said = processes.said()
    assert "step 1/3" not in said
    return said


def test_processes_with_another_config_version_or_reward_end_before_the_first_step(tmp_path):
    (tmp_path / "config.py").write_text(
        "import os, runpy\n"
        "def get_config():\n"
        "    if os.environ.get('OTHER'):\n"
        "        from jaxrl_llm.session import alike\n"
        "        alike.VERSIONS['JAX'] = '0.11.0'\n"
        f"    return runpy.run_path({str(ROOT / 'configs' / 'grpo.py')!r})['get_config']()\n"
    )
    other = dict(last={"OTHER": "1"}, other=["--config.optim.learning_rate=1.0"])
    said = end(Processes(2, tmp_path / "config.py", tmp_path / "run", *TINY, **other))
    assert "error: process 1 differs from process 0: JAX is '0.11.0', not '0." in said
    assert "; config.optim.learning_rate is 1.0, not 0.0001: give all processes the same command" in said
    assert not (tmp_path / "run").exists()


OWN = """
import json, os
from ml_collections import ConfigDict
def rows():
    if os.environ.get("OTHER"):
        return [{"prompt": "1+1", "answer": "3"}] * 8
    return [{"prompt": "1+1", "answer": "2"}] * 8
"""


@pytest.mark.slow
def test_processes_with_other_rows_end_before_the_first_step(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "config.py").write_text((ROOT / "configs" / "grpo.py").read_text())
    fields = (*TINY, "data.source=own.rows", "eval=none", "checkpoint.keep_best=0")
    said = end(Processes(2, tmp_path / "config.py", tmp_path / "run", *fields, last={"OTHER": "1"}))
    assert "error: process 1 differs from process 0: the content of config.data.source is another: " in said


@pytest.mark.slow
def test_processes_with_workdirs_of_their_own_end_before_the_first_step(tmp_path):
    (tmp_path / "config.py").write_text(
        "from jaxrl_llm.machine.distributed import agreement\n"
        "from jaxrl_llm.configs import grpo\n"
        "agreement.LISTED = 2\n"
        "get_config = grpo.get_config\n"
    )
    (tmp_path / "other").mkdir()
    other = ["--workdir", str(tmp_path / "other")]
    said = end(Processes(2, tmp_path / "config.py", tmp_path / "run", *TINY, other=other))
    assert "error: process 1 does not see " in said
    assert "which process 0 sees: give a --workdir on a disk that all processes share" in said
    assert not (tmp_path / "run").exists() and not [*(tmp_path / "other").iterdir()]


LAGGING = """
import os, sys, time
from pathlib import Path
from ml_collections import ConfigDict
from jaxrl_llm.machine import distributed, sharding
from jaxrl_llm.session.checkpoint import Checkpoints
from jaxrl_llm.machine.distributed import agreement

address, workdir, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
agreement.LISTED = 5
listdir, is_file, is_dir, until = os.listdir, Path.is_file, Path.is_dir, time.monotonic() + 1000

def lags(path):
    "A host that is told about a file or a folder only some time after it was made."
    return str(path).startswith(str(workdir)) and time.monotonic() < until

if address.endswith(",1/2"):
    os.listdir = lambda path=".": [x for x in listdir(path) if x != "2" or not lags(path)]
    Path.is_file = lambda path: not lags(path) and is_file(path)
    Path.is_dir = lambda path: not lags(path) and is_dir(path)

with distributed.joined(address):
    distributed.wait("start")
    until = time.monotonic() + seconds
    if len(sys.argv) == 4:
        agreement.check_shared(workdir)
        until = time.monotonic() + seconds
    config = ConfigDict(dict(every=1, keep=2, keep_best=0))
    checkpoints = Checkpoints(workdir / "checkpoints", {}, config, sharding.make_mesh(data=-1, fsdp=1, tensor=1))
    print("restores", checkpoints.check_beginning({})[0])
    checkpoints.close()
"""


def together(script: str, *arguments: str, count: int = 2) -> list[subprocess.Popen]:
    """Starts processes that run a script, whose first argument is how they are joined."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    environment = os.environ | {"XLA_FLAGS": ""}
    places = [f"127.0.0.1:{port},{i}/{count}" for i in range(count)]
    commands = [[sys.executable, "-c", script, place, *arguments] for place in places]
    return [subprocess.Popen(command, env=environment, **pipes) for command in commands]


def lagging(tmp_path: Path, *arguments: str) -> tuple[list[int], list[str]]:
    """Opens checkpoints 1 and 2 in two processes, of which the second one lags behind. Returns codes and outputs."""
    config, mesh = ConfigDict(dict(every=1, keep=2, keep_best=0)), sharding.make_mesh(data=1, fsdp=1, tensor=1)
    with closing(Checkpoints(tmp_path / "checkpoints", {}, config, mesh)) as made:
        for step in (1, 2):
            made.save(step, {MODELS: PartState({}, {"w": jnp.zeros(2)})}, None)
    each = together(LAGGING, str(tmp_path), *arguments)
    said = [process.communicate(timeout=120)[0] for process in each]
    return [process.returncode for process in each], said


@pytest.mark.slow
def test_processes_that_see_the_disk_late_restore_the_newest_checkpoint_of_process_0(tmp_path):
    codes, said = lagging(tmp_path, "2")
    assert codes == [0, 0], said
    assert ["restores 2" in one for one in said] == [True, True]
    assert not [*tmp_path.glob(f"{agreement.TOKEN}*")]


@pytest.mark.slow
def test_a_process_that_never_sees_the_newest_checkpoint_is_named_and_all_end(tmp_path):
    codes, said = lagging(tmp_path, "1000", "disk alone")
    assert codes == [2, 2], said
    line = f"process 1 does not see {tmp_path}/checkpoints/2, which process 0 sees: mount the disk"
    assert all(line in one for one in said), said


WAITING = """
import sys, time
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl_llm.machine import distributed, sharding

def collectives():
    mesh = sharding.make_mesh(data=-1, fsdp=1, tensor=1)
    at, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    ones = jax.make_array_from_callback((3,), at, lambda part: np.ones(3, np.float32)[part])
    total = jax.jit(lambda x: x.sum(), out_shardings=everywhere)
    while True:
        assert float(total(ones)) == 3
        yield

with distributed.joined(sys.argv[1]):
    steps = collectives()
    next(steps)
    print("joined", flush=True)
    while sys.argv[2] == "in a collective":
        next(steps)
    if distributed.index() == 1:
        time.sleep(1000)
    distributed.wait("the one that sleeps")
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in a collective", "in an exchange"])
def test_when_a_process_is_killed_the_others_end_in_a_line_long_before_its_heartbeat_is_missed(moment):
    each = together(WAITING, moment, count=3)
    for process in each:
        while "joined" not in (line := process.stdout.readline()):
            assert line
    time.sleep(1)
    each[1].kill()
    began = time.monotonic()
    said = [process.communicate(timeout=60)[0].strip() for process in each]
    assert time.monotonic() - began < 30
    assert [process.returncode for process in each] == [2, -9, 2], said
    line = "error: process 1 was killed: see its output; the same command goes on from the last checkpoint"
    assert said == [line, "", line]
