"""Wrong input: one line that names the key or file and the remedy, exit code 2, nothing written."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxrl_llm
from jaxrl_llm import evaluate, sft, train
from jaxrl_llm.config.load import parse_arguments
from jaxrl_llm.errors import run_main
from jaxrl_llm.models import hf
from jaxrl_llm.tools import serve_vllm

PACKAGE = Path(jaxrl_llm.__file__).parent
CONFIGS = PACKAGE.parent / "configs"
MODEL = PACKAGE / "assets" / "arithmetic"
SUMS = [{"prompt": [{"role": "user", "content": f"{a}+{a}"}], "answer": str(2 * a)} for a in range(8)]
TINY = (
    "num_steps=1 prompts_per_step=8 prompts_per_update=8 group_size=2 optim.warmup_steps=0 "
    "data.source=sums.jsonl eval=none log.to=() health.self_test=False"
)
SMALL = "mesh.fsdp=1 rollout.max_completion_tokens=2"  # what really runs: soon compiled

Refuse = Callable[..., None]
Change = Callable[[Path], Any]


def table(names: str, rows: dict[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Cases by the sentence that says what is wrong; their words are what the line must hold, " | " between."""
    return pytest.mark.parametrize(names.split(), list(rows.values()), ids=list(rows))


def fields(text: str) -> list[str]:
    """ "seed=1 kl.coef=0" as arguments."""
    return [f"--config.{part}" for part in text.split()]


def command(text: str = "", workdir: str = "run") -> list[str]:
    return ["--config", str(CONFIGS / "grpo.py"), "--workdir", workdir, *fields(f"{TINY} {text}")]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of those that are files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, with eight sums; a module mine.py in it can be imported."""
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)
    sys.modules.pop("mine", None)


@pytest.fixture
def refuse(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Runs an entry point that must refuse in one line that holds certain words."""

    def refuse(program: ModuleType, argv: list[str], words: str, *, started: bool = False) -> None:
        """started: the run was on its way, and may have made its workdir."""
        before = contents(place)
        monkeypatch.setattr(sys, "argv", [program.__name__, *argv])
        importlib.invalidate_caches()
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            run_main(program.main)
        said = capfd.readouterr().err
        assert stopped.value.code == 2
        assert said.startswith("error: ")
        assert said.endswith("\n")
        assert said.count("\n") == 1
        assert [word for word in words.split(" | ") if word not in said] == [], said
        assert started or contents(place) == before

    return refuse


@table("argv words", {
    "an unknown field": ("nun_steps=1", "config.nun_steps is not a field; did you mean num_steps?"),
    "a field like no other": ("optim.xyz=1", "config.optim.xyz is not a field | there is optim."),
    "an unknown section": ("optimizer.eps=1", "config.optimizer is not a section | did you mean optim.eps?"),
    "the word of another trainer":
        ("optim.lr=1e-5", "config.optim.lr is not a field | did you mean optim.learning_rate?"),
    "a name that is near no other": ("optim.b3=1", "config.optim.b3 is not a field | there is optim."),
    "a section that is not there":
        ("adapters.rank=8", "config.adapters is not a section | in a file, as the shipped config lora does"),
    "a section set like a field": ("optim=1", "config.optim is a section | set one of optim."),
    "a word for a number": ("num_steps=many", "config.num_steps is 'many': give a whole number, such as 1"),
    "a fraction for a count": ("num_steps=1.5", "config.num_steps is '1.5': give a whole number, such as 1"),
    "a number below its range": ("num_steps=0", "config.num_steps is 0 | at least 1"),
    "a number above its range": ("rollout.top_p=2.", "config.rollout.top_p is 2.0 | at most 1"),
    "a number just outside its range": ("rollout.temperature=0.", "config.rollout.temperature is 0.0 | above 0"),
    "an infinite number": ("kl.coef=1e999", "config.kl.coef is inf | finite"),
    "a choice that is not offered": ("model.dtype=float64", "config.model.dtype is 'float64' | 'float32', 'bfloat16'"),
    "an argument with a choice that is not offered":
        ("advantage.normalize=all", "config.advantage.normalize is 'all' | 'group', 'batch', 'none'"),
    "an unknown loss": ("loss.name=ppo_clap", "config.loss.name 'ppo_clap' | did you mean ppo_clip?"),
    "an argument that the loss does not take":
        ("loss.name=topr", "config.loss.clip_ | topr takes nothing; change the whole section in a file | topr does"),
    "a loss that needs other arguments": ("loss.name=gspo", "config.loss.delta | as the shipped config gspo does"),
    "a rollout that is no multiple of an update":
        ("prompts_per_step=12", "config.prompts_per_step = 12 | config.prompts_per_update = 8 | make it one"),
    "a microbatch that does not divide the update":
        ("microbatch=3", "config.microbatch = 3 | 8 prompts | give a divisor"),
    "a group of one with grpo": ("group_size=1", "config.group_size = 1 | 'grpo' | 2 or more"),
    "a penalty in the reward, divided by its own deviation":
        ("kl.placement=reward kl.estimator=k1", "config.advantage.normalize | 'none', or kl.placement to 'loss'"),
    "more steps than a schedule that ends at 0":
        ("schedule_steps=1 num_steps=2", "config.num_steps = 2 | after 1 steps"),
    "k1 in the loss": ("kl.placement=loss kl.estimator=k1", "config.kl: k1 in the loss | use k2 or k3 | 'reward'"),
    "a day that is no date": ("data.today=24.11.2026", "config.data.today is '24.11.2026': give a date such as"),
    "a helper for a loss": ("loss.name=ratio_of", "config.loss.name 'ratio_of' does not exist; there is cispo, gmpo"),
    "a KL horizon of less than an update":
        ("kl.adaptive.target=0.1 kl.adaptive.horizon=3", "config.kl.adaptive.horizon = 3 | 16 sequences"),
    "an end of a constant coefficient": ("kl.end=0.1", "config.kl.end = 0.1 | 'constant' | set it to 0.0"),
    "a move of the reference at no time": ("kl.refresh.mix=0.5", "config.kl.refresh.every is missing"),
    "a horizon without a KL target": ("kl.adaptive.horizon=9000", "config.kl.adaptive.target is missing"),
    "an end of a constant rate":
        ("optim.decay=constant optim.end=1e-6", "config.optim.end = 1e-06 | optim.decay is 'constant' | set it to 0.0"),
    "a level of no correction":
        ("importance.action=none importance.level=sequence",
         "config.importance.level = 'sequence' | importance.action is 'none' | set it to 'token'"),
    "a bound of no correction":
        ("importance.action=none importance.high=5.", "importance.high = 5.0 | action is 'none' | set it to 2.0"),
    "a correction of what the very policy sampled":
        ("importance.action=truncate", "config.importance.action = 'truncate' | this very policy samples | to 'auto'"),
    "a bound where the very policy samples":
        ("importance.high=5.", "config.importance.high = 5.0 | importance.action = 'auto' weighs nothing"),
    "a level where the very policy samples":
        ("model.dtype=bfloat16 importance.level=geometric", "config.importance.level = 'geometric' | weighs nothing"),
    "older weights and no correction":
        ("rollout.max_lag=1 num_steps=3 importance.action=none",
         "config.importance.action = 'none' with rollout.max_lag = 1 | 'ppo_clip' | set action = 'auto', or max_lag"),
    "a group that is always the same": ("rollout.top_k=1", "config.rollout.top_k = 1: | greedy | give 2 or more, or 0"),
    "a top-k that keeps all": ("rollout.top_k=18", "config.rollout.top_k = 18 does nothing | 18 tokens | set it to 0"),
    "an entropy bonus that adapts to nothing":
        ("entropy.coef=0. entropy.adaptive.step=0.1", "config.entropy.adaptive.target is missing"),
    "a lower bound of no mask": ("importance.low=0.5", "config.importance.low = 0.5 | set it to 0.0"),
    "a division by the deviation of equal rewards":
        ("advantage.epsilon=0.", "config.advantage.epsilon = 0 | give more, like 1e-4"),
    "a negative clip": ("loss.clip_low=-0.1", "config.loss.clip_low is -0.1 | at least 0"),
    "rewards of no weight": ("reward.weights=(0.,0.)", "config.reward.weights are all 0 | give one function a weight"),
    "k3 by the ratio in the reward":
        ("kl.placement=reward kl.estimator=k3_weighted advantage.normalize=none",
         "config.kl.estimator = 'k3_weighted' | placement = 'loss' | take k1, k2 or k3"),
    "a KL target with a schedule of its own":
        ("kl.placement=reward kl.adaptive.target=0.1 kl.decay=linear advantage.normalize=none",
         "config.kl.adaptive moves the coefficient | 'constant'"),
    "an entropy target that nothing moves towards":
        ("entropy.coef=0.2 entropy.adaptive.target=0.5 entropy.adaptive.step=0.1 entropy.adaptive.most=0.1",
         "config.entropy.adaptive.most = 0.1 | entropy.coef = 0.2 | raise it"),
    "an off-policy mask where nothing is off-policy":
        ("mask.off_policy=0.1", "config.mask.off_policy = 0.1 | only optimizer step | set it to 0.0"),
    "a bound below the upper clip": ("loss.delta=1.1", "config.loss.delta = 1.1 | above 1 + clip_high | 0 for none"),
    "importance weights of which none is kept":
        ("importance.action=mask importance.low=2. importance.high=1.", "config.importance.low = 2.0 | high = 1.0"),
    "an over-long penalty of more than a completion":
        ("reward.overlong_tokens=999", "config.reward.overlong_tokens = 999 | lower it"),
    "a KL coefficient without a place":
        ("kl.placement=none", "config.kl.placement is 'none' | 'reward', 'loss' | --config.kl=none"),
    "a warm-up as long as the run":
        ("optim.warmup_steps=1", "optim.warmup_steps = 1 | 1 optimizer steps | lower it or raise num_steps"),
    "both ways of saying the warm-up":
        ("optim.warmup_steps=1 optim.warmup_ratio=0.1", "warmup_steps and optim.warmup_ratio | set one of them to 0"),
    "a constant to divide by that is not given":
        ("aggregate.mode=constant", "config.aggregate.constant_length = 0 | give a length in tokens"),
    "a constant that is not used": ("aggregate.constant_length=9", "config.aggregate.constant_length | set it to 0"),
    "more weights than reward functions":
        ("reward.functions=countdown.accuracy", "has 1 function and 2 weights: | such as reward.weights = (1.0,)"),
    "several functions of which one is not there":
        ("reward.functions=math.accuracy,math.is_box reward.weights=1.0,0.5", "'math.is_box' | mean math.is_boxed?"),
    "the same reward function twice":
        ("reward.functions=('math.accuracy','math.accuracy')", "'math.accuracy' twice | give it once"),
    "a reward function with an argument that it does not take":
        ("reward.weights=1. reward.functions=gsm8k.accuracy(way='strict')",
         "config.reward.functions: gsm8k.accuracy has no argument 'way' | it takes method"),
    "the same reward function with other arguments":
        ("reward.functions=(\"gsm8k.accuracy(method='strict')\",'gsm8k.accuracy')", "'gsm8k.accuracy' twice"),
    "a judge whose argument is no plain value":
        ("eval.every=1 eval.function=gsm8k.accuracy(x)", "config.eval.function 'gsm8k.accuracy(x)' cannot be read"),
    "a number for a reward function":
        ("reward.functions=('math.accuracy',1)", "reward.functions: one is 1: give text"),
    "an unknown reward":
        ("reward.weights=1. reward.functions=math.acuracy", "reward.functions 'math.acuracy' | mean math.accuracy?"),
    "a reward in a module that is not there":
        ("reward.weights=1. reward.functions=lab.x",
         "reward.functions 'lab.x' does not exist: there is no module lab; there is arithmetic.accuracy, "),
    "a reward of another program":
        ("reward.weights=1. reward.functions=__main__.score_", "does not exist | name it 'file.function'"),
    "an unknown task":
        ("data.source=arithmetic.trian", "config.data.source 'arithmetic.trian' | mean arithmetic.train?"),
    "an unknown task to be graded by":
        ("eval.every=1 eval.source=countdown.exam", "config.eval.source 'countdown.exam' | there is countdown.held_"),
    "an unknown judge": ("eval.every=1 eval.function=lab.xyz", "config.eval.function 'lab.xyz' | there is"),
    "a data file of another kind":
        ("data.source=my/rows.xlsx", "config.data.source = 'my/rows.xlsx' | .jsonl or .parquet"),
    "a data set of the hub":
        ("data.source=openai/gsm8k", "data set openai/gsm8k cannot be loaded | network, or give a file"),
    "an argument that the chat template does not read":
        ("data.chat_template_args.enable_thinking=false", "the chat template does not read 'enable_thinking'"),
    "an unknown conversion of the problems":
        ("eval.every=1 eval.convert=gsm8k.covert", "config.eval.convert 'gsm8k.covert' | mean gsm8k.convert?"),
    "a missing data file":
        ("data.source=rows.jsonl",
         "config.data.source: data file rows.jsonl does not exist; this folder has sums.jsonl: give the path of one"),
    "a missing file of problems":
        ("eval.every=1 eval.source=lab/rows.csv",
         "config.eval.source: data file lab/rows.csv does not exist; there is no folder lab: give the path of one"),
    "a missing Parquet file":
        ("data.source=rows.parquet", "data file rows.parquet does not exist | give the path of one"),
    "a missing model folder":
        ("model.path=./nowhere", "model.path './nowhere' | give a Hugging Face folder or a hub id"),
    "a hub id that cannot be had":
        ("model.path=lab/nothing", "model.path 'lab/nothing' is no local folder | hub | hf download lab/nothing"),
    "completions beyond the model's positions":
        ("rollout.max_completion_tokens=510", "max_completion_tokens = 510 | 512 positions | lower it"),
    "a mesh larger than the devices":
        ("mesh.tensor=2 mesh.fsdp=8", "tensor 2 | needs 16 devices | there are 8 | make mesh.* smaller"),
    "a mesh that leaves devices idle": ("mesh.tensor=3", "tensor 3 | 2 of 8 devices idle | mesh.* must divide them"),
    "two mesh axes for all devices left": ("mesh.data=-1", "mesh.data and mesh.fsdp are both -1 | only one"),
    "a mesh axis of no device": ("mesh.data=0", "config.mesh.data = 0 | give a size of 1 or more"),
    "a batch that the mesh does not divide":
        ("prompts_per_step=4 prompts_per_update=4", "config.prompts_per_update = 4 | 8 devices | give a multiple"),
    "a microbatch that the mesh does not divide":
        ("microbatch=4", "config.microbatch = 4 | 8 devices | give a multiple"),
})  # fmt: skip
def test_a_config_is_refused_for(refuse: Refuse, argv: str, words: str) -> None:
    refuse(train, command(argv), words)


@table("argv words", {
    "no config": ([], "required: --config | --help"),
    "an unknown argument": ([*command(), "--steps=1"], "unknown argument --steps=1 | --config.field=value"),
    "an argument without its value": ([*command(), "--workdir"], "--workdir | expected one argument"),
    "a config file that is not there":
        (["--config", "nowhere.py"], "--config nowhere.py: no such file | give one | shipped | dapo, "),
    "a shipped config by a wrong name": (["--config", "gropo"], "--config gropo: no such file | did you mean grpo?"),
    "a file of a repository which is elsewhere":
        (["--config", "configs/dapo.py"], "--config configs/dapo.py: no such file | --config dapo is the shipped"),
    "a config of one's own without its ending":
        (["--config", "./mine"], "--config ./mine: no such file; did you mean mine.py?"),
    "a config of one's own by a wrong name": (["--config", "min.py"], "no such file; did you mean mine.py?"),
    "a config of the other trainer":
        (["--config", "sft"], "this is a config of supervised fine-tuning: run it with jaxrl sft"),
    "a field without its value": ([*command(), "--config.num_steps"], "--config.num_steps has no value | =VALUE"),
})  # fmt: skip
def test_a_command_is_refused_for(place: Path, refuse: Refuse, argv: list[str], words: str) -> None:
    (place / "mine.py").touch()
    refuse(train, argv, words)


VLLM = "engine.managed=false engine.servers=http://127.0.0.1:9 "


@table("argv words", {
    "a server of its own and those of others":
        ("engine.servers=http://a", "engine.managed = True | ('http://a',) | servers = ()"),
    "no server at all": ("engine.managed=false", "engine.managed = False | servers = () | give servers"),
    "a server that is no address": (VLLM + "engine.servers=a:8000", "'a:8000' is no address | http://127.0.0.1:8000"),
    "a server twice": (VLLM + "engine.servers=('http://127.0.0.1:1','http://127.0.0.1:1')", "names one twice"),
    "a file for another host":
        (VLLM + "engine.servers=http://far:8000", "engine.push = 'file' | http://far:8000 | set push = 'http'"),
    "weights over HTTP from nowhere": (VLLM + "engine.push=http", "push = 'http' and push_address = '' | address"),
    "weights over HTTP from everywhere":
        (VLLM + "engine.push=http engine.push_address=0.0.0.0", "push_address = '0.0.0.0' | as the servers reach it"),
    "an interpreter without vLLM": (f"engine.python={sys.executable}", "engine.python | has no vLLM | launch/"),
    "an interpreter that is not there": ("engine.python=nowhere", "config.engine.python 'nowhere' has no vLLM"),
    "an interpreter for somebody else's server":
        (VLLM + "engine.python=mine", "config.engine.python = 'mine' | engine.managed is False"),
    "arguments for somebody else's server":
        (VLLM + "engine.server_args=('--seed=1',)", "engine.server_args = ('--seed=1',) | engine.managed is False"),
    "a request that may take no time": ("engine.timeout=0.", "config.engine.timeout is 0.0 | above 0"),
    "groups refilled while batches are sampled ahead, by rewards of the main thread":
        ("rollout.max_lag=1 rollout.resample_rounds=1 num_steps=3 reward.timeout=0.",
         "config.reward.timeout = 0 with rollout.max_lag = 1 and resample_rounds = 1 | a time limit | to 0"),
    "partial rollouts of servers":
        ("rollout.partial=True num_steps=3", "config.rollout.partial = True | engine.name = 'vllm' | set partial"),
})  # fmt: skip
def test_a_config_with_vllm_is_refused_for(refuse: Refuse, argv: str, words: str) -> None:
    refuse(train, ["--config", str(CONFIGS / "grpo_vllm.py"), "--workdir", "run", *fields(f"{TINY} {argv}")], words)


def test_a_public_server_one_without_vllm_and_one_without_a_port_are_refused(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(serve_vllm, ["--model", "m", "--host", "0.0.0.0"], "--host 0.0.0.0 | --api-key does not guard | --public")
    refuse(serve_vllm, ["--model", "m", "--", "--host=0.0.0.0"], "--host=0.0.0.0 belongs before the --")
    refuse(serve_vllm, ["--model", "m", "--python", sys.executable], "--python | has no vLLM | launch/vllm_cpu.sh")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(serve_vllm, "check_python", lambda *_: None)
        port = str(taken.getsockname()[1])
        refuse(serve_vllm, ["--model", "m", "--port", port], f"--port {port} of --host 127.0.0.1 | in use | another")


def test_a_server_that_is_not_there_stops_the_run_after_its_patience(refuse: Refuse) -> None:
    argv = ["--config", str(CONFIGS / "grpo_vllm.py"), "--workdir", "run", *fields(f"{TINY} {VLLM} {SMALL}")]
    argv += fields("engine.patience=0.5 prompts_per_step=8 engine.weights_dir=.")
    refuse(train, argv, "vLLM at http://127.0.0.1:9: ConnectError | for 0.5 s | start it again", started=True)


@pytest.mark.parametrize(("program", "config"), [(train, "grpo"), (sft, "sft")])
def test_determinism_is_refused_where_it_would_come_too_late(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, program: ModuleType, config: str
) -> None:
    jax.devices()
    argv = ["--config", str(CONFIGS / f"{config}.py"), "--workdir", "run", "--config.deterministic=true"]
    refuse(program, argv, "config.deterministic = True comes too late | a process of its own | XLA_FLAGS=--xla_gpu_")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")  # it was there before
    refuse(program, [*argv, "--config.model.path=./nowhere"], "model.path './nowhere'")


@pytest.mark.parametrize("program", [train, sft, evaluate])
def test_more_processes_than_one_are_refused(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, program: ModuleType
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    sft_argv = ["--config", str(CONFIGS / "sft.py"), "--workdir", "run"]
    argv = {train: command(), sft: sft_argv, evaluate: ["--task=arithmetic", f"--model={MODEL}"]}[program]
    refuse(program, argv, "JAX runs in 2 processes | --distributed auto | on one host of its own")


def test_wandb_is_refused_where_it_is_not_installed(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    refuse(train, command("log.to=wandb log.project=lab"), "config.log.to | not installed | pip install")


@table("text words", {
    "that raises": ("x = 1\nx / 0\n", "bad.py cannot be run | ZeroDivisionError | bad.py:2"),
    "that is no Python": ("def get_config(:\n", "bad.py cannot be run | SyntaxError | line 1"),
    "that imports what is not there": ("import lab_x\n", "bad.py cannot be run | 'lab_x' | bad.py:1"),
    "that imports a shipped config as its neighbour":
        ("import grpo\n", "bad.py cannot be run | bad.py:1 | write 'from jaxrl_llm.configs import grpo'"),
    "that ends the program": ("import sys\nsys.exit(3)\n", "bad.py cannot be run | SystemExit: 3 | bad.py:2"),
    "that sets a value of another type":
        ("from jaxrl_llm.configs import grpo\n\ndef get_config():\n    c = grpo.get_config()\n    c.optim.end = 'x'\n",
         "config.optim.end is 'x': give a number, such as 0.0 (bad.py:5)"),
    "without get_config": ("c = 1\n", "bad.py | define get_config()"),
    "that returns no ConfigDict":
        ("def get_config():\n    return {}\n", "bad.py | returning an ml_collections.ConfigDict"),
})  # fmt: skip
def test_a_config_file_is_refused(place: Path, refuse: Refuse, text: str, words: str) -> None:
    (place / "bad.py").write_text(text)
    refuse(train, ["--config", "bad.py"], words)


@table("change words", {
    "without a field": ("del c.seed", "config.seed is missing | add it to the config file"),
    "without a section": ("del c.optim", "config.optim.learning_rate is missing"),
    "without a section of one's own fields":
        ("del c.data.chat_template_args", "config.data.chat_template_args is missing | add it"),
    "with a number for a section of one's own fields":
        ("del c.data.chat_template_args; c.data.chat_template_args = 1",
         "config.data.chat_template_args is 1: give a section"),
    "without the name of a function": ("del c.loss.name", "config.loss.name is missing"),
    "with a number for the name of a function":
        ("c.loss = ConfigDict(dict(name=1))", "config.loss.name is 1: give text"),
    "with a field of its own": ("c.sede = 1", "config.sede is not a field | did you mean seed?"),
    "with a wrong type": ("del c.seed; c.seed = '0'", "config.seed is '0': give a whole number"),
    "with an estimator that asks for a critic":
        ("c.advantage = ConfigDict(dict(name='gae'))", "config.critic is missing | 'gae' | configs/ppo.py"),
    "with an estimator that asks for a teacher":
        ("c.advantage = ConfigDict(dict(name='distillation'))",
         "config.advantage.name = 'distillation' | config.teachers.teacher is missing | configs/distillation.py"),
    "with a teacher by the name of another column":
        ("c.teachers = ConfigDict(dict(ref=dict(path='x')))", "config.teachers.ref: the column ref_logprobs | another"),
    "with a teacher that nobody asks for":
        ("c.teachers = ConfigDict(dict(second=dict(path='x')))",
         "config.teachers.second would be of no use | 'ppo_clip' | 'grpo' | second_logprobs"),
    "with a teacher that is not named":
        ("c.advantage = ConfigDict(dict(name='distillation')); c.teachers = ConfigDict(dict(teacher=dict(path='')))",
         "config.teachers.teacher.path = '' | give the model's folder"),
    "with an estimator that does not know the KL penalty in the reward":
        ("c.advantage = ConfigDict(dict(name='gdpo')); c.kl.placement = 'reward'",
         "config.kl.placement = 'reward' | 'gdpo' | set 'loss', or kl = None"),
    "with sets of more than a group":
        ("c.advantage = ConfigDict(dict(name='pass_at_k', k=9))", "config.advantage.k = 9: give 1 to group_size = 8"),
    "with several updates and no ratio":
        ("c.loss = ConfigDict(dict(name='reinforce')); c.epochs = 2",
         "config.loss.name = 'reinforce' has no ratio | 2 optimizer steps on a rollout | set epochs = 1"),
    "with advantages of tokens for a loss of sequences":
        ("c.loss = ConfigDict(dict(name='gmpo')); c.advantage = ConfigDict(dict(name='reinforce_pp'))",
         "config.loss.name = 'gmpo' wants an advantage a completion | 'reinforce_pp'"),
    "with REINFORCE on older samples and no correction":
        ("c.loss = ConfigDict(dict(name='reinforce')); c.rollout.max_lag = 1; c.importance.action = 'none'",
         "config.importance.action = 'none' with rollout.max_lag = 1 | 'reinforce'"),
    "with a ratio of sequences and a mean of tokens":
        ("c.loss = ConfigDict(dict(name='gspo'))",
         "config.aggregate.mode = 'token_mean' | 'gspo' | set 'sequence_mean', or 'sequence_sum'"),
    "with ratios of sequences for tokens and a mean of tokens":
        ("c.loss = ConfigDict(dict(name='gspo', level='token'))", "config.aggregate.mode = 'token_mean' | 'gspo'"),
    "with a geometric mean and a mean of tokens":
        ("c.loss = ConfigDict(dict(name='gmpo'))", "config.aggregate.mode = 'token_mean' | 'gmpo'"),
    "with a ratio of sequences and chosen tokens":
        ("c.loss = ConfigDict(dict(name='gspo')); c.aggregate.mode = 'sequence_mean'; c.mask.top_entropy = 0.2",
         "config.mask.top_entropy = 0.2 | 'gspo' | set it to 1.0, or take loss gspo with level = 'token'"),
    "with a geometric mean and chosen tokens":
        ("c.loss = ConfigDict(dict(name='gmpo')); c.aggregate.mode = 'sequence_mean'; c.mask.top_entropy = 0.2",
         "config.mask.top_entropy = 0.2 | 'gmpo'"),
    "with an overlong penalty that nobody looks at":
        ("c.advantage = ConfigDict(dict(name='gdpo')); c.reward.overlong_tokens = 2",
         "config.reward.overlong_tokens = 2 | 'gdpo' does not look at it | set it to 0"),
    "with groups chosen by a reward that nobody looks at":
        ("c.advantage = ConfigDict(dict(name='distillation')); c.teachers = ConfigDict(dict(teacher=dict(path='x'))); "
         "c.rollout.resample_rounds = 1", "config.rollout.resample_rounds = 1 | looks at no reward"),
    "with our estimator by its dotted name and groups of one":
        ("c.advantage.name = 'jaxrl_llm.algorithms.advantages.grpo'; c.group_size = 1",
         "config.group_size = 1 | 2 or more"),
    "with dynamic sampling and groups of one":
        ("c.group_size = 1; c.rollout.resample_rounds = 1; c.advantage = ConfigDict(dict(name='remax'))",
         "config.rollout.resample_rounds = 1 | a group of 1 | set it to 0"),
    "with partial rollouts and dynamic sampling":
        ("c.rollout.partial = True; c.rollout.resample_rounds = 1",
         "config.rollout.partial = True and resample_rounds = 1 | set one of them"),
    "with partial rollouts and no importance weights":
        ("c.rollout.partial = True; c.importance.action = 'none'",
         "config.importance.action = 'none' with rollout.partial = True | set action = 'auto', or partial = False"),
    "with a wrong type of an argument":
        ("c.loss = ConfigDict(dict(name='ppo_clip', clip_low='a'))", "config.loss.clip_low is 'a': give a number"),
})  # fmt: skip
def test_a_config_file_is_refused_that_is_complete_but(place: Path, refuse: Refuse, change: str, words: str) -> None:
    text = (CONFIGS / "grpo.py").read_text()
    assert text.count("\n    return c\n") == 1
    (place / "bad.py").write_text(text.replace("\n    return c\n", f"\n    {change}\n    return c\n"))
    refuse(train, ["--config", "bad.py"], words)


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def configured(**values: Any) -> Change:
    """config.json with other values; None takes one out."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def sharded(listing: str) -> Change:
    """model.safetensors as a first shard, with an index."""

    def shard(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(listing)

    return shard


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def reweighed(change: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    """model.safetensors with its tensors changed."""

    def reweigh(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return reweigh


def adapter(folder: Path) -> None:
    """What PEFT writes."""
    without("config.json")(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "lab/base"}')


def endless(folder: Path) -> None:
    """No end token anywhere."""
    configured(eos_token_id=None)(folder)
    without("generation_config.json")(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


SHARDS = '{"weight_map": {"model.norm.weight": "model-1.safetensors", "x": "model-2.safetensors"}}'


@table("spoil words", {
    "without config.json":
        (without("config.json"), "model.path './model' has no config.json | give a Hugging Face folder"),
    "with a torn config.json": (written("config.json", "{"), "model/config.json cannot be read | restore the file"),
    "with a list for config.json": (written("config.json", "[]"), "model/config.json holds no JSON object | restore"),
    "of another architecture":
        (configured(model_type="mamba"), "model/config.json | 'mamba' is not supported | there is gemma2"),
    "whose config.json lacks a size":
        (configured(hidden_size=None), "config.json has no 'hidden_size' | restore the file"),
    "of a dtype that cannot be saved":
        (configured(dtype="int3"), "model/config.json: dtype is 'int3' | give 'float32'"),
    "without weights": (without("model.safetensors"), "model holds no model.safetensors: fetch the weights again"),
    "with weights of torch":
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
         "model holds no model.safetensors: convert it where torch is installed: python -c | save_pretrained(d)"),
    "of pictures":
        (configured(model_type="internvl_chat"), "'internvl_chat' is a vision-language model of a kind | family qwen2"),
    "of pictures, and new":
        (configured(model_type="new", vision_config={}, text_config={"model_type": "qwen3"}),
         "'new' is a vision-language model | or a text model of the family qwen3"),
    "of pictures, and unknown":
        (configured(model_type="new", vision_config={}), "'new' is a vision-language model | model; there is gemma2"),
    "that is an adapter":
        (adapter, "model.path './model' holds adapters of PEFT | their base, lab/base, as model.path | adapters.path"),
    "whose weights are cut short": (cut_short, "model.safetensors is broken or cut short | fetch it again"),
    "that lacks a shard":
        (sharded(SHARDS), "model-2.safetensors is missing | fetch it again"),
    "with a torn index": (sharded("{"), "index.json cannot be read | restore the file"),
    "that lacks a tensor":
        (reweighed(lambda t: t.pop("model.norm.weight")), "no tensor model.norm.weight | use one checkpoint's files"),
    "with an unknown tensor":
        (reweighed(lambda t: t.update(router=t["model.norm.weight"])), "tensor router is unknown to qwen2 | use one"),
    "with tensors of another shape":
        (configured(intermediate_size=128),
         "down_proj.weight is (128, 384) | makes it (128, 128) | use one checkpoint's"),
    "without a tokenizer":
        (without("tokenizer.json"), "model: the tokenizer has no vocabulary | restore tokenizer.json"),
    "with a torn tokenizer":
        (written("tokenizer.json", "{"), "model: no tokenizer can be loaded | restore tokenizer.json"),
    "with the tokenizer of another":
        (configured(vocab_size=5), "model: the tokenizer makes token | vocabulary of 5 | use one checkpoint's files"),
    "without the chat template that chats need":
        (without("chat_template.jinja"), "sums.jsonl holds chats | no chat template | use an instruct model, or text"),
    "whose chat template refuses a prompt":
        (written("chat_template.jinja", "{{ raise_exception('no users') }}"),
         "sums.jsonl row 1: the chat template | no users"),
    "that never ends a completion": (endless, "model: no eos_token_id in | add one"),
    "with a torn generation_config.json":
        (written("generation_config.json", "{"), "model/generation_config.json cannot be read | restore the file"),
})  # fmt: skip
def test_a_model_is_refused(place: Path, refuse: Refuse, spoil: Change, words: str) -> None:
    shutil.copytree(MODEL, place / "model")
    spoil(place / "model")
    refuse(train, command("model.path=./model"), words)


def test_adapters_are_no_critic_and_no_model_to_evaluate(place: Path, refuse: Refuse) -> None:
    shutil.copytree(MODEL, place / "model")
    adapter(place / "model")
    merge = "holds adapters of PEFT | merge them into their base, lab/base, with PEFT | and give that"
    argv = command("critic.path=./model critic.warmup_steps=0 critic.optim.warmup_steps=0")
    refuse(train, ["--config", str(CONFIGS / "ppo.py"), *argv[2:]], f"critic.path './model' {merge}")
    refuse(evaluate, ["--model=./model", "--task=arithmetic"], f"--model './model' {merge}")


def test_a_critic_with_fewer_positions_than_the_texts_need_is_refused(place: Path, refuse: Refuse) -> None:
    shutil.copytree(MODEL, place / "model")
    about = json.loads((place / "model" / "config.json").read_text())
    (place / "model" / "config.json").write_text(json.dumps(about | {"max_position_embeddings": 16}))
    argv = command("critic.path=./model critic.warmup_steps=0 critic.optim.warmup_steps=0")
    words = "config.rollout.max_completion_tokens = | than those of config.critic.path, 16 positions: lower it"
    refuse(train, [argv[0], str(CONFIGS / "ppo.py"), *argv[2:]], words)


@table("text argv words", {
    "without a row": ("\n \n", "", "rows.jsonl holds no rows | give a data source that has some"),
    "with a torn line":
        ('{"prompt": "1+1"}\n{"prompt', "",
         "rows.jsonl line 2, column 2 is no JSON (Unterminated string | every line must be one JSON object"),
    "with a line that is a list": ("\n[1]\n", "", "rows.jsonl line 2 is list | every line must be one JSON object"),
    "in another encoding": ('{"prompt": "\xe9"}', "", "rows.jsonl line 1 | utf-8"),
    "without a column 'prompt'":
        ('{"id": 7, "question": "?"}', "",
         "rows.jsonl row 1 has no column 'prompt' | there is id, question | data.convert"),
    "with a number for a prompt":
        ('{"prompt": 5}', "", "rows.jsonl row 1: prompt is 5 | give text, or a list of messages"),
    "with an empty prompt": ('{"prompt": ""}', "", "rows.jsonl row 1: prompt is '' | give text"),
    "with a message of no role": ('{"prompt": [{"content": "1"}]}', "", "row 1: prompt is [{ | with role and content"),
    "without a column that the conversion needs":
        ('{"question": "?"}', "data.convert=gsm8k.convert", "row 1 has no column 'answer' for gsm8k.convert | add it"),
    "that the conversion refuses":
        ('{"question": "?", "answer": "2"}', "data.convert=gsm8k.convert",
         "row 1: gsm8k.convert raised ValueError | ####"),
    "with an over-long prompt where none may be":
        ('{"prompt": "1+1"}\n{"prompt": "100+100"}', "data.max_prompt_tokens=5 data.overlong=error",
         "rows.jsonl row 2 | has 7 tokens, config.data.max_prompt_tokens is 5 | raise it | 'drop'"),
    "with empty answers alone":
        ('{"prompt": "1+1", "answer": null}\n' * 2, "",
         "which is empty in all 2 rows of rows.jsonl (data.source); there is none: fill it, or make it with data.conv"),
    "with over-long prompts alone":
        ('{"prompt": "1+1"}\n{"prompt": "2+2"}', "data.max_prompt_tokens=2",
         "all 2 prompts of rows.jsonl | max_prompt_tokens = 2 | raise it"),
})  # fmt: skip
def test_a_data_file_is_refused(place: Path, refuse: Refuse, text: str, argv: str, words: str) -> None:
    (place / "rows.jsonl").write_text(text, encoding="latin-1")
    refuse(train, command(f"data.source=rows.jsonl {argv}"), words)


def test_a_broken_parquet_file_is_refused(place: Path, refuse: Refuse) -> None:
    (place / "rows.parquet").write_bytes(b"PAR1 and no more")
    refuse(train, command("data.source=rows.parquet"), "rows.parquet cannot be read as Parquet | give a Parquet file")


@table("text words", {
    "that raises":
        ("def rows():\n    return open('nowhere')\n", "mine.rows raised FileNotFoundError | nowhere | mine.py:2"),
    "that ends the program":
        ("import sys\ndef rows():\n    sys.exit()\n", "SystemExit | mine.py:3) ended the program | return or raise"),
    "that gives nothing": ("def rows():\n    return []\n", "mine.rows holds no rows"),
    "that gives other things than rows":
        ("def rows():\n    return ['1+1']\n", "mine.rows row 1 is '1+1' | dict of columns"),
})  # fmt: skip
def test_a_task_of_ones_own_is_refused(place: Path, refuse: Refuse, text: str, words: str) -> None:
    (place / "mine.py").write_text(text)
    refuse(train, command("data.source=mine.rows"), words)


def a_run(folder: Path, **changes: Any) -> None:
    """What the workdir of the tiny command holds first, but for some fields."""
    folder.mkdir()
    config, *_ = parse_arguments("test", "", command())
    (folder / "config.json").write_text(json.dumps(config.to_dict() | changes))


def a_folder(folder: Path, **texts: str) -> None:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)


@table("make workdir words", {
    "that is a file": (Path.touch, "run", "--workdir run cannot be written | give another"),
    "below a file": (Path.touch, "run/1/2", "--workdir run/1/2 cannot be written | run is no folder | give another"),
    "that holds something else":
        (lambda run: a_folder(run, thesis_tex="!"), "run",
         "--workdir run is not empty | no config.json | give a new folder"),
    "that holds the checkpoints of something else":
        (lambda run: (run / "checkpoints" / "9").mkdir(parents=True), "run",
         "--workdir run is not empty | give a new folder"),
    "whose config.json is torn":
        (lambda run: a_folder(run, config_json="{"), "run",
         "run/config.json is not a run's config | give another --workdir"),
    "whose config.json is a list":
        (lambda run: a_folder(run, config_json="[]"), "run", "run/config.json is not a run's config | give another"),
    "of a run with another config":
        (lambda run: a_run(run, seed=7), "run", "config.seed is 0, but the run in run has 7 | give another --workdir"),
    "of a run with fewer fields":
        (lambda run: a_run(run, kl={}), "run", "config.kl.coef is | the run in run has None | give another --workdir"),
})  # fmt: skip
def test_a_workdir_is_refused(place: Path, refuse: Refuse, make: Change, workdir: str, words: str) -> None:
    make(place / "run")
    refuse(train, command(workdir=workdir), words)


@table("text words", {
    "that imports what is not there": ("import lab_x\n", "importing mine failed | 'lab_x' | mine.py:1"),
    "that raises": ("1 / 0\n", "importing mine failed | ZeroDivisionError | mine.py:1"),
    "that is no Python": ("def f(:\n", "importing mine failed | SyntaxError | line 1"),
    "without the function": ("def grade(): pass\n", "'mine.f' does not exist; there is mine.grade, or a dotted name"),
})  # fmt: skip
def test_a_reward_module_is_refused(place: Path, refuse: Refuse, text: str, words: str) -> None:
    (place / "mine.py").write_text(text)
    refuse(train, command("reward.weights=1. reward.functions=mine.f"), f"config.reward.functions 'mine.f' | {words}")


@table("body words", {
    "that raises":
        ("raise ValueError('no\\nunit')", "raised ValueError: no unit ( | mine.py:2) on row {'answer': | completion '"),
    "that returns NaN":
        ("return [float('nan')] * 16", "returned nan for row {'answer': | return a finite number, or None"),
    "that returns a word":
        ("return ['good'] * 16", "returned 'good' for row {'answer': | return a finite number, or None"),
    "that returns too few numbers": ("return [1.0]", "returned list of 1 for 16 completions | one number each"),
    "that returns one number for all": ("return 1.0", "returned 1.0 for 16 completions | return a list"),
    "that takes too long":
        ("__import__('time').sleep(60)", "took longer than config.reward.timeout = 2 seconds | 16 completions | raise"),
    "that ends its process": ("raise SystemExit(3)", "ended its process (exit code 3) | config.reward.timeout = 0"),
})  # fmt: skip
def test_a_run_stops_for_a_reward(place: Path, refuse: Refuse, body: str, words: str) -> None:
    (place / "mine.py").write_text(f"def f(completions, answer):\n    {body}\n")
    argv = command(f"reward.weights=1. reward.functions=mine.f reward.timeout=2. {SMALL}")
    refuse(train, argv, f"reward mine.f | {words}", started=True)


def test_a_run_stops_for_a_reward_that_asks_for_a_column_which_is_not_there(place: Path, refuse: Refuse) -> None:
    (place / "mine.py").write_text("def f(completions, solution):\n    return [1.0] * len(completions)\n")
    argv = command("reward.weights=1. reward.functions=mine.f")
    refuse(
        train, argv, "reward mine.f asks for column 'solution' | data.source | there is answer: rename one | convert"
    )


def test_a_run_stops_for_a_reward_that_asks_for_what_only_trl_has(place: Path, refuse: Refuse) -> None:
    (place / "mine.py").write_text("def f(completions, trainer_state):\n    return [1.0] * len(completions)\n")
    words = (
        "mine.f asks for 'trainer_state', the state of TRL's trainer, which does not exist here: take it out | =None"
    )
    refuse(train, command("reward.weights=1. reward.functions=mine.f"), words)


def test_a_column_that_the_judge_of_the_evaluation_asks_for_is_missed_before_weights_are_read(
    place: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "load_params", None)
    (place / "exam.jsonl").write_text('{"prompt": "1+1", "solution": "2"}\n')
    exam = "eval.every=1 eval.source=exam.jsonl eval.function=math.accuracy"
    refuse(train, command(exam), "math.accuracy asks for column 'answer' | eval.source | answer_column = 'solution'")
    answers = [json.dumps(row | {"completion": row["answer"]}) for row in SUMS]
    (place / "answers.jsonl").write_text("\n".join(answers))
    argv = ["--config", str(CONFIGS / "sft.py"), *fields(f"model.path={MODEL} data.source=answers.jsonl {exam}")]
    refuse(sft, argv, "math.accuracy asks for column 'answer' | eval.source | answer_column = 'solution'")
    (place / "answers.jsonl").write_text("\n".join([*answers, '{"prompt": "1+1", "completion": null}']))
    refuse(sft, argv, "answers.jsonl row 9: 'completion' is None (1 of 9 rows | make it text | data.convert")
    argv = [f"--model={MODEL}", "--task=exam.jsonl", "--function=math.accuracy"]
    refuse(evaluate, argv, "math.accuracy asks for column 'answer' | --answer-column = 'solution'")


NOT_FINITE = """
def f(logprobs, batch, *, clip_low, clip_high, delta):
    return logprobs * float("nan"), {}
"""


@table("argv words saved", {
    "and every step is saved": ("checkpoint.every=1", "/run/checkpoints/1: begin a new run", True),
    "and no step is saved": ("checkpoint.every=9", "there is no checkpoint: begin a new run", False),
})  # fmt: skip
def test_a_run_stops_where_no_gradient_is_finite(
    place: Path, refuse: Refuse, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    argv: str, words: str, saved: bool,
) -> None:  # fmt: skip
    (place / "mine.py").write_text(NOT_FINITE)
    more = f"loss.name=mine.f {SMALL} num_steps=9 optim.decay=constant {argv}"
    words = f"step 2: 2 updates in a row were skipped | grad_norm, | {words} | max_skipped"
    refuse(train, command(f"{more} health.max_skipped=2"), words, started=True)
    if saved:  # it is whole, and the run may go on, if that is wanted
        for _ in range(300):
            time.sleep(0 if (place / "run" / "checkpoints" / "1").is_dir() else 0.1)
        again = command(f"{more} health.max_skipped=0 num_steps=3")
        monkeypatch.setattr(sys, "argv", ["train", *again])
        train.main()
        records = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [record["updates/skipped_in_a_row"] for record in records] == [1, 2, 3]


def test_fine_tuning_stops_where_no_gradient_is_finite_and_warned_of_the_rate(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "answers.jsonl").write_text("".join(json.dumps(r | {"completion": r["answer"]}) + "\n" for r in SUMS))
    argv = fields(
        "data.source=answers.jsonl eval=none prompts_per_step=8 num_steps=9 optim.warmup_steps=0 mesh.fsdp=1 "
        "model.hidden_size=32 model.num_hidden_layers=1 optim.learning_rate=1e30 health.max_skipped=3 "
        "log.to=()"
    )
    monkeypatch.setattr(sys, "argv", ["sft", "--config", str(CONFIGS / "sft.py"), "--workdir", "run", *argv])
    with pytest.raises(SystemExit) as stopped:
        run_main(sft.main)
    said = capfd.readouterr()
    assert stopped.value.code == 2
    assert "\nwarning: optim.learning_rate = 1e+30 is 0.02 or more: it may ruin a model of width 32" in said.out
    assert "3 updates in a row were skipped" in said.err
    assert said.err.count("\n") == 1


def test_a_run_is_not_resumed_from_a_torn_checkpoint_other_rows_or_another_model(
    place: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(MODEL, place / "model")
    shutil.copy(place / "sums.jsonl", place / "exam.jsonl")
    graded = "eval.every=1 eval.source=exam.jsonl eval.function=math.accuracy"
    run = f"model.path=./model kl=none {SMALL} {graded} optim.decay=constant"
    monkeypatch.setattr(sys, "argv", ["train", *command(run)])
    train.main()
    shutil.copytree(place / "run", place / "torn")
    (place / "torn" / "checkpoints" / "1" / "notes" / "metadata").write_text('{"data')
    words = "torn/checkpoints/1 cannot be read | move it away to go on from the one before it"
    refuse(train, command(f"{run} num_steps=2", workdir="torn"), words)
    for field, name in (("data.source", "sums.jsonl"), ("eval.source", "exam.jsonl")):
        text = (place / name).read_text()
        (place / name).write_text(text.replace('"answer": "14"', '"answer": "15"'))  # and the same prompts
        words = (
            f"config.{field} holds other rows | 8 rows then, 8 now | put the rows back, or give | --config.data.accept="
        )
        refuse(train, command(f"{run} num_steps=2"), words)
        (place / name).write_text(text)
    words = "config.model.path holds something else | put that back, or give another --workdir"
    template = (place / "model" / "chat_template.jinja").read_text()
    (place / "model" / "chat_template.jinja").write_text("{{ bos_token }}" + template)  # which is nothing here
    refuse(train, command(f"{run} num_steps=2"), words)
    (place / "model" / "chat_template.jinja").write_text(template)
    reweighed(lambda t: t.update({"model.norm.weight": 2 * t["model.norm.weight"]}))(place / "model")
    refuse(train, command(f"{run} num_steps=2"), words)


@table("argv words", {
    "data without completions":
        ("data.source=sums.jsonl", "sums.jsonl has no column 'completion' | data.completion_column"),
    "data with a null completion":
        ("data.source=nulls.jsonl", "nulls.jsonl row 1: 'completion' is None | make it text"),
    "over-long completions alone":
        ("rollout.max_completion_tokens=1", "all completions | rollout.max_completion_tokens = 1 | raise it"),
    "completions beyond the model's positions": ("rollout.max_completion_tokens=512", "512 positions | lower it"),
    "heads of an odd size": ("model.hidden_size=132", "config.model.hidden_size = 132 | give a multiple of 8"),
    "key heads that do not divide the heads":
        ("model.num_key_value_heads=3", "config.model.num_key_value_heads = 3 | give a divisor"),
    "a field of another trainer": ("group_size=8", "config.group_size is not a field"),
    "an end of a constant rate": ("optim.decay=constant optim.end=1e-6", "config.optim.end = 1e-06 | to 0.0"),
    "the size of a model that is there":
        (f"model.path={MODEL} model.hidden_size=64", "config.model.hidden_size = 64 | model.path names a model"),
})  # fmt: skip
def test_fine_tuning_of_a_new_model_is_refused_for(place: Path, refuse: Refuse, argv: str, words: str) -> None:
    rows = [json.dumps(row | {"completion": row["answer"]}) for row in SUMS]
    (place / "answers.jsonl").write_text("\n".join(rows))
    (place / "nulls.jsonl").write_text("\n".join(json.dumps(row | {"completion": None}) for row in SUMS))
    tiny = fields("data.source=answers.jsonl eval=none prompts_per_step=8")
    refuse(sft, ["--config", str(CONFIGS / "sft.py"), "--workdir", "run", *tiny, *fields(argv)], words)


def test_fine_tuning_with_a_config_of_reinforcement_learning_is_refused(refuse: Refuse) -> None:
    refuse(sft, ["--config", "grpo"], "this is a config of reinforcement learning: run it with jaxrl train")


@table("argv words", {
    "no task": ("", "--task is missing | a task"),
    "a model and a run": ("--task=arithmetic --run=run", "--model | or --run"),
    "an unknown task":
        ("--task=arithmetik", "--task 'arithmetik': there is no such task or file; did you mean arithmetic?"),
    "the problems of a task": ("--task=arithmetic.held_out", "there is no such task or file; did you mean arithmetic?"),
    "a task like no other":
        ("--task=lab.exam", "'lab.exam' | give one of arithmetic, countdown, digits_in_pictures, or a file of rows"),
    "a file without a judge": ("--task=sums.jsonl", "--task is a file | --function"),
    "an unknown judge":
        ("--task=sums.jsonl --function=math.acuracy", "--function 'math.acuracy' | mean math.accuracy?"),
    "several samples at temperature 0": ("--task=arithmetic --samples=4", "--samples above 1 | --temperature above 0"),
    "no problem": ("--task=arithmetic --problems=0", "--problems is 0 | at least 1"),
    "a temperature below 0": ("--task=arithmetic --temperature=-1", "--temperature is -1.0 | at least 0"),
    "a word for a number": ("--task=arithmetic --batch=all", "--batch | 'all' | --help"),
    "an unknown argument": ("--task=arithmetic --tempo=1", "unrecognized arguments: --tempo=1 | --help"),
    "template arguments that are no object":
        ("--task=arithmetic --chat-template-args=[1]", "--chat-template-args: '[1]' is no JSON object | give one like"),
    "an argument that the chat template does not read":
        ('--task=arithmetic --chat-template-args={"x":1}', "chat template does not read 'x' | it reads no argument"),
    "an over-long prompt":
        ("--task=sums.jsonl --function=math.accuracy --max-prompt-tokens=2",
         "sums.jsonl row 1 | config.data.max_prompt_tokens is 2"),
})  # fmt: skip
def test_evaluation_is_refused_for(refuse: Refuse, argv: str, words: str) -> None:
    refuse(evaluate, [f"--model={MODEL}", *argv.split()], words)
