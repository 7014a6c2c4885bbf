"""What README, docs, configs and docstrings show can be run: each command, and each benchmark in its smallest form."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import pytest
from conftest import QUICK
from ml_collections import ConfigDict
from tiny import SMALL

from benchmarks.real import tasks
from benchmarks.speed import accelerator, ours
from benchmarks.speed.step import environment
from benchmarks.speed.workloads import WORKLOADS
from jaxrl_llm import train
from jaxrl_llm.config import load as configs
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, hf_export, new_model
from jaxrl_llm.tools.__main__ import PROGRAMS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(page for page in (ROOT / "docs").glob("*.md") if page.name != "LOG.md"),  # a diary: some programs have left
    *(page for folder in ("configs", "benchmarks", "jaxrl_llm") for page in (ROOT / folder).rglob("*.py")),
    *(page for page in (ROOT / "launch").iterdir() if page.is_file()),
]
COMMAND = re.compile(
    r"(?:python3? -m (?P<module>(?:jaxrl_llm|benchmarks)(?:\.\w+)+)|\bjaxrl (?P<tool>[a-z][\w-]+))(?P<rest>[^`\n]*)"
)
PEERS = {  # what imports TRL or Tunix, with the environment that `benchmarks.speed.step` makes for it
    "benchmarks.health.trl_logs": "trl",
    "benchmarks.health.trl_real_logs": "trl",
    "benchmarks.speed.peer_trl": "trl",
    "benchmarks.speed.peer_tunix": "tunix",
}


def commands() -> list[tuple[str, str, str]]:
    """Returns (page, module, arguments) of every command that is shown."""
    shown = set()
    for page in PAGES:
        text = re.sub(r"\\+\n\s*(?:# )?", " ", page.read_text())  # one that goes on in the next line
        for match in COMMAND.finditer(text):
            module = match["module"] or PROGRAMS[match["tool"]][0]
            shown.add((str(page.relative_to(ROOT)), module, match["rest"].split(" # ")[0].strip()))
    return sorted(shown)


class Parsed(Exception):
    """Carries the parser of a program, in place of what the program does next."""


def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
    raise Parsed(parser)


@cache
def options(module: str) -> set[str]:
    """Returns the options of a program."""
    main = importlib.import_module(module if module.count(".") else f"{module}.__main__")
    run: Callable[[], None] = main.main if hasattr(main, "main") else importlib.import_module(f"{module}.__main__").main
    with pytest.MonkeyPatch.context() as patch, suppress(SystemExit):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        patch.setattr(sys, "argv", [module])
        with pytest.raises(Parsed) as caught:
            run()
    return {option for action in caught.value.args[0]._actions for option in action.option_strings}


def wrong(module: str, rest: str) -> Iterator[str]:
    """Yields what a program refuses in a command."""
    given = re.findall(r"(?<![\w-])--[a-z][\w-]*(?:\.[\w.]+=(?:'[^']*'|\S*))?", rest)
    file = re.search(r"configs/[\w/]+\.py", rest)
    config = configs.load(ROOT / (file[0] if file and (ROOT / file[0]).is_file() else "configs/grpo.py"))
    for option in given:
        name, _, value = option.partition("=")
        if option == "--config." or not name.startswith("--config."):
            if name.rstrip(".") not in options(module):
                yield f"no option {name}"
        elif not re.fullmatch(r"[A-Z]+|value\W*|.*\.\.\.", value):  # a place for the reader's own value
            try:
                configs.override(config, name.removeprefix("--config."), value.strip("'"))
            except UserError as error:
                yield str(error)
    for path in re.findall(r"(?:--config |^)(configs/[\w/]+\.py)", rest):
        if not (ROOT / path).is_file() and "translate" not in module:
            yield f"no file {path}"


MODULES = {module.removesuffix(".__main__"): name for name, (module, _) in PROGRAMS.items()}
AS_MODULES = {  # pages that say where a module is started as one, beside those of launch/
    "docs/configs.md": "train",
    "docs/vllm.md": "serve-vllm",  # in an environment without this package
    "jaxrl_llm/rollout/vllm/managed_server.py": "serve-vllm",
}


def test_every_program_is_shown_in_one_form_and_exists():
    tools, modules = set(), {}
    for page in PAGES:
        if page.parent.name != "launch":
            for match in COMMAND.finditer(page.read_text()):
                tools |= {match["tool"]} - {None}
                if match["module"] in MODULES:
                    modules[str(page.relative_to(ROOT))] = MODULES[match["module"]]
    assert tools == set(PROGRAMS)
    assert modules.items() <= AS_MODULES.items()


@pytest.mark.slow
def test_every_command_that_is_shown_is_one_that_its_program_accepts():
    # test_docs_commands reads those of `jaxrl` on the pages.
    shown = [x for x in commands() if x[1] not in PEERS and not (x[0].endswith(".md") and x[1].startswith("jaxrl_llm"))]
    assert len(shown) > 100
    refused = [(page, module, what) for page, module, rest in shown for what in wrong(module, rest)]
    assert refused == [], "\n".join(map(str, refused))


TINY = {
    "num_steps": 2, "optim.warmup_steps": 0, "prompts_per_step": 4, "prompts_per_update": 4, "group_size": 2,
    "eval.problems": 8, "mesh.fsdp": 1, "health.self_test": False, "model.path": str(SMALL),
    "reward.timeout": 0.0,  # the functions run in this process, and not in one that imports for two seconds
}  # fmt: skip
FLAGS = tuple(f"--config.{name}={value}" for name, value in TINY.items())


@pytest.fixture
def lora_run(tmp_path) -> Path:
    """The workdir of a run with a base in int8."""
    config = configs.load(ROOT / "configs" / "lora.py")
    changes = {"num_steps": 1, "eval": None, "checkpoint.keep_best": 0, "log.to": (), "adapters.base_dtype": "int8"}
    config.update_from_flattened_dict(TINY | changes)
    for _ in train.steps(config, tmp_path / "lora"):
        pass
    return tmp_path / "lora"


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
    start_process = module.measured

    def measured(command: list[str], log: Path, cache: Path | str = "") -> tuple[float, float]:
        if command[0] != sys.executable:
            return start_process(command, log, cache)
        began = time.perf_counter()
        log.write_text(str(subprocess.run(command, check=True).stdout))
        return time.perf_counter() - began, 1.0

    patch.setattr(module, "measured", measured)
    return ["--quick", "--out", str(folder), *(f"--config.{name}={value}" for name, value in changes.items())]


def small_kinds(patch: pytest.MonkeyPatch, module: Any, folder: Path) -> list[str]:
    patch.setattr(module, "DOC", Path(shutil.copy(module.DOC, folder)))
    patch.setattr(module, "KINDS", dict(list(module.KINDS.items())[:2]))
    patch.setattr(module, "get_context", lambda _: SimpleNamespace(Pool=partial(ThreadPool, 1)))  # no imports
    return ["--seeds", "1"]


def with_fields(config: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    config.update_from_flattened_dict(changes)
    return config


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
        "CONFIG": lambda config: replace(config, layers=1, width=32, heads=2, kv_heads=1, mlp_width=8, vocab_size=64),
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
    "health.kinds": small_kinds,
    "health.overhead": ["--config", "configs/grpo.py", *FLAGS],
    "speed.paged_attention": ["--heads", "1"],
    "speed.picture_layout": ["--group", "2", "--tokens", "4", "--repetitions", "1"],
    "real.__main__": small_real,
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
    "speed.accelerator", "health.algorithms", "speed.limits", "real.__main__", "health.rolled_pictures", "speed.step",
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
def test_the_benchmark_of_an_int8_base_runs(lora_run, monkeypatch, capsys):
    run_smallest("health.int8_base", [str(lora_run)], lora_run, monkeypatch)
    assert "of a log-probability on average" in capsys.readouterr().out


@pytest.mark.vllm
def test_the_benchmark_of_a_push_runs(tmp_path, monkeypatch, capsys):
    run_smallest("speed.push", ["--times", "1", "--largest", "1"], tmp_path, monkeypatch)
    assert "GB/s" in capsys.readouterr().out


def timed_by_step(trainer: str, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    patch.delenv("JAX_NUMPY_RANK_PROMOTION")  # a rule of ours, which Tunix breaks
    flags = ["--workloads", "tiny", "--trainers", trainer, "--steps", "1", "--out", str(folder / "step.json")]
    run_smallest("speed.step", flags, folder, patch)
    assert re.search(rf"tiny {trainer}: [\d.]+s a step", capsys.readouterr().out)


@pytest.mark.parity
@pytest.mark.parametrize("trainer", ["trl", "tunix"])
def test_a_peer_is_timed_in_an_environment_of_its_own(trainer, tmp_path, monkeypatch, capsys):
    timed_by_step(trainer, tmp_path, monkeypatch, capsys)


@pytest.mark.vllm
def test_vllm_is_timed_in_its_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # vLLM compiles nothing, which takes longer than the rest of its start
    timed_by_step("vllm", tmp_path, monkeypatch, capsys)


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
def test_a_log_of_trl_is_made(tmp_path):
    program = [environment("trl"), "-m", "benchmarks.health.trl_logs", tmp_path, "--only", "healthy", "--rollouts", "2"]
    assert "healthy: 3 rows" in subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parity
def test_a_log_of_trl_on_a_folder_of_a_model_is_made(tmp_path):
    model = ROOT / "jaxrl_llm" / "assets" / "arithmetic"
    words = ["benchmarks.health.trl_real_logs", model, tmp_path, "--only", "constant_reward", "--rollouts", "2"]
    program = [environment("trl"), "-m", *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "constant_reward: 3 rows" in done.stdout
    assert len(json.loads((tmp_path / "constant_reward.json").read_text())) == 3


@pytest.mark.parity
@pytest.mark.parametrize("module", PEERS)
def test_a_command_that_is_shown_for_a_peer_is_one_that_its_program_accepts(module):
    program = [environment(PEERS[module]), "-m", module, "--help"]
    known = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    shown = {flag for _, name, rest in commands() if name == module for flag in re.findall(r"(?<![\w-])--\w+", rest)}
    assert [flag for flag in sorted(shown) if flag not in known] == []


@pytest.mark.tpu
def test_the_check_of_a_plan_runs(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run_smallest("scale.plan_check", small_plan_check, tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert ended.value.code == 0 and out.count("differs on: nothing") == 1, out


def test_every_benchmark_has_a_smallest_form():
    peers = {"trl_logs", "trl_real_logs", "peer_trl", "peer_trl_accelerator", "peer_tunix", "peer_vllm"}
    tested = {*(name.rpartition(".")[2] for name in SMALLEST), *peers, "ill_runs", "int8_base", "push", "plan_check"}
    # Of other benchmarks, without a command.
    parts = {"ours", "workloads", "alarm_runs", "judging", "simulated", "studies"}
    programs = {file.stem for file in (ROOT / "benchmarks").glob("*/*.py") if file.parent.name != "real"}
    programs |= {"__main__", "stability"}  # of benchmarks/real
    assert programs == {*tested, *parts}
