"""What Weights & Biases gets, in its offline mode, which needs no network."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.log import Log

ROOT = Path(__file__).parent.parent


def test_wandb_gets_every_record_in_one_run_however_often_it_is_resumed(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = load(ROOT / "configs" / "grpo.py")
    config.log.wandb_project, config.log.tensorboard = "a project", False
    for step in (0, 1):
        log = Log(tmp_path, config)
        log.begin(step)
        log.add_evaluation(step, {"eval/accuracy": 0.25 + step})
        log.close()
    run_id = hashlib.sha256(str(tmp_path.absolute()).encode()).hexdigest()[:16]
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{run_id}.wandb"}
    expected, end = (b"eval/accuracy", b"0.25", b"1.25", b"a project"), time.monotonic() + 60
    written = lambda: b"".join(file.read_bytes() for file in files)  # noqa: E731
    while not all(text in written() for text in expected):  # its service writes a moment after it has said so
        assert time.monotonic() < end, written()
        time.sleep(0.1)
