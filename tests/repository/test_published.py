"""Each benchmark can be run: in its smallest form."""

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from conftest import QUICK
from ml_collections import ConfigDict
from test_docs_commands import shown_commands
from tiny import SMALL

from benchmarks.real import tasks
from benchmarks.speed import accelerator, ours
from benchmarks.speed.step import environment
from benchmarks.speed.workloads import WORKLOADS
from jaxrl_llm import train
from jaxrl_llm.config import load as configs
from jaxrl_llm.models import hf, hf_export, new_model

ROOT = Path(__file__).parents[2]
PEERS = {  # what imports TRL or Tunix, with the environment that `benchmarks.speed.step` makes for it
    "benchmarks.health.trl_logs": "trl",
    "benchmarks.health.trl_real_logs": "trl",
    "benchmarks.speed.peer_trl": "trl",
    "benchmarks.speed.peer_tunix": "tunix",
}


TINY = {
    "num_steps": 2, "optim.warmup_steps": 0, "prompts_per_step": 4, "prompts_per_update": 4, "group_size": 2,
    "eval.problems": 8, "mesh.fsdp": 1, "health.self_test": False, "model.path": str(SMALL),
    "reward.timeout": 0.0,  # the functions run in this process, and not in one that imports for two seconds
}  # fmt: skip
FLAGS = tuple(f"--config.{name}={value}" for name, value in TINY.items())


def small_int8(patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    """Of a run with a base in int8."""
    config = configs.load(ROOT / "configs" / "lora.py")
    changes = {"num_steps": 1, "eval": None, "checkpoint.keep_best": 0, "log.to": (), "adapters.base_dtype": "int8"}
    config.update_from_flattened_dict(TINY | changes)
    list(train.steps(config, folder / "lora"))
    return [str(folder / "lora")]


def small_alarms(patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    from benchmarks.health import alarm_runs

    patch.setattr(alarm_runs, "HEALTHY", {"tiny": alarm_runs.Healthy("grpo", TINY)})
    patch.setattr(module, "HEALTHY", alarm_runs.HEALTHY)
    return ["--runs", str(folder), "--make-runs", "--only", "healthy-tiny"]


def small_study(name: str, patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    """Of a benchmark of stability: two steps of one of its studies."""
    changes = dict(common=TINY | {"eval.every": 2}, columns=(("end", module.at(2), ".1%"),))
    changes |= dict(seeds=(0,)) if name == "curve" else dict(config=ROOT / "configs" / "grpo.py", starts_from=None)
    changes |= dict(conditions=dict(list(module.STUDIES[name].conditions.items())[:2]))
    patch.setattr(module, "STUDIES", {name: replace(module.STUDIES[name], **changes)})
    (folder / "page.md").write_text(module.PAGE.read_text())
    patch.setattr(module, "PAGE", folder / "page.md")
    return ["--runs", str(folder), "--only", name]


def small_step(patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    patch.setattr(ours, "SIDE", 64)
    return ["--workloads", "tiny", "--trainers", "ours", "--steps", "1", "--out", str(folder / "step.json")]


def small_scaling(patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    tiny = replace(WORKLOADS["tiny"], prompts=8, prompt_tokens=64)  # two micro-batches need so many prompts
    patch.setattr(module, "DOUBLED", {"base": tiny})
    patch.setattr(module, "GROUP", tiny)  # its shorter run is that of the base
    patch.setattr(module, "FLAT", replace(tiny, prompts=32, group=1))
    patch.setattr(module, "medians", cache(module.medians))
    return ["--steps", "1"]


def small_plan_check(patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    patch.setattr(module, "STEPS", [("v5e:1x1", 4, {"prompts_per_step": 4, "prompts_per_update": 4, "group_size": 2})])
    patch.setattr(module, "make_folder", lambda *_: ROOT / "jaxrl_llm" / "assets" / "arithmetic")
    patch.setattr(module, "WIDTH", 16)
    patch.setattr(module, "USUAL", module.USUAL | {"rollout.max_completion_tokens": 16})
    patch.setattr(module, "CLOSE", 0.0)  # asks the compiler about every program, however small
    patch.setattr(module, "BESIDE", 0.0)
    return []


def small_accelerator(patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    config = json.loads((ROOT / "jaxrl_llm" / "assets" / "qwen2_5_0_5b" / "config.json").read_text())
    config |= {"hidden_size": 28, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    changes = {"num_steps": 2, "prompts_per_step": 4, "prompts_per_update": 4, "rollout.max_completion_tokens": 8}
    return ["--families", "llama", "--sizes", str(folder), *(f"--config.{name}={x}" for name, x in changes.items())]


def small_real(patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    # The embedded model cannot write the questions.
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    new_model.write_folder(folder / "bare", sizes | {"intermediate_size": 16}, tasks.addition(), "answer")
    model = hf.load_model(folder / "bare")
    hf_export.save(folder / "model", model.init(jax.random.key(0)), folder / "bare")
    changes = TINY | {"microbatch": 4, "model.path": folder / "model", "rollout.max_completion_tokens": 4}
    changes |= {"data.max_prompt_tokens": 128, "eval.every": 2}  # 128: of a tokenizer of single bytes
    return ["--quick", "--out", str(folder), *(f"--config.{name}={value}" for name, value in changes.items())]


def small_kinds(patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    patch.setattr(module, "DOC", Path(shutil.copy(module.DOC, folder)))
    patch.setattr(module, "KINDS", dict(list(module.KINDS.items())[:2]))
    patch.setattr(module, "get_context", lambda _: SimpleNamespace(Pool=partial(ThreadPool, 1)))  # no imports
    return ["--seeds", "1"]


def with_fields(config: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    config.update_from_flattened_dict(changes)
    return config


NARROW = dict(layers=1, width=32, heads=2, kv_heads=1, mlp_width=8, vocab_size=64)
SHORT = {"group_size": 2, "mesh.fsdp": 1, "health.self_test": False, "reward.timeout": 0.0}
SIZES = {"num_steps": 3, "optim.warmup_steps": 0, "prompts_per_step": 4, "prompts_per_update": 4} | SHORT
# Names of a module, and their values instead, or what makes one of the value. FOLDER: that of the test.
PATCHES: dict[str, dict[str, Any]] = {
    "health.algorithms": {
        "RUNS": Path("FOLDER"),
        "SETTINGS": lambda settings: (*settings, *FLAGS, "--config.eval.every=2"),
    },
    "speed.episodes": {
        "SIZES": lambda sizes: (
            dict.fromkeys(sizes, 1) | {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
        ),
        **dict(B=2, G=2, P=8, C=100, TURN_TOKENS=4, OBSERVATION=10),
    },
    "scale.hosts": {"COUNTS": (1, 2), "LENGTHS": {}},
    "scale.lora_memory": {
        **dict(WORKLOADS={"even": WORKLOADS["tiny"]}, CASES=lambda cases: cases[:1]),
        "RUNS": lambda runs: {name: runs[name] for name in ("grpo", "lora, int8")},
    },
    "speed.limits": {
        "CONFIG": lambda config: replace(config, **NARROW),
        "WIDE_CONFIG": lambda config: replace(config, **NARROW),
        **dict(GROUPS=2, GROUP_SIZE=2, LONG=32),
        "load": lambda load: lambda file: with_fields(load(ROOT / file), SHORT),
    },
    "speed.picture_layout": {"MODELS": {"small": ((32, 1, 2, 1, 8), (1, 16, 2, 8), 64)}, "GRID": (8, 8)},
    "health.rescue": {
        **dict(STEPS=2, AT=1),
        "COMMON": lambda common: common | TINY | {"eval.every": 2},
        "FAULTS": lambda faults: {"wrong push": faults["wrong push"]},
    },
    "speed.replayed_steps": {"SMALL": lambda small: small | {"prompts_per_step": 4, "prompts_per_update": 4} | SHORT},
    "scale.sampler_devices": {"SETTINGS": lambda settings: settings | SIZES, "WARM": 1},
}
Small = list[str] | Callable[[pytest.MonkeyPatch, Any, Path], list[str]]
SMALLEST: dict[
    str, Small
] = {  # arguments, in which FOLDER is that of the test, or what shrinks the module and returns them
    "speed.accelerator": small_accelerator,
    "health.alarms": small_alarms,
    "health.algorithms": ["grpo", "--seeds", "0"],
    "speed.breakdown": ["tiny"],
    "health.curriculum": ["--rows", "16", "--steps", "4", "--skips", "0.5", "--seeds", "0", "--simulate"],
    "speed.episodes": [],
    "scale.hosts": [],
    "scale.lora_memory": [],
    "scale.network_pause": ["--seconds", "1"],
    "health.int8_base": small_int8,
    "health.kinds": small_kinds,
    "health.overhead": ["--config", "configs/grpo.py", *FLAGS],
    "speed.paged_attention": ["--heads", "1"],
    "speed.picture_layout": ["--group", "2", "--tokens", "4", "--repetitions", "1"],
    "real.stability": partial(small_study, "real ceiling"),
    "health.rescue": ["--seeds", "0"],
    "speed.serve": ["--sessions", "2", "--seconds", "0.5"],
    "speed.replayed_steps": ["--kinds", "grpo", "--meshes", "1", "--steps", "2", "--count", "1"],
    "speed.retriever": ["--documents", "100", "--clients", "2", "--seconds", "0.5"],
    "health.rolled_pictures": ["jaxrl_llm/assets/pictures", "--problems", "16"],
    "health.rounding": ["--lengths", "10", "--prompts", "2", "--scored", "2"],
    "scale.sampler_devices": [],
    "speed.scaling": small_scaling,
    "health.stability": partial(small_study, "curve"),
    "speed.step": small_step,
    "speed.limits": ["--times", "1", "--far", "128", "--steps", "1"],
    "speed.partial": ["--batch", "8", "--group-size", "2", "--limit", "64", "--mean", "20", "--steps", "5"],
    "speed.tokenizing": ["--rows", "50"],
    "speed.drafts": ["--calls", "1", "--tokens", "4", "--drafts", "1"],
}


# These benchmarks start processes for numbers such as a peak of memory, which nobody reads here. A process imports for
# two CPU seconds and traces all its programs again, so their commands run in this process.
IN_THIS_PROCESS = (
    "speed.accelerator", "health.algorithms", "speed.limits", "health.rolled_pictures", "speed.step",
    "speed.tokenizing",
)  # fmt: skip


def run_commands_here(patch: pytest.MonkeyPatch) -> None:
    """Lets `subprocess.run` run a command of this Python in this process: `-m MODULE`, `-c TEXT` or a script."""
    start_process = subprocess.run

    def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
        python, *words = map(str, command)
        if python != sys.executable:
            return start_process(command, **options)
        printed, code = io.StringIO(), 0
        with redirect_stdout(printed), pytest.MonkeyPatch.context() as scope:
            if words[0] == "-c":
                exec(words[1], {})
                return subprocess.CompletedProcess(command, 0, printed.getvalue(), "")
            for name, value in options.get("env", {}).items():
                scope.setenv(name, str(value))
            module, *arguments = words[words[0] == "-m" :]
            script = Path(module).with_suffix("")
            scope.setattr(sys, "argv", [module, *arguments])
            try:
                name = ".".join(script.relative_to(ROOT).parts) if script.is_absolute() else module
                importlib.import_module(name).main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        if code and options.get("check"):
            raise subprocess.CalledProcessError(code, command, printed.getvalue())
        return subprocess.CompletedProcess(command, code, printed.getvalue(), "")

    patch.setattr(subprocess, "run", run)


def run_smallest(name: str, small: Small, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Runs `python -m benchmarks.NAME` in this process, with little work."""
    patch.chdir(ROOT)
    patch.setenv("XLA_FLAGS", QUICK)  # of the processes that it starts: one device, and little time to compile
    module = importlib.import_module(f"benchmarks.{name}")
    for constant, small_value in PATCHES.get(name, {}).items():
        value = small_value(getattr(module, constant)) if callable(small_value) else small_value
        value = folder if value == Path("FOLDER") else value
        patch.setattr(module, constant, value)
    arguments = small(patch, module, folder) if callable(small) else [x.replace("FOLDER", str(folder)) for x in small]
    patch.setattr(sys, "argv", [name, *arguments])
    if name in IN_THIS_PROCESS:
        run_commands_here(patch)
    module.main()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_in_its_smallest_form(name, tmp_path, monkeypatch, capsys):
    run_smallest(name, SMALLEST[name], tmp_path, monkeypatch)
    assert re.search(r"\d", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.needs("matplotlib")
def test_the_benchmark_of_a_real_model_runs_and_keeps_what_has_ended(tmp_path, monkeypatch, capsys):
    run_smallest("real.__main__", small_real, tmp_path, monkeypatch)
    (file,) = tmp_path.glob("*/ours_0.json")
    kept = json.loads(file.read_text())
    assert [record["step"] for record in kept["records"]] == [0, 1, 2] and kept["peak_mb"] > 100
    assert file.parent.with_suffix(".png").stat().st_size > 5000
    kept["records"][-1]["eval/accuracy"] = 0.875
    file.write_text(json.dumps(kept))
    capsys.readouterr()
    importlib.import_module("benchmarks.real.__main__").main()
    assert "87.5%" in capsys.readouterr().out


@pytest.mark.vllm
def test_the_benchmark_of_a_push_runs(tmp_path, monkeypatch, capsys):
    run_smallest("speed.push", ["--times", "1", "--largest", "1"], tmp_path, monkeypatch)
    assert "GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param("trl", marks=pytest.mark.parity),
        pytest.param("tunix", marks=pytest.mark.parity),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def test_a_peer_is_timed_in_an_environment_of_its_own(trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # vLLM compiles nothing, which takes longer than the rest of its start
    monkeypatch.delenv("JAX_NUMPY_RANK_PROMOTION")  # a rule of ours, which Tunix breaks
    flags = ["--workloads", "tiny", "--trainers", trainer, "--steps", "1", "--out", str(tmp_path / "step.json")]
    run_smallest("speed.step", flags, tmp_path, monkeypatch)
    assert re.search(rf"tiny {trainer}: [\d.]+s a step", capsys.readouterr().out)


@pytest.mark.parity
def test_trl_does_the_same_work_in_the_benchmark_of_a_real_model(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("JAX_NUMPY_RANK_PROMOTION")
    words = ["--case", "plain_addition", "--trl", "2"]
    run_smallest("real.__main__", lambda *given: small_real(*given) + words, tmp_path, monkeypatch)
    assert "mean seconds to 0.3" in capsys.readouterr().out


@pytest.mark.parity
def test_trl_takes_the_steps_of_the_benchmark_of_an_accelerator(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 8)
    changes = {"num_steps": 2, "prompts_per_step": 2, "group_size": 4, "rollout.max_completion_tokens": 6}
    fields = accelerator.fields(tmp_path, changes | {"model.path": str(ROOT / "jaxrl_llm" / "assets" / "arithmetic")})
    program = [environment("trl"), "-m", "benchmarks.speed.peer_trl_accelerator", json.dumps(fields)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["seconds"]) == 2 and 1 <= max(found["completion_length"]) <= 6


@pytest.mark.parity
@pytest.mark.parametrize(
    ("program", "only"),
    [(["trl_logs"], "healthy"), (["trl_real_logs", ROOT / "jaxrl_llm" / "assets" / "arithmetic"], "constant_reward")],
    ids=["embedded model", "folder of a model"],
)
def test_a_log_of_trl_is_made(program, only, tmp_path):
    module, *model = program
    words = ["-m", f"benchmarks.health.{module}", *model, tmp_path, "--only", only, "--rollouts", "2"]
    done = subprocess.run([environment("trl"), *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"{only}: 3 rows" in done.stdout


@pytest.mark.parity
@pytest.mark.parametrize("module", PEERS)
def test_a_command_that_is_shown_for_a_peer_is_one_that_its_program_accepts(module):
    program = [environment(PEERS[module]), "-m", module, "--help"]
    known = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rests = [rest for _, name, rest in shown_commands() if name == module]
    flags = {flag for rest in rests for flag in re.findall(r"(?<![\w-])--\w+", rest)}
    assert [flag for flag in sorted(flags) if flag not in known] == []


@pytest.mark.tpu
def test_the_check_of_a_plan_runs(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run_smallest("scale.plan_check", small_plan_check, tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert ended.value.code == 0 and out.count("differs on: nothing") == 1, out


def test_every_benchmark_has_a_smallest_form():
    peers = {"trl_logs", "trl_real_logs", "peer_trl", "peer_trl_accelerator", "peer_tunix", "peer_vllm"}
    tested = {*(name.rpartition(".")[2] for name in SMALLEST), *peers, "ill_runs", "push", "plan_check"}
    # Of other benchmarks, without a command.
    parts = {"ours", "workloads", "alarm_runs", "judging", "simulated", "studies"}
    programs = {file.stem for file in (ROOT / "benchmarks").glob("*/*.py") if file.parent.name != "real"}
    programs |= {"stability"}  # of benchmarks/real
    assert programs == {*tested, *parts}
