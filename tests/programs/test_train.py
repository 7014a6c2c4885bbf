"""Whole runs of the training loop, as a person starts them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from fake_hub import online  # noqa: F401 (a fixture)
from huggingface_hub import ModelCard
from tiny import SMALL

from jaxrl_llm import evaluate, sft, train
from jaxrl_llm.config.load import parse_arguments
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine.compilation import Compilations, Program
from jaxrl_llm.rollout.jax.compiled import programs_of
from jaxrl_llm.tools import export, log

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "jaxrl_llm/assets"
TINY = [
    "--config.num_steps=4", "--config.optim.warmup_steps=2", "--config.optim.decay=constant",
    "--config.prompts_per_step=8", "--config.prompts_per_update=4", "--config.epochs=2",
    "--config.microbatch=2", "--config.group_size=4", "--config.eval.every=2", "--config.eval.problems=32",
    "--config.checkpoint.every=2", "--config.log.completions_every=2", "--config.mesh.data=2", "--config.mesh.fsdp=1",
    "--config.health.self_test=False", f"--config.model.path={SMALL}",
]  # fmt: skip


IN_PROCESS = "--config.reward.timeout=0.0"  # rewards


def command(workdir: Path, *extra: str, config: str = "configs/grpo.py", module: str = "train") -> list[str]:
    return [sys.executable, "-m", f"jaxrl_llm.{module}", "--config", config, "--workdir", str(workdir), *extra]


def run(*args, **kwargs) -> subprocess.CompletedProcess[str]:
    told = dict(capture_output=True, text=True, timeout=600)
    return subprocess.run(command(*args, **kwargs), cwd=ROOT, **told)


def call(program, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Runs a program in this process."""
    monkeypatch.setattr(sys, "argv", [program.__name__, *arguments])
    program.main()


def run_here(workdir: Path | str, *flags: str, config: str) -> None:
    """Runs `jaxrl train` in this process, because a new one takes time. The workdir may be in a bucket."""
    given = parse_arguments("train", "", ["--config", str(ROOT / config), "--workdir", str(workdir), *flags])
    for _ in train.steps(given.config, given.workdir):
        pass


def train_here(workdir: Path, *flags: str, config: str) -> list[dict]:
    """Runs `jaxrl train` in this process, and returns its records."""
    run_here(workdir, *flags, config=config)
    return records(workdir)


def records(workdir: Path) -> list[dict]:
    """metrics.jsonl without what may differ between two equal runs: wall-clock time."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "tokens_per_second"} for r in lines]


def beginning(workdir: Path) -> str:
    """The log up to the last checkpoint, wall-clock time and all: what a run that is resumed leaves as it is."""
    last = max((int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()), default=-1)
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    whole = (line for line in lines if line.endswith("\n"))  # one that a kill tore does not
    return "".join(line for line in whole if json.loads(line)["step"] <= last)


def log_of(workdir: Path) -> str:
    return (workdir / "metrics.jsonl").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The workdir of an uninterrupted run."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train_here(workdir, *TINY, IN_PROCESS, config="configs/grpo.py")
    return workdir


def test_a_run_leaves_everything_it_promises(whole):
    names = {path.name for path in whole.iterdir()}
    assert {"config.json", "metrics.jsonl", "completions.jsonl", "tensorboard", "checkpoints", "hf"} <= names
    steps = records(whole)
    assert [r["step"] for r in steps] == list(range(5))
    promised = {"reward/mean", "loss/policy", "kl/ref", "entropy", "clip/fraction", "grad_norm", "sampler/gap_max"}
    assert all(promised <= set(r) for r in steps[1:])
    assert [r["step"] for r in steps if "eval/accuracy" in r] == [0, 2, 4]
    assert json.loads((whole / "config.json").read_text())["group_size"] == 4
    assert (whole / "hf" / "model.safetensors").is_file()
    shown = [json.loads(line) for line in completions(whole).splitlines()]
    assert [line["step"] for line in shown] == [1, 2, 4]
    events = b"".join(file.read_bytes() for file in (whole / "tensorboard").iterdir())
    assert events.count(b"completions/text_summary") == 3
    assert all(f"\n    {line['completions'][0].splitlines()[0]}".encode() in events for line in shown)
    # The first update is on-policy.
    assert steps[1]["kl/ref"] < 1e-2
    assert steps[1]["sampler/gap_max"] < 1e-4


def test_a_run_ends_with_a_card_and_a_checkpoint_goes_to_a_hub_with_its_own(whole, monkeypatch, online):  # noqa: F811
    card, logged = ModelCard.load(whole / "hf" / "README.md"), {r["step"]: r for r in records(whole)}
    assert (card.data.library_name, card.data.base_model) == ("transformers", None)  # it is a folder of this package
    assert card.data.eval_results[0].metric_value == round(logged[4]["eval/accuracy"], 4)
    assert "after step 4 of 4" in card.text
    assert f"| 4 | {logged[4]['eval/accuracy']:.1%} | {logged[4]['reward/mean']:.3f} |" in card.text
    assert '"prompts_per_step": 8' in card.text
    assert str(ROOT) not in card.content
    host = json.loads(next((whole / "checkpoints" / "4").glob("notes/*")).read_text())["began_with"]
    assert f"SHA-256 `{host['data.source']}`" in card.text
    assert f"SHA-256 `{host['eval.source']}`" in card.text
    fake = online()
    call(export, monkeypatch, str(whole), "--step", "2", "--push-to", "lab/sums", "--private")
    (created,) = fake.created
    assert (created["organization"], created["name"], created["visibility"]) == ("lab", "sums", "private")
    assert fake.tokens == {"Bearer hf_of_the_test"}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(fake.files)
    assert fake.files["model.safetensors"] != (whole / "hf" / "model.safetensors").read_bytes()  # step 2 is not step 4
    pushed = fake.files["README.md"].decode()
    assert 'pipeline("text-generation", "lab/sums")' in pushed
    assert "after step 2 of 4" in pushed
    assert "| 2 | " in pushed
    assert "| 4 | " not in pushed


def test_running_a_finished_run_again_changes_no_number(whole):
    before = records(whole)
    assert train_here(whole, *TINY, IN_PROCESS, config="configs/grpo.py") == before


def test_compile_only_compiles_the_programs_of_the_run_and_writes_no_run(whole, tmp_path, monkeypatch, capsys):
    compile, from_cache = Program.compile, Counter[str]()

    def count(program: Program, *given: int) -> object:
        before = compilations.from_cache
        compiled = compile(program, *given)
        from_cache[program.phase] += compilations.from_cache - before
        return compiled

    monkeypatch.setattr(Program, "compile", count)
    monkeypatch.chdir(tmp_path)
    programs_of.cache_clear()  # the run `whole` has compiled the sampler's programs in this process
    with closing(Compilations()) as compilations:
        call(train, monkeypatch, "--config", str(ROOT / "configs/grpo.py"), "--compile-only", *TINY, IN_PROCESS)
    # The cache has the programs of the run `whole`: another program than the run's would not be there.
    assert {phase for phase, count in from_cache.items() if count} >= {"prompts", "decoding", "scoring", "update"}
    *lines, total = [line for line in capsys.readouterr().out.splitlines() if line.lstrip()[:1].isdigit()]
    assert len(lines) >= 6 and total.endswith(f"  {len(lines)} programs")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_any_checkpoint_is_exported_and_evaluated(whole, monkeypatch, tmp_path, capsys, refused):
    logged = {r["step"]: r["eval/accuracy"] for r in records(whole) if "eval/accuracy" in r}
    call(export, monkeypatch, str(whole), "--to", str(tmp_path / "last"))
    assert (tmp_path / "last/model.safetensors").read_bytes() == (whole / "hf/model.safetensors").read_bytes()
    capsys.readouterr()
    accuracy = []
    for step in ("4", "best"):
        call(evaluate, monkeypatch, "--run", str(whole), "--step", step)
        printed = capsys.readouterr()
        accuracy.append(printed.out.split("accuracy")[1].split()[0])
        assert ("--step best" in printed.err) == (step == "best")
    assert accuracy == [f"{logged[4]:.1%}", f"{max(logged[2], logged[4]):.1%}"]
    with pytest.raises(UserError, match="--step 1"):
        call(export, monkeypatch, str(whole), "--step", "1", "--to", str(tmp_path / "other"))
    with refused("--to"):
        call(export, monkeypatch, str(whole), "--to", str(tmp_path / "last"))
    assert not (tmp_path / "other").exists()


def test_the_log_of_a_run_is_sent_to_a_tracker_later(whole, tmp_path, monkeypatch, refused):
    for name in ("config.json", "metrics.jsonl", "completions.jsonl"):
        shutil.copy(whole / name, tmp_path)
    call(log, monkeypatch, str(tmp_path), "--send", "tensorboard")
    sent, written = (
        b"".join(file.read_bytes() for file in (folder / "tensorboard").iterdir()) for folder in (tmp_path, whole)
    )
    names = [b"completions/text_summary", b"reward/mean", b"eval/accuracy"]
    assert [sent.count(name) for name in names] == [written.count(name) for name in names] == [3, 4, 3]
    with refused("--send 'nobody'"):
        call(log, monkeypatch, str(tmp_path), "--send", "nobody")
    with refused("config.log.project = 'lab'"):
        call(log, monkeypatch, str(tmp_path), "--send", "tensorboard", "--project", "lab")


def completions(workdir: Path) -> str:
    return (workdir / "completions.jsonl").read_text()


def kill_after(process: subprocess.Popen, seconds: float) -> bool:
    """kill -9 after a while; False if the run had ended by itself."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def start(workdir: Path, *extra: str, **kwargs) -> subprocess.Popen:
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    words = command(workdir, *extra, **kwargs)
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True, **quiet)


def wait_for_step(workdir: Path, step: int, process: subprocess.Popen) -> None:
    file = workdir / "metrics.jsonl"
    while process.poll() is None and not (file.is_file() and f'"step": {step},' in file.read_text()):
        time.sleep(0.02)


# Lines of a config, further fields, and what some record has if all of it is at work.
COMBINED = {
    "a critic, a moving reference and an adaptive coefficient": (
        ["c = ppo.get_config()"],
        ["critic.warmup_steps=2", "critic.optim.warmup_steps=2", "kl.refresh.every=2", "kl.refresh.mix=0.5",
         "kl.adaptive.target=0.01", "eval=none", "microbatch=0"],
        {"critic/explained_variance", "kl/coef"},
    ),
    "images of a mixture, sampled ahead and resampled, and rewards that set alarms": (
        ["c = pictures.get_config()",
         "part = lambda name, weight: dict(source=f'digits_in_pictures.{name}', convert='', weight=weight)",
         "c.data.source, c.data.mixture = '', ConfigDict(dict(one=part('train', 1.0), two=part('held_out', 2.0)))",
         "c.advantage = gdpo.get_config().advantage"],
        [f"model.path={ASSETS}/pictures",
         "rollout.max_lag=1", "rollout.resample_rounds=2", "checkpoint.every=1", "eval.every=5", "eval.problems=8",
         "epochs=1", "prompts_per_step=4", "eval.function=tests.tiny.alarmed", "reward.weights=(1.0,0.5)",
         "reward.functions=('digits_in_pictures.accuracy','tests.tiny.alarmed')"],
        {"rollout/lag", "groups/replaced"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("lines", "fields", "signs"), COMBINED.values(), ids=COMBINED)
def test_a_killed_run_resumes_bit_for_bit_with(lines, fields, signs, tmp_path):
    (tmp_path / "combined.py").write_text(
        "from ml_collections import ConfigDict\n"
        "from jaxrl_llm.configs import gdpo, pictures, ppo\n"
        "def get_config():\n" + "".join(f"    {line}\n" for line in [*lines, "return c"])
    )
    arguments = [*TINY, "--config.num_steps=5", *(f"--config.{field}" for field in fields)]
    config = str(tmp_path / "combined.py")
    whole = train_here(tmp_path / "whole", *arguments, config=config)
    process = start(tmp_path / "killed", *arguments, config=config)
    wait_for_step(tmp_path / "killed", 3, process)
    assert kill_after(process, random.uniform(0, 0.1))
    before = beginning(tmp_path / "killed")
    assert train_here(tmp_path / "killed", *arguments, config=config) == whole
    assert log_of(tmp_path / "killed").startswith(before)
    assert signs <= {name for record in whole for name, number in record.items() if number}
    weights = [(tmp_path / w / "hf" / "model.safetensors").read_bytes() for w in ("killed", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_run_killed_at_many_random_moments_resumes_bit_for_bit(whole, tmp_path):
    workdir, kills = tmp_path / "run", 0
    for i, step in enumerate(sorted(random.choices(range(4), k=4))):
        process = start(workdir, *TINY)
        wait_for_step(workdir, step, process)  # at once, if an earlier run got there: then the start is what is hit
        kills += kill_after(process, random.uniform(0, 8 if i else 0.3))
    assert kills
    before = beginning(workdir)
    with (workdir / "metrics.jsonl").open("a") as log:
        log.write('{"step": 5, "rew')  # a line that a kill tore
    assert train_here(workdir, *TINY, config="configs/grpo.py") == records(whole)
    assert log_of(workdir).startswith(before)
    assert completions(workdir) == completions(whole)
    weights = [(w / "hf" / "model.safetensors").read_bytes() for w in (workdir, whole)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_sigterm_before_the_first_step_and_on_a_finished_run_exits_0(whole, tmp_path):
    process = start(tmp_path / "run", *TINY)
    while process.poll() is None and not (tmp_path / "run").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert not list(tmp_path.glob("run/checkpoints/*"))  # it ends where it is, here while it loads
    again = start(whole, *TINY)
    time.sleep(6)
    again.send_signal(signal.SIGTERM)
    assert again.wait(timeout=60) in (0, -signal.SIGTERM)  # the latter only while Python still imports
    assert (whole / "hf" / "model.safetensors").is_file()


@pytest.mark.slow
def test_sft_makes_a_model_from_nothing(tmp_path, monkeypatch):
    sizes = ["--config.model.hidden_size=32", "--config.model.intermediate_size=64"]
    sizes += ["--config.model.num_hidden_layers=2"]
    small = ["--config.num_steps=4", "--config.optim.warmup_steps=0", "--config.prompts_per_step=16"]
    small += ["--config.eval.every=4", "--config.eval.problems=32"]
    call(sft, monkeypatch, *command(tmp_path / "sft", *small, *sizes, config=str(ROOT / "configs" / "sft.py"))[3:])
    losses = [r["loss/sft"] for r in records(tmp_path / "sft") if r["step"]]  # at 0 there is an accuracy alone
    assert losses[-1] < losses[0]
