"""Replay: a step of a run made again, whose record must be the run's own."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny as tiny_model
from test_rollback import NO_EVALUATION, add_rules, back
from test_sample_files import make_samples
from test_steps import SHORT, tiny

from jaxrl_llm.config.load import load
from jaxrl_llm.errors import UserError
from jaxrl_llm.session import alike
from jaxrl_llm.session.changes import Change
from jaxrl_llm.session.inputs import Inputs
from jaxrl_llm.session.rollback import Decision
from jaxrl_llm.session.sample_files import SampleFiles
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.tools import export, replay
from jaxrl_llm.tools.replay import __main__ as program
from jaxrl_llm.tools.replay import page, step_file
from jaxrl_llm.tools.replay.start import choose_start, find_start
from jaxrl_llm.tools.replay.steps import differences
from jaxrl_llm.tools.replay.what_if import read_changes
from jaxrl_llm.tools.report.runs import read_config
from jaxrl_llm.train import steps


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files of a folder with their content and time of change."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Returns the exit code of `jaxrl replay`."""
    monkeypatch.setattr(sys, "argv", ["jaxrl replay", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        program.main()
    return int(ended.value.code or 0)


def random_reward(completions: list, log_metric, **columns: object) -> list[float]:
    """A reward that no replay can make again, as those of a judge or a clock."""
    log_metric("drawn", random.random())
    return [random.random() for _ in completions]


def token_mean(record: replay.StepRecord, column: str) -> float:
    return float(record.columns[column][record.loss_mask].mean(dtype=np.float64))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The workdir of a run of three steps with an update each."""
    workdir = tmp_path_factory.mktemp("replay") / "run"
    list(steps(tiny(**SHORT, **{"num_steps": 3, "reward.weights": (1.0, 1.0)}), workdir))
    return workdir


@pytest.fixture(scope="module")
def record(run) -> replay.StepRecord:
    before = contents(run)
    lines: list[str] = []
    record = replay.step(run, 3, show=lines.append)
    assert len(lines) == 1 and "running 1 step from the checkpoint of step 2" in lines[0]
    assert contents(run) == before
    return record


def test_a_replayed_step_equals_the_record_of_the_run(run, record):
    assert (record.differences, record.exact, record.step) == ({}, True, 3)
    assert record.logged == json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    compared = set(record.metrics) & set(record.logged) - {"step"}
    assert {"reward/mean", "grad_norm", "entropy", "completion/compressed"} <= compared


def test_means_over_the_tokens_on_the_page_are_the_logged_metrics(record):
    means = page.means(record)
    expected = {*page.METRICS.values(), "reward/mean", "completion/length", "completion/truncated"}
    assert expected - {"kl/ref"} <= means.keys()  # the run has no reference model
    assert {name: record.logged[name] for name in means} == pytest.approx(means, abs=5e-6)
    gap = np.abs(record.columns["logprobs"] - record.columns["sampler_logprobs"])
    np.testing.assert_allclose(record.columns["gap"], np.where(record.loss_mask, gap, 0), atol=1e-6)


def test_the_gradients_of_the_completions_add_up_to_that_of_the_step(record):
    norm, cosine = record.gradient["norm"], record.gradient["cosine"]
    # The scalar product of a sum with the whole gradient is the whole gradient's squared norm only if they are equal.
    assert float((norm * cosine).sum()) == pytest.approx(record.logged["grad_norm"], rel=1e-5)
    assert (np.abs(cosine) <= 1 + 1e-6).all()
    learns = (record.advantages != 0).any(axis=-1)
    assert (norm[learns] > 0).all() and (norm[~learns] == 0).all() and learns.any()


def test_the_program_names_a_value_that_differs_and_exits_with_1(record, monkeypatch, capsys):
    made = record
    monkeypatch.setattr(program, "step", lambda run, number, **given: made)
    assert call(monkeypatch, "--run", "runs/mine", "--step", 3) == 0
    logged = record.logged | {"reward/mean": 0.123}
    made = replace(record, logged=logged, differences=differences(logged, record.metrics, exact=True))
    assert call(monkeypatch, "--run", "runs/mine", "--step", 3) == 1
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(named) == 1 and "reward/mean" in named[0] and "0.123" in named[0]


def test_only_values_of_the_step_itself_are_compared_and_rounding_elsewhere():
    logged = {"step": 2, "reward/mean": 0.5, "kl/ref": None, "time/step": 1.0, "eval/accuracy": 0.25, "entropy": 0.1}
    replayed = {"reward/mean": 0.5, "kl/ref": None, "time/step": 2.0, "entropy": 0.1 + 1e-7}
    assert differences(logged, replayed, exact=True) == {"entropy": (0.1, 0.1 + 1e-7)}
    assert differences(logged, replayed, exact=False) == {}
    assert differences(logged, replayed | {"entropy": 0.2}, exact=False) == {"entropy": (0.1, 0.2)}
    assert differences(logged, replayed | {"entropy": None}, exact=False) == {"entropy": (0.1, None)}


def test_a_step_in_a_file_is_the_step_that_was_exported(record, exported, tmp_path, monkeypatch):
    file = Path(shutil.copy(exported, tmp_path))
    loaded = step_file.load(file)
    for field in fields(record):
        one, other = getattr(record, field.name), getattr(loaded, field.name)
        if field.name in step_file.TABLES or isinstance(one, np.ndarray):
            assert jax.tree.map(lambda x: x.dtype, one) == jax.tree.map(lambda x: x.dtype, other), field.name
            jax.tree.map(np.testing.assert_array_equal, one, other)
        elif field.name != "config":  # which has lists in place of tuples
            assert one == other, field.name
    assert call(monkeypatch, "--from", file) == 0
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="--from"):
        step_file.load(file)


@pytest.fixture(scope="module")
def exported(record, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("export") / "step.safetensors"
    step_file.save(record, file)
    return file


@pytest.mark.slow
def test_loss_and_gradient_of_a_file_are_made_again_with_weights(run, exported, tmp_path, monkeypatch, capsys):
    saved = SavedRun(run)
    for step in (1, 2):
        export.save(saved, step, tmp_path / f"{step}", adapter=False)
    shutil.move(run / "config.json", tmp_path / "config.json")  # nothing of the run is read
    try:
        assert call(monkeypatch, "--from", exported, "--model", tmp_path / "2") == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        assert len(rows) == 5 and not any(row[-1] == "differs" for row in rows)
        for *_, stored, now in rows[1:]:
            assert float(now) == pytest.approx(float(stored), rel=1e-4)
        assert call(monkeypatch, "--from", exported, "--model", tmp_path / "1") == 1
    finally:
        shutil.move(tmp_path / "config.json", run / "config.json")


@pytest.mark.slow
def test_a_replay_that_is_killed_leaves_the_run_unchanged(run, tmp_path):
    before = contents(run)
    command = [sys.executable, "-m", "jaxrl_llm.tools.replay", "--run", run, "--step", "3", "--export", tmp_path / "x"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE) as replaying:
        # The log of the temporary work directory exists once the checkpoint is restored.
        while not [*tmp_path.glob("jaxrl-replay-*/metrics.jsonl")] and replaying.poll() is None:
            time.sleep(0.02)
        replaying.kill()
    assert replaying.returncode == -signal.SIGKILL and not (tmp_path / "x").exists()
    assert contents(run) == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("rollout.temperature=0.9", "samples"), ("mask.truncated=True", "samples"), ("seed=1", "samples"),
        ("loss.clip_hihg=0.3", "clip_high"),
        ("advantage.name=remax", "greedy"),
    ],
)  # fmt: skip
def test_a_change_of_the_samples_or_without_its_inputs_is_refused(run, change, word):
    with pytest.raises(UserError, match=word):
        read_changes(run, dict([change.split("=")]))


def test_a_step_that_was_not_made_or_has_no_readable_record_is_refused(run, tmp_path, refused):
    for step in (0, 4):
        with pytest.raises(UserError, match=f"--step {step}"):
            replay.step(run, step)
    (tmp_path / "config.json").write_text(json.dumps(load("grpo").to_dict()))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with refused("--step 2", "metrics.jsonl"):
        find_start(tmp_path, 2)


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_with_other_rows_than_the_run_had_is_refused(run, step, monkeypatch):
    before = contents(run)
    hashes = Inputs.input_hashes.func
    monkeypatch.setattr(Inputs, "input_hashes", property(lambda inputs: hashes(inputs) | {"data.source": "other"}))
    with pytest.raises(UserError, match=f"--step {step}: config.data.source") as refused:
        replay.step(run, step, show=lambda line: None)
    assert "checkpoint.accept" not in str(refused.value)
    assert contents(run) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine.name", "vllm"), ("reward.functions", ("arithmetic.accuracy", "judge.score(url='http://x')")),
        ("group_size", None),
    ],
)  # fmt: skip
def test_a_run_with_samples_of_a_server_needs_a_file_of_each_step(run, field, value, tmp_path):
    shutil.copy(run / "metrics.jsonl", tmp_path)
    config = read_config(run)
    if value is None:
        del config[field]
    else:
        config.update_from_flattened_dict({field: value})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    files = SampleFiles(tmp_path / "samples", every=1)
    files.write(1, make_samples())
    with pytest.raises(UserError, match="--run" if value is None else f"{field}.*step 2 .*log.keep_samples"):
        replay.step(tmp_path, 2)
    files.write(2, make_samples())
    if value is not None:
        start = find_start(tmp_path, 2)
        assert start.files and "samples that the run kept" in start.announcement()


def test_a_replay_on_another_machine_names_what_differs(run):
    start = find_start(run, 2)
    assert start.notes and start.notes["machine"] == alike.machine() and start.other_machine() == ""
    machine = alike.machine() | {"JAX": "0.1"}
    other = replace(start, notes=start.notes | {"machine": machine})
    assert other.other_machine() == f"JAX 0.1, now {jax.__version__}"
    assert replace(start, notes={}).other_machine() == replace(start, notes=None).other_machine() == ""


def test_a_step_of_another_machine_is_made_only_where_that_is_allowed(run, monkeypatch):
    machine = alike.machine() | {"JAX": "0.1"}
    monkeypatch.setattr(alike, "machine", lambda: machine)
    with pytest.raises(UserError, match=r"--step 2.*JAX.*--other-machine"):
        replay.step(run, 2)
    with pytest.raises(UserError, match="group_size"):  # the next check
        replay.step(run, 2, other_machine=True, changes={"group_size": "2"})


def test_the_start_of_a_replay_is_the_newest_checkpoint_of_its_attempt():
    assert choose_start(5, [2, 4, 5], [], []) == (4, 0)
    assert choose_start(2, [2, 4], [], []) == (0, 0)
    back = [Decision(9, 4, {}), Decision(12, 6, {})]
    assert choose_start(4, [2, 4, 6, 8], back, []) == (2, 0)  # made before both rollbacks
    assert choose_start(6, [2, 4, 6, 8], back, []) == (4, 1)
    assert choose_start(9, [2, 4, 6, 8], back, []) == (8, 2)
    with pytest.raises(UserError, match="--step 6"):  # its attempt began at step 4
        choose_start(6, [2, 6, 8], back, [])
    change = Change(4, "data.source", "a", "b", [1], [2])
    assert choose_start(5, [2, 4], [], [change]) == (4, 0)
    for step, kept in ((4, [2]), (6, [2])):  # made with the old rows; made with the new rows from a lost checkpoint
        with pytest.raises(UserError, match=f"--step {step}"):
            choose_start(step, kept, [], [change])


SIZES = {
    "num_steps": 3, "prompts_per_step": 8, "prompts_per_update": 8, "group_size": 4, "mesh.fsdp": 1, "log.to": (),
    "checkpoint.every": 1, "checkpoint.keep": 9, "checkpoint.keep_best": 0, "eval": None, "health.self_test": False,
    "log.completions_every": 0, "optim.warmup_steps": 1, "reward.timeout": 0.0,
}  # fmt: skip
MODEL, FEW = (
    {"model.path": str(tiny_model.SMALL)},
    {"prompts_per_step": 4, "group_size": 2, "mesh.data": 2, "num_steps": 2},
)
RUNS: dict[str, tuple[str, dict[str, object]]] = {  # shipped config, and what differs from SIZES
    "a critic and two epochs by minibatches": (
        "ppo", {"prompts_per_update": 4, "epochs": 2, "microbatch": 2, "critic.warmup_steps": 1,
                "optim.learning_rate": 3e-3, "optim.decay": "constant", **MODEL},
    ),
    "adapters and resampling": ("lora", {"rollout.resample_rounds": 2, **MODEL}),
    "episodes and two updates": ("search_grpo", {"prompts_per_update": 2, **FEW}),
    "images": ("pictures", {"prompts_per_update": 4, **FEW}),
    "a lag and partial rollouts on eight devices": (
        "grpo", {"rollout.max_lag": 1, "rollout.partial": 4, "mesh.data": 4, "mesh.tensor": 2, **MODEL},
    ),
}  # fmt: skip
# The updates of a what-if are those of the run, so a kind on one device and one on a mesh show what it adds.
WITH_WHAT_IF = ("a critic and two epochs by minibatches", "a lag and partial rollouts on eight devices")


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_steps_of_all_kinds_of_runs_are_made_again_bit_for_bit(kind, tmp_path):
    name, changes = RUNS[kind]
    config = load(name)
    config.update_from_flattened_dict(SIZES | changes)
    list(steps(config, tmp_path / "run"))
    own_value = {"optim.clip_norm": f"{config.optim.clip_norm}"} if kind in WITH_WHAT_IF else {}
    record = replay.step(tmp_path / "run", config.num_steps, changes=own_value)
    assert (record.differences, record.exact) == ({}, True)
    assert token_mean(record, "entropy") == pytest.approx(record.logged["entropy"], abs=5e-6)
    assert ("values" in record.columns, bool(record.images)) == ("critic" in kind, kind == "images")
    norm, cosine, updates = *record.gradient.values(), config.prompts_per_step // config.prompts_per_update
    if config.epochs == 1:  # the logged norm is the mean over the updates
        assert float((norm * cosine).sum()) / updates == pytest.approx(record.logged["grad_norm"], rel=1e-4)
    if kind not in WITH_WHAT_IF:
        return
    same = record.what_if
    assert same and same.own.metrics == same.other.metrics and same.own.kl_after == same.other.kl_after
    assert same.cosine == float(same.own.metrics["update_norm"] > 0)
    assert {name: record.logged[name] for name in same.own.metrics} == same.own.metrics
    np.testing.assert_array_equal(same.own.gradient["norm"], same.other.gradient["norm"])
    if config.epochs > 1:  # four updates on a rollout, of which the later ones clip
        assert same.cosine == 1.0 and same.own.kl_after > 0 and same.own.metrics["clip/fraction"] > 0
        alone = replay.step(tmp_path / "run", 1, with_gradient=False)  # a step of the critic alone
        assert (alone.differences, alone.exact) == ({}, True)
        wide = replay.step(tmp_path / "run", 3, changes={"loss.clip_high": "50.0", "optim.clip_norm": "0.0"}).what_if
        assert wide and wide.other.metrics["clip/fraction"] < wide.own.metrics["clip/fraction"]
        assert wide.own.metrics == same.own.metrics and 0 < wide.cosine < 1


@pytest.mark.slow
def test_a_run_in_a_bucket_with_a_random_reward_is_replayed_from_its_samples(cloud):
    address = f"gs://bucket/{cloud.name}"
    changes = {"num_steps": 3, "checkpoint.every": 2, "log.keep_samples": 1, "reward.weights": (1.0,)}
    list(steps(tiny(**SHORT | changes, **{"reward.functions": ("tests.tools.test_replay.random_reward",)}), address))
    before, lines = contents(cloud), []
    record = replay.step(address, 3, with_gradient=False, show=lines.append)
    assert (record.differences, record.exact, record.run, record.gradient) == ({}, True, address, {})
    assert "the checkpoint of step 2, with the samples that the run kept" in lines[0]
    assert any(name.endswith("random_reward/drawn") for name in record.logged)  # a number of `log_metric`
    assert contents(cloud) == before


@pytest.mark.slow
def test_steps_around_a_rollback_are_made_again_bit_for_bit(tmp_path, monkeypatch):
    """Step 2 was made before the rollback to step 2, and step 3 after it, at a lower rate."""
    add_rules(monkeypatch)
    list(steps(back(**NO_EVALUATION, **{"checkpoint.keep": 20}), tmp_path / "run"))
    for step in (2, 3):
        record = replay.step(tmp_path / "run", step, with_gradient=False)
        assert (record.differences, record.step) == ({}, step)
