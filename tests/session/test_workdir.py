"""A work directory that is damaged, or of another program, is refused with a remedy that keeps what is good in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_llm.config.records import Table
from jaxrl_llm.session import banner
from jaxrl_llm.session.workdir import check_log, check_workdir, initial_values

TABLE = Table({}, {}, {}, set())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A work directory with a checkpoint."""
    workdir = tmp_path / "run"
    (workdir / "checkpoints" / "4").mkdir(parents=True)
    (workdir / "checkpoints" / "4" / "_CHECKPOINT_METADATA").write_text("{}")
    return workdir


@pytest.mark.parametrize("content", [None, '{"a": ', "7"])
def test_a_damaged_config_is_to_be_put_back_where_checkpoints_need_it(run, content, refused):
    if content is not None:
        (run / "config.json").write_text(content)
    with refused(str(run), "checkpoints", "hf/README.md"):
        check_workdir(run, {}, TABLE)
    (run / "checkpoints" / "4").rename(run / "other")
    with refused(str(run), "new folder"):
        check_workdir(run, {}, TABLE)


def test_a_disk_that_is_read_only_is_named_as_such(run, monkeypatch, refused):
    monkeypatch.setattr(os, "access", lambda *_: False)
    for flag in 0, os.ST_RDONLY:
        monkeypatch.setattr(os, "statvfs", lambda _, flag=flag: SimpleNamespace(f_flag=flag))
        with refused(str(run), "read-only" if flag else "not writable"):
            check_workdir(run, {}, TABLE)
    (run / "file").touch()
    with refused("is a file"):
        check_workdir(run / "file" / "run", {}, TABLE)


def test_a_log_whose_checkpoints_are_gone_is_not_overwritten(run, refused, capsys):
    for steps in 10, 11:  # a run that was killed in its first save may have ten, with a save at each fifth step
        (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(steps + 1)))
        if steps == 10:
            check_log(run, 0, 5)
            assert "10 steps" in capsys.readouterr().out
    check_log(run, 5, 5)
    assert not capsys.readouterr().out
    check_log(run, 12, 5)  # the log has 11 steps
    assert "step 11" in capsys.readouterr().out
    with refused(str(run), "11 steps", "metrics.jsonl"):
        check_log(run, 0, 5)


@pytest.mark.parametrize("folder", ["checkpoints.saved", "hf", "adapter"])
def test_a_run_that_exported_or_saved_has_lost_its_checkpoints(run, folder, refused):
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / folder).mkdir()
    check_log(run, 1, 5)
    with refused("1 steps", f"metrics.jsonl, {folder}"):
        check_log(run, 0, 5)


def test_the_schedule_of_a_run_is_taken_from_the_run_of_the_same_program_alone(run):
    before = json.dumps({"schedule_steps": 6, "num_steps": 3, "rollout": {"max_lag": 0}})
    fields = {"schedule_steps": 0, "num_steps": 9}
    assert initial_values(lambda: before, fields)["schedule_steps"] == 9
    assert initial_values(lambda: before, fields | {"rollout.max_lag": 1})["schedule_steps"] == 6


def test_a_run_with_fewer_steps_than_it_has_done_says_so():
    assert "num_steps = 4" in banner.start_table(6, 4, [])[0][1]
    assert "num_steps" not in banner.start_table(4, 4, [])[0][1]
