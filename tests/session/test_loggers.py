"""What each logger gets, read back from the library's own files or by its own API. None needs a network."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import log_of

from jaxrl_llm import loggers
from jaxrl_llm import recipe as recipes
from jaxrl_llm.config.load import flatten, load
from jaxrl_llm.health.finding import Finding
from jaxrl_llm.session.log import COLUMNS, PHASES, Log

ROOT = Path(__file__).parents[2]


def config_of(*names: str, project: str = "a project", **more):
    config = load(ROOT / "configs" / "grpo.py")
    config.log.to, config.log.project = names, project
    config.log.update(more)
    return config


def write(log: Log, step: int, **numbers: float) -> None:
    record = SimpleNamespace(step=step, summary=lambda: numbers, samples=None)
    log.write(record)  # pyright: ignore[reportArgumentType]
    log.finish()


SAMPLES = [loggers.Sample("user: 1 + 1", "a completion", 1.0), loggers.Sample("user: 1 + 1", "*3*\n|", None)]


def logged_twice(workdir: Path, config) -> None:
    """A run that logs steps 0 to 2, and goes on after step 1 with other numbers."""
    for after, steps, factor in ((0, (0, 1, 2), 1), (1, (2, 3), 10)):
        log = log_of(workdir, config)
        log.start(after)
        for step in steps:
            write(log, step, **{"eval/accuracy": 0.25 + step * factor, "entropy": 1.0, "entropy/coef": 0.5})
        log.show_finding(3, Finding("warning", "it is flat", "a cause", "a fix", "a paper", "reward_flat"))
        for logger in log._loggers:  # pyright: ignore[reportPrivateUsage]
            logger.write_samples(3, SAMPLES)
        log.close()


@pytest.mark.needs("wandb")
def test_wandb_gets_every_record_in_one_run_however_often_it_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged_twice(tmp_path, config_of("wandb", name="a name", tags=("one tag", "another")))
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{(tmp_path / 'run_id').read_text()}.wandb"}
    # 20.25 is the step that was logged again, which W&B's own step would have dropped.
    expected, end = (b"eval/accuracy", b"0.25", b"2.25", b"20.25", b"30.25", b"a project"), time.monotonic() + 60
    written = lambda: b"".join(file.read_bytes() for file in files)  # noqa: E731
    expected += (b"a name", b"one tag", b"table-file")
    while not all(text in written() for text in expected):  # its service writes a moment after it has said so
        assert time.monotonic() < end, written()
        time.sleep(0.1)
    tables = (tmp_path / "wandb").glob("offline-run-*/files/media/table/*.json")
    assert [json.loads(table.read_text())["data"] for table in tables] == [[[3, *sample] for sample in SAMPLES]] * 2


@pytest.mark.needs("trackio")
@pytest.mark.slow
def test_trackio_gets_every_record_and_no_library_is_imported_that_is_not_named(tmp_path, monkeypatch):
    # Its folder is read when it is imported, and this process may have imported it already.
    script = (
        "import sys; sys.path.insert(0, 'tests'); import conftest; from pathlib import Path; import test_loggers as t\n"
        "import jaxrl_llm.train; assert not {'mlflow', 'trackio', 'wandb'} & set(sys.modules)\n"
        "folder = Path(sys.argv[1]); t.logged_twice(folder / 'run', t.config_of('trackio'))\n"
        "import trackio; from trackio.sqlite_storage import SQLiteStorage\n"
        "(run,) = trackio.Api().runs('a project'); assert run.config['group_size'] == 8, run.config\n"
        "logs = SQLiteStorage.get_logs('a project', run.name, run_id=run.id)\n"
        "print([line['completions']['_value'] for line in logs if 'completions' in line])\n"
        "print([(line['step'], line['eval/accuracy'], line['entropy/coef']) for line in logs if 'entropy' in line])\n"
        "print([alert['title'] for alert in run.alerts()])\n"
    )
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    points = [(0, 0.25, 0.5), (1, 1.25, 0.5), (2, 2.25, 0.5), (2, 20.25, 0.5), (3, 30.25, 0.5)]
    tables = [[sample._asdict() for sample in SAMPLES]] * 2
    assert done.stdout.splitlines()[-3:] == [str(tables), str(points), str(["health/reward_flat"] * 2)]


@pytest.mark.needs("mlflow")
@pytest.mark.slow
def test_mlflow_gets_every_record_in_one_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(loggers.Mlflow, "PARAMS", 40)  # so that they need several requests
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    logged_twice(tmp_path / "run", config_of("mlflow", name="a name", tags=("a tag",)))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("a project").experiment_id])
    history = client.get_metric_history(run.info.run_id, "eval/accuracy")
    assert sorted((m.step, m.value) for m in history) == [(0, 0.25), (1, 1.25), (2, 2.25), (2, 20.25), (3, 30.25)]
    assert run.data.metrics["entropy/coef"] == 0.5
    assert run.data.params["optim.learning_rate"] == "0.0001"
    assert set(run.data.params) == set(flatten(config_of()))
    assert "a cause" in run.data.tags["health/reward_flat"]
    assert (run.info.run_name, run.info.status) == ("a name", "FINISHED")
    assert run.data.tags["a tag"] == ""
    table = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="completions/step_000003.json")
    assert json.loads(Path(table).read_text())["data"] == [[3, *sample] for sample in SAMPLES] * 2


@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_a_line_of_a_step_fits_the_terminal(tmp_path, width):
    log = log_of(tmp_path, config_of())
    log.start(0)
    numbers = {key: 0.5 for _, key, _ in COLUMNS} | {f"time/{phase}": 1.25 for phase in PHASES}
    record = numbers | {"clip/fraction": 0.0, "time/step": 5.0, "tokens_per_second": 1234.5}
    whole = log._step_line(3, record)
    log._terminal, log._console.width = True, width
    line = log._step_line(3, record)
    log.close()
    assert len(line) <= width and line.startswith("step   3/100")
    assert (line == whole) == (width == 300)
    assert ["reward 0.500" in line, "5.00s" in line] == [True, True]
    assert ("clip" in line, "(rollout" in line) == (width == 300, width == 300)


class Broken:
    """A logger whose server is gone for its second record, for as many tries as `fails`."""

    got: list[int]
    fails: int

    def __init__(self, run: loggers.LoggedRun):
        pass

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if step == 1 and Broken.fails:
            Broken.fails -= 1
            raise ConnectionError("the server\nis gone")
        Broken.got.append(step)

    def close(self) -> None:
        Broken.got.append(-1)


class Choosy:
    """A logger that never takes some steps, and nothing while its server is gone."""

    refused, gone = (1, 2, 5), False

    def __init__(self, run: loggers.LoggedRun):
        self.got: list[int] = []

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if step in self.refused or self.gone:
            raise ValueError("no such name")
        self.got.append(step)

    def close(self) -> None:
        self.got.append(-1)


def test_a_record_that_is_never_taken_holds_back_no_other_and_none_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "RETRY_PAUSES", (0.001, 0.002))
    choosy, lines = Choosy(loggers.LoggedRun(tmp_path, 0, "", {})), list[str]()
    background = loggers.BackgroundLogger(
        "it", lambda run: choosy, loggers.LoggedRun(tmp_path, 0, "", {}), lines.append
    )

    def write(*steps: int) -> None:
        for step in steps:
            background.write(step, {})

    def wait_for(*steps: int) -> None:
        end = time.monotonic() + 20
        while sorted(choosy.got) != list(steps):
            assert time.monotonic() < end, (choosy.got, lines)
            time.sleep(0.005)

    write(*range(5))
    wait_for(0, 3, 4)
    choosy.gone = True
    write(6, 7, 8)
    time.sleep(0.2)  # many more tries than TRIES
    assert sorted(choosy.got) == [0, 3, 4]
    choosy.gone = False
    wait_for(0, 3, 4, 6, 7, 8)
    write(5, 9, 10)
    wait_for(0, 3, 4, 6, 7, 8, 9, 10)
    background.close()
    refused = [line for line in lines if "refuses the numbers of step" in line]
    assert [line.split("step ")[1].split()[0] for line in refused] == ["1", "2", "5"]
    assert lines[-1].startswith("warning: config.log.to: it has not got 3 of its records: jaxrl log")
    assert len(lines) <= 9, lines


class Stuck:
    """A logger whose server never answers."""

    def __init__(self, run: loggers.LoggedRun):
        threading.Event().wait()


def test_a_logger_that_fails_is_told_once_and_gets_the_numbers_later(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loggers, "RETRY_PAUSES", (0.01, 0.02))
    # A config names the class in the module of this name, which is another one than this.
    broken = importlib.import_module("test_loggers").Broken
    broken.got, broken.fails = [], 3
    log = log_of(tmp_path, config_of("test_loggers.Broken"))
    log.start(0)
    for step in range(4):
        write(log, step, accuracy=0.5)
    end = time.monotonic() + 10
    while broken.got != [0, 1, 2, 3]:
        assert time.monotonic() < end, broken.got
        time.sleep(0.01)
    log.close()
    said = capsys.readouterr().out
    assert said.count("Broken failed and is tried again: ConnectionError: the server is gone") == 1
    assert said.count("Broken works again") == 1
    assert broken.got == [0, 1, 2, 3, -1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_logger_that_fails_for_a_week_holds_no_more_than_a_few_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "MAX_WAITING_CALLS", 5)
    monkeypatch.setattr(loggers, "RETRY_PAUSES", (0.01, 0.02))
    broken = importlib.import_module("test_loggers").Broken
    broken.got, broken.fails = [], 10**9
    background = loggers.BackgroundLogger("it", broken, loggers.LoggedRun(tmp_path, 0, "", {}), print)
    for _ in range(100):
        background.write(1, {})
    assert len(background._calls) == 5
    background.close()
    said = capsys.readouterr().out
    assert "it has not got 100 of its records" in said
    assert "works again" not in said


def test_a_logger_that_hangs_neither_delays_a_step_nor_keeps_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(loggers, "SILENT_SECONDS", 0.05)
    log, began = log_of(tmp_path, config_of("test_loggers.Stuck")), time.monotonic()
    log.start(0)
    write(log, 0, accuracy=0.5)
    time.sleep(0.1)
    for step in (1, 2):
        write(log, step, accuracy=0.5)
    log.close()
    assert time.monotonic() - began < 5
    said = capsys.readouterr().out
    assert said.count("test_loggers.Stuck has not answered for 0.05 s") == 1
    assert "test_loggers.Stuck did not end within 0.2 s" in said


@pytest.mark.parametrize("ignores_samples", [False, True])
def test_a_logger_without_completions_does_not_seem_to_work_by_them(monkeypatch, ignores_samples):
    monkeypatch.setattr(loggers, "RETRY_PAUSES", (0.001, 0.001))
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 1.0)
    lines, tries = [], []

    class Away:
        def write(self, step, numbers):
            tries.append(step)
            raise OSError("gone")

        def close(self):
            pass

    if ignores_samples:
        monkeypatch.setattr(Away, "write_samples", lambda *_: None, raising=False)
    background = loggers.BackgroundLogger("away", lambda run: Away(), None, lines.append)
    for step in (1, 2):
        background.write(step, {})
        background.write_samples(step, [])
    end = time.monotonic() + 10
    while len(tries) < 2 * loggers.MAX_TRIES and time.monotonic() < end:
        time.sleep(0.01)
    background.close()
    assert len(lines) == 2 and "failed" in lines[0] and "2 of its records" in lines[1], lines


def test_a_logger_that_fails_after_the_end_is_not_said_to_be_tried_again(monkeypatch):
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.1)
    lines, failed = [], threading.Event()

    def late(run):
        time.sleep(0.3)
        failed.set()
        raise OSError("gone")

    background = loggers.BackgroundLogger("late", late, None, lines.append)
    background.write(0, {})
    background.close()
    assert failed.wait(5)
    background._thread.join(5)
    assert len(lines) == 1 and "jaxrl log WORKDIR --send late" in lines[0]


@pytest.mark.parametrize(
    ("field", "names", "project"),
    [
        ("config.log.to 'tensorbord'", ("tensorbord",), ""),
        ("config.log.to", ("tensorboard", "tensorboard"), ""),
        pytest.param("config.log.project", ("wandb",), "", marks=pytest.mark.needs("wandb")),
        pytest.param("config.log.project = 'lab/sums'", ("wandb",), "lab/sums", marks=pytest.mark.needs("wandb")),
        ("config.log.project = 'lab'", ("tensorboard",), "lab"),
        ("config.log.project = 'lab'", (), "lab"),
    ],
)
def test_wrong_names_are_refused(field, names, project, refused):
    with refused(field):
        recipes.read(config_of(*names, project=project))
