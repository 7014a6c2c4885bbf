"""Processes that would train something else, or see another disk, are told in one line, before the first step."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path

import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict
from test_distributed import ROOT, TINY, Processes, start

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.config.names import own_files
from jaxrl_llm.config.records import Table
from jaxrl_llm.machine import meshes
from jaxrl_llm.machine.distributed import agreement
from jaxrl_llm.session.checkpoint import MODELS, Checkpoints
from jaxrl_llm.session.workdir import check_workdir
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


def test_of_what_differs_a_few_are_told_with_values_or_the_name_of_a_file(others, refused):
    there = [{"config.a": 1, "config.b": [1], "JAX": "0.11.0"}, {"the file of own.f": "x"}]
    others(lambda own: [own, "hash" if isinstance(own, str) else there])
    with refused("process 2", "JAX is '0.11.0', not '0.12.0'", "config.b is [1], not [2]", "own.f"):
        agreement.check_alike({"config.a": 1, "config.b": (2,), "JAX": "0.12.0"}, {"the file of own.f": "y"})
    others(lambda own: ["hash"] if isinstance(own, str) else [[{f"config.{i}": 1 for i in range(9)}, {}]])
    with refused("config.0 is 1, not 0", "config.3 is 1, not 0; 5 more") as told:
        agreement.check_alike({f"config.{i}": 0 for i in range(9)}, {})
    assert "config.4" not in str(told.value)


@pytest.mark.parametrize("own", [["1"], ["1", "2"]])
def test_a_process_that_sees_less_looks_again_for_a_minute(others, own, refused):
    pauses = others(lambda _: [["1", "2"]])
    with refused("process 0", "x/2", "process 1") if len(own) == 1 else nullcontext():
        agreement.check_same_listing(Path("x"), lambda: own, "mend")
    assert pauses == ([1] * 60 if len(own) == 1 else [])


def test_files_of_own_functions_are_compared_also_those_of_a_config_file(tmp_path, monkeypatch):
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


def test_a_run_that_was_killed_while_its_processes_met_starts_again(tmp_path, refused):
    (tmp_path / f"{agreement.TOKEN}0123").touch()
    check_workdir(tmp_path, {}, Table({}, {}, {}, set()))
    (tmp_path / "another").touch()
    with refused(str(tmp_path)):
        check_workdir(tmp_path, {}, Table({}, {}, {}, set()))


# ---- real processes


def end(processes: Processes) -> str:
    """Returns what the processes say at their end, which all must have come to before a step."""
    assert processes.end(120) == [2, 2], processes.said()
    said = processes.said()
    assert "step 1/3" not in said
    return said


@pytest.mark.slow
def test_processes_with_another_config_or_version_end_before_the_first_step(tmp_path):
    (tmp_path / "config.py").write_text(
        "import os, runpy\n"
        "def get_config():\n"
        "    if os.environ.get('OTHER'):\n"
        "        from jaxrl_llm.session import alike\n"
        "        alike.VERSIONS['JAX'] = '0.11.0'\n"
        f"    return runpy.run_path({str(ROOT / 'configs' / 'grpo.py')!r})['get_config']()\n"
    )
    other = dict(last={"OTHER": "1", "JAX_ENABLE_X64": "1"}, other=["--config.optim.learning_rate=1.0"])
    said = end(Processes(2, tmp_path / "config.py", tmp_path / "run", *TINY, **other))
    assert "error: process 1 differs from process 0: JAX is '0.11.0', not '0." in said
    assert "; config.optim.learning_rate is 1.0, not 0.0001" in said
    assert "jax_enable_x64 is True, not False" in said
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
        "agreement.NFS_CACHE_SECONDS = 2\n"
        "get_config = grpo.get_config\n"
    )
    (tmp_path / "other").mkdir()
    other = ["--workdir", str(tmp_path / "other")]
    said = end(Processes(2, tmp_path / "config.py", tmp_path / "run", *TINY, other=other))
    assert "error: process 1 does not see " in said
    assert "which process 0 sees" in said and "--workdir" in said
    assert not (tmp_path / "run").exists() and not [*(tmp_path / "other").iterdir()]


LAGGING = """
import os, sys, time
from pathlib import Path
from ml_collections import ConfigDict
from jaxrl_llm.machine import distributed, meshes
from jaxrl_llm.session.checkpoint import Checkpoints
from jaxrl_llm.machine.distributed import agreement

address, workdir = sys.argv[1], Path(sys.argv[2])
agreement.NFS_CACHE_SECONDS = 5
listdir, is_file, is_dir, until = os.listdir, Path.is_file, Path.is_dir, time.monotonic() + 1000

def lags(path):
    "A host that is told about a file or a folder only some time after it was made."
    return str(path).startswith(str(workdir)) and time.monotonic() < until

if address.endswith(",1/2"):
    os.listdir = lambda path=".": [x for x in listdir(path) if x != "2" or not lags(path)]
    Path.is_file = lambda path: not lags(path) and is_file(path)
    Path.is_dir = lambda path: not lags(path) and is_dir(path)

with distributed.join_processes(address):
    distributed.wait("start")
    until = time.monotonic() + 2
    agreement.check_shared(workdir)
    until = time.monotonic() + 2
    config = ConfigDict(dict(every=1, keep=2, keep_best=0))
    checkpoints = Checkpoints(workdir / "checkpoints", {}, config, meshes.make_mesh(data=-1, fsdp=1, tensor=1))
    print("restores", checkpoints.check_beginning({})[0])
    checkpoints.close()
"""


@pytest.mark.slow
def test_processes_that_see_the_disk_late_restore_the_newest_checkpoint(tmp_path):
    config, mesh = ConfigDict(dict(every=1, keep=2, keep_best=0)), meshes.make_mesh(data=1, fsdp=1, tensor=1)
    with closing(Checkpoints(tmp_path / "checkpoints", {}, config, mesh)) as made:
        for step in (1, 2):
            made.save(step, {MODELS: PartState({}, {"w": jnp.zeros(2)})})
    each = start(LAGGING, str(tmp_path))
    said = ["".join(process.communicate(timeout=120)) for process in each]
    assert [process.returncode for process in each] == [0, 0], said
    assert ["restores 2" in one for one in said] == [True, True]
    assert not [*tmp_path.glob(f"{agreement.TOKEN}*")]
