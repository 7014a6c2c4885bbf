"""Wrong input: one line that names the field or file, exit code 2, nothing written."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxrl_llm
from jaxrl_llm import evaluate, sft, train
from jaxrl_llm import recipe as recipes
from jaxrl_llm.build import build
from jaxrl_llm.config import load as configs
from jaxrl_llm.config.load import parse_arguments
from jaxrl_llm.configs import FOLDER
from jaxrl_llm.errors import UserError, run_main
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf
from jaxrl_llm.structs import Config
from jaxrl_llm.tools import __main__ as tools
from jaxrl_llm.tools import serve_vllm

MODEL = Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic"
SUMS = [{"prompt": [{"role": "user", "content": f"{a}+{a}"}], "answer": str(2 * a)} for a in range(10, 18)]
TINY = (
    "num_steps=1 prompts_per_step=8 prompts_per_update=8 group_size=2 optim.warmup_steps=0 "
    "data.source=sums.jsonl eval=none log.to=() health.self_test=False "
)
SFT = "data.source=answers.jsonl eval=none prompts_per_step=8 "
# A run that compiles the programs of tests/programs/test_steps.py, as far as it can.
SMALL = "mesh.fsdp=1 group_size=4 rollout.max_completion_tokens=6 optim.decay=constant reward.timeout=0. "
MINE = "reward.weights=1. reward.functions=mine.f "
VLLM = "engine.managed=false engine.servers=http://127.0.0.1:9 "

Change = Callable[[Path], Any]


def table(names: str, rows: dict[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Cases by the sentence that says what is wrong."""
    return pytest.mark.parametrize(names.split(), list(rows.values()), ids=list(rows))


def command(text: str, config: str = "grpo") -> list[str]:
    """Returns the command line with the fields of a text such as "seed=1 kl.coef=0"."""
    fields = [f"--config.{part}" for part in text.split()]
    return ["--config", str(FOLDER / f"{config}.py"), "--workdir", "run", *fields]


def config_of(text: str, config: str = "grpo") -> Config:
    usual = SFT if "sft" in config else TINY
    return parse_arguments("test", "", command(usual + text, config)).config


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of those that are files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with eight sums. A module mine.py in it can be imported."""
    rows = [json.dumps(row) for row in SUMS]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    (tmp_path / "answers.jsonl").write_text("\n".join(rows).replace('"answer"', '"completion"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.fixture
def refused(refused, place):
    """As in conftest.py. The block must also leave all files as they are."""

    @contextmanager
    def unwritten(*words: str):
        before = contents(place)
        with refused(*words):
            yield
        assert contents(place) == before

    return unwritten


@pytest.fixture
def failed(monkeypatch, capfd, wording):
    """Returns `failed(program, argv, *words)`: the program must end with the exit code and one line with the words.

    The function returns what the program printed to its standard output.
    """

    def run(program, argv: list[str], *words: str, code: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", [program.__name__, *argv])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            run_main(program.main)
        output, line = capfd.readouterr()
        assert stopped.value.code == code
        assert line.startswith("error: ") and line.endswith("\n") and line.count("\n") == 1, line
        assert [word for word in words if word not in line] == [], line
        wording(line)
        return output

    return run


def test_a_program_refuses_in_one_line_and_writes_nothing(place, failed):
    (place / "mine.py").write_text("import sys\ndef rows():\n    sys.exit()\n")
    before = contents(place)
    failed(train, command(TINY + "nun_steps=1"), "config.nun_steps")
    failed(train, command(TINY + "data.source=mine.rows"), "mine.py:3")  # it would end the program without a word
    assert contents(place) == before


# ---- the recipe


WRONG = {  # config -> changed fields -> field that the line names
    "grpo": {
        "nun_steps=1": "nun_steps",  # an unknown field
        "optim.xyz=1": "optim.xyz",  # a field like no other
        "optimizer.eps=1": "optimizer",  # an unknown section
        "adapters.rank=8": "adapters",  # a section that is not there
        "optim=1": "optim",  # a section set like a field
        "num_steps=1.5": "num_steps",  # a fraction for a count
        "num_steps=0": "num_steps",  # a number below its range
        "rollout.top_p=2.": "rollout.top_p",  # a number above its range
        "rollout.temperature=0.": "rollout.temperature",  # a number just outside its range
        "kl.coef=1e999": "kl.coef",  # an infinite number
        "model.dtype=float64": "model.dtype",  # a choice that is not offered
        "advantage.normalize=all": "advantage.normalize",  # an argument with a choice that is not offered
        "loss.name=ppo_clap": "loss.name",  # an unknown loss
        "loss.name=topr": "loss.clip_",  # an argument that the loss does not take
        "prompts_per_step=12": "prompts_per_step",  # a rollout that is no multiple of an update
        "microbatch=3": "microbatch",  # a microbatch that does not divide the update
        "group_size=1": "group_size",  # a group of one with grpo
        "kl.placement=reward kl.estimator=k1": "kl.placement",  # a KL penalty divided by its own deviation
        "schedule_steps=1 num_steps=2": "num_steps",  # more steps than a schedule that ends at 0
        "kl.placement=loss kl.estimator=k1": "kl",  # k1 in the loss
        "data.today=24.11.2026": "data.today",  # a day that is no date
        "loss.name=importance_ratio": "loss.name",  # a helper for a loss
        "kl.adaptive.target=0.1 kl.adaptive.horizon=3": "kl.adaptive.horizon",  # a KL horizon of less than an update
        "kl.end=0.1": "kl.end",  # an end of a constant coefficient
        "kl.adaptive.horizon=9000": "kl.adaptive.target",  # a horizon without a KL target
        "optim.decay=constant optim.end=1e-6": "optim.end",  # an end of a constant rate
        "importance.action=none importance.level=sequence": "importance.level",  # a level of no correction
        "importance.action=truncate": "importance.action",  # a correction of what the very policy sampled
        "importance.high=5.": "importance.high",  # a bound where the very policy samples
        "model.dtype=bfloat16 importance.level=geometric": "importance.level",  # a level where the very policy samples
        "rollout.max_lag=1 num_steps=3 importance.action=none": "importance.action",  # older weights and no correction
        "rollout.top_k=1": "rollout.top_k",  # a group that is always the same
        "importance.low=0.5": "importance.low",  # a lower bound of no mask
        "advantage.epsilon=0.": "advantage.epsilon",  # a division by the deviation of equal rewards
        "loss.clip_low=-0.1": "loss.clip_low",  # a negative clip
        "reward.weights=(0.,0.)": "reward.weights",  # rewards of no weight
        "kl.placement=reward kl.estimator=k3_weighted advantage.normalize=none": "kl.estimator",
        "kl.placement=reward kl.adaptive.target=0.1 kl.decay=linear advantage.normalize=none": "kl.adaptive",
        "entropy.coef=0.2 entropy.adaptive.target=0.5 entropy.adaptive.step=0.1 entropy.adaptive.most=0.1":
            "entropy.adaptive.most",
        "mask.off_policy=0.1": "mask.off_policy",  # an off-policy mask where nothing is off-policy
        "loss.delta=1.1": "loss.delta",  # a bound below the upper clip
        "importance.action=mask importance.low=2. importance.high=1.": "importance.low",
        "reward.overlong_tokens=999": "reward.overlong_tokens",  # an over-long penalty of more than a completion
        "kl.placement=none": "kl.placement",  # a KL coefficient without a place
        "aggregate.mode=constant": "aggregate.constant_length",  # a constant to divide by that is not given
        "aggregate.constant_length=9": "aggregate.constant_length",  # a constant that is not used
        "reward.functions=countdown.accuracy": "reward",  # more weights than reward functions
        "reward.functions=(\"gsm8k.accuracy(method='strict')\",'gsm8k.accuracy')": "reward.functions",
        "reward.weights=1. reward.functions=gsm8k.accuracy(way='strict')": "reward.functions",
        "eval.every=1 eval.function=gsm8k.accuracy(x)": "eval.function",  # a judge whose argument is no plain value
        "reward.weights=1. reward.functions=lab.x": "'lab.x'",  # a reward in a module that is not there
        "reward.weights=1. reward.functions=maths.accuracy": "math.accuracy?",  # a module by a near name
        "data.source=arithmetic.trian": "data.source",  # an unknown task
        "eval.every=1 eval.source=countdown.exam": "eval.source",  # an unknown task to be graded by
        "log.profile=3": "log.profile",  # steps to trace, of which there is no last
        "log.profile=0:1": "log.profile",  # a trace of step 0
        "data.source=my/rows.xlsx": "data.source",  # a data file of another kind
        "eval.every=1 eval.convert=gsm8k.covert": "eval.convert",  # an unknown conversion of the problems
        "mesh.data=0": "mesh.data",  # a mesh axis of no device
        "optim.warmup_steps=1 optim.warmup_ratio=0.1": "optim.warmup_steps",  # a warm-up that is given in two ways
    },
    "grpo_vllm": {
        "engine.servers=http://a": "engine.managed",  # a server of its own and those of others
        "engine.managed=false": "engine.managed",  # no server at all
        VLLM + "engine.servers=a:8000": "engine.servers",  # a server that is no address
        VLLM + "engine.servers=('http://127.0.0.1:1','http://localhost:1/')": "engine.servers",  # twice
        VLLM + "engine.servers=http://127.0.0.1:80a0": "engine.servers",  # a port that is no number
        VLLM + "engine.servers=http://[1": "engine.servers",  # half of an address
        VLLM + "engine.servers=http://far:8000": "engine.push",  # a file for another host
        VLLM + "engine.push=http": "engine.push",  # weights over HTTP from nowhere
        VLLM + "engine.push=http engine.push_address=0.0.0.0": "engine.push",  # weights over HTTP from everywhere
        "engine.python=nowhere": "engine.python",  # an interpreter that is not there
        VLLM + "engine.python=mine": "engine.python",  # an interpreter for somebody else's server
        VLLM + "engine.server_args=('--seed=1',)": "engine.server_args",  # arguments for somebody else's server
        "engine.timeout=0.": "engine.timeout",  # a request that may take no time
        "rollout.temperature=0.005": "rollout.temperature",  # vLLM samples at 0.01 then
        "rollout.temperature=2.5": "rollout.temperature",  # vLLM refuses each request
        "rollout.max_lag=1 rollout.resample_rounds=1 num_steps=3 reward.timeout=0.": "reward.timeout",
        "rollout.partial=2 num_steps=3": "rollout.partial",  # partial rollouts
    },
    "ppo": {"critic.optim.decay=constant critic.optim.end=1e-5": "critic.optim.end"},
    "sft": {
        "model.hidden_size=132": "model.hidden_size",  # heads of an odd size
        "model.num_key_value_heads=3": "model.num_key_value_heads",  # key heads that do not divide the heads
        "group_size=8": "group_size",  # a field of another trainer
        "model.path=lab/model model.hidden_size=64": "model.hidden_size",  # the size of a model that is there
    },
    "pictures_sft": {"model.vision_config.hidden_size=1": "model.vision_config.hidden_size"},  # heads of no size
}  # fmt: skip


@pytest.mark.parametrize(("config", "text", "field"), [
    (config, text, field) for config, rows in WRONG.items() for text, field in rows.items()
])  # fmt: skip
def test_a_config_is_refused(refused, config, text, field):
    with refused(field):
        recipes.read_either(config_of(text, config))


def test_a_config_of_the_other_trainer_is_refused(refused):
    for config, read, program in (("grpo", recipes.read_sft, "jaxrl train"), ("sft", recipes.read, "jaxrl sft")):
        with refused(program):
            read(config_of("", config))


COMPLETE_BUT = {  # change of configs/grpo.py -> field that the line names
    "del c.seed": "seed",
    "del c.optim": "optim.learning_rate",
    "del c.data.chat_template_args": "data.chat_template_args",
    "del c.data.chat_template_args; c.data.chat_template_args = 1": "data.chat_template_args",
    "del c.loss.name": "loss.name",
    "c.loss = dict(name=1)": "loss.name",
    "c.sede = 1": "sede",
    "del c.seed; c.seed = '0'": "seed",
    "c.advantage = dict(name='gae')": "critic",
    "c.advantage = dict(name='distillation')": "advantage.name",
    "c.teachers = dict(ref=dict(path='x'))": "teachers.ref",
    "c.teachers = dict(second=dict(path='x'))": "teachers.second",
    "c.advantage = dict(name='distillation'); c.teachers = dict(teacher=dict(path=''))": "teachers.teacher.path",
    "c.advantage = dict(name='gdpo'); c.kl.placement = 'reward'": "kl.placement",
    "c.advantage = dict(name='pass_at_k', k=9)": "advantage.k",
    "c.advantage = dict(name='pass_at_k', k=2); c.reward.overlong_tokens = 4": "reward.overlong_tokens",
    "c.advantage = dict(name='reinforce_pp_baseline'); c.kl.placement = 'reward'": "kl.placement",
    "c.kl.refresh = dict(every=1, mix=1.0)": "kl.refresh.every",
    "c.kl.refresh = dict(every=1); c.epochs = 2; c.kl.placement = 'reward'; "
    "c.advantage = dict(name='rloo')": "kl.refresh",
    "c.loss = dict(name='reinforce'); c.epochs = 2": "loss.name",
    "c.loss = dict(name='gmpo'); c.advantage = dict(name='reinforce_pp')": "loss.name",
    "c.loss = dict(name='gspo')": "aggregate.mode",
    "c.loss = dict(name='gspo', level='token')": "aggregate.mode",
    "c.loss = dict(name='gmpo')": "aggregate.mode",
    "c.loss = dict(name='gspo'); c.aggregate.mode = 'sequence_mean'; c.mask.top_entropy = 0.2": "mask.top_entropy",
    "c.advantage = dict(name='distillation'); c.teachers = dict(teacher=dict(path='x')); "
    "c.rollout.resample_rounds = 1": "rollout.resample_rounds",
    "c.group_size = 1; c.rollout.resample_rounds = 1; c.advantage = dict(name='remax')": "rollout.resample_rounds",
    "c.rollout.partial = 65": "rollout.partial",
    "c.rollout.partial = 4; c.rollout.resample_rounds = 1": "rollout.partial",
    "c.rollout.partial = 4; c.engine.drafts = 2": "engine.drafts",
    "c.rollout.partial = 4; c.importance.action = 'none'": "importance.action",
    "c.loss = dict(name='ppo_clip', clip_low='a')": "loss.clip_low",
    "c.advantage = dict(name='grpo_turns')": "advantage.name",
    "c.advantage = dict(name='grpo_turns'); c.group_size = 1": "group_size",
}  # fmt: skip


@pytest.mark.parametrize(("change", "field"), COMPLETE_BUT.items())
def test_a_complete_config_is_refused(refused, change, field):
    c = configs.load("grpo")
    exec(change, {"c": c})
    with refused(f"config.{field}"):
        recipes.read(c)


@table("text", {
    "that raises": ("1 / 0\n",),
    "that is no Python": ("def f(:\n",),
    "without the function": ("def grade(): pass\n",),
})  # fmt: skip
def test_a_reward_module_is_refused(place, refused, text):
    (place / "mine.py").write_text(text)
    with refused("config.reward.functions 'mine.f'"):
        recipes.read(config_of(MINE))


def test_a_reward_of_another_program_is_refused(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys)
    with refused("config.reward.functions '__main__.score_'"):
        recipes.read(config_of("reward.weights=1. reward.functions=__main__.score_"))


# ---- the command line and the config file


@table("argv word", {
    "no config": ([], "--config"),
    "an unknown argument": (["--config", "grpo", "--steps=1"], "--steps=1"),
    "an argument without its value": (["--config", "grpo", "--workdir"], "--workdir"),
    "a config file that is not there": (["--config", "nowhere.py"], "--config nowhere.py"),
    "a shipped config by a wrong name": (["--config", "gropo"], "--config gropo"),
    "a file of a repository which is elsewhere": (["--config", "configs/dapo.py"], "--config configs/dapo.py"),
    "a config of one's own without its ending": (["--config", "./mine"], "mine.py"),
    "a config of one's own by a wrong name": (["--config", "min.py"], "mine.py"),
    "a field without its value": (["--config", "grpo", "--config.num_steps"], "--config.num_steps"),
})  # fmt: skip
def test_a_command_is_refused_for(place, refused, argv, word):
    (place / "mine.py").touch()
    with refused(word):
        parse_arguments("test", "", argv)


@table("text words", {
    "that raises": ("x = 1\nx / 0\n", ("bad.py:2",)),
    "that is no Python": ("def get_config(:\n", ("bad.py",)),
    "that imports what is not there": ("import lab_x\n", ("bad.py:1",)),
    "that ends the program": ("import sys\nsys.exit(3)\n", ("bad.py:2",)),
    "that sets a value of another type":
        ("from jaxrl_llm.configs import grpo\n\ndef get_config():\n    c = grpo.get_config()\n    c.optim.end = 'x'\n",
         ("config.optim.end", "bad.py:5")),
    "without get_config": ("c = 1\n", ("bad.py", "get_config")),
    "that returns no ConfigDict": ("def get_config():\n    return {}\n", ("bad.py", "ConfigDict")),
})  # fmt: skip
def test_a_config_file_is_refused(place, refused, text, words):
    (place / "bad.py").write_text(text)
    with refused(*words):
        configs.load("bad.py")


def test_a_server_of_vllm_that_cannot_serve_is_refused(refused, monkeypatch):
    def start(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["serve-vllm", "--model", "m", *words])
        serve_vllm.main()

    for argv, words in (
        (["--host", "0.0.0.0"], ("--host 0.0.0.0", "--public")),
        (["--", "--host=0.0.0.0"], ("--host=0.0.0.0",)),
        (["--python", "false"], ("--python",)),  # a program without vLLM
    ):
        with refused(*words):
            start(*argv)
    monkeypatch.setattr(serve_vllm, "check_python", lambda *_: None)
    with refused("--port 99999"):
        start("--port", "99999")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}"):
            start("--port", str(port))


# ---- devices, models and rows


def test_determinism_is_refused_where_it_would_come_too_late(refused, monkeypatch):
    jax.devices()
    config = config_of("deterministic=true model.path=./nowhere")
    with refused("config.deterministic"), build(config, "run"):
        pass
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")  # before JAX was used
    with refused("model.path"), build(config, "run"):
        pass


def test_processes_that_do_not_know_of_each_other_are_refused(refused, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with refused("--distributed"), build(config_of(""), "run"):
        pass
    with refused("--distributed"):
        meshes.make_mesh(data=1, fsdp=1, tensor=1)


def test_rows_and_models_in_a_store_that_is_not_read_are_refused(place, refused):
    for text, field in (("data.source=az://b/rows.jsonl", "data.source"), ("model.path=hdfs://b/model", "model.path")):
        with refused(field), build(config_of(text), "run"):
            pass


@table("sizes words", {
    "larger than the devices": ((1, 8, 2), "mesh (data 1 x fsdp 8 x tensor 2)"),
    "that leaves devices idle": ((1, -1, 3), "mesh (data 1 x fsdp 2 x tensor 3)"),
    "with two axes for all devices left": ((-1, -1, 1), "config.mesh.data = config.mesh.fsdp"),
})  # fmt: skip
def test_a_mesh_is_refused(refused, sizes, words):
    with refused(words):
        meshes.make_mesh(**dict(zip(meshes.AXES, sizes, strict=True)))


@table("config text field", {
    "a top-k that keeps all tokens": ("grpo", "rollout.top_k=18 mesh.fsdp=1", "config.rollout.top_k"),
    "a hub id that cannot be had": ("grpo", "model.path=lab/nothing", "model.path"),
    "too long completions": ("grpo", "rollout.max_completion_tokens=510", "config.rollout.max_completion_tokens"),
    "a batch that the mesh does not divide":
        ("grpo", "prompts_per_step=4 prompts_per_update=4", "config.prompts_per_update"),
    "a microbatch that the mesh does not divide": ("grpo", "microbatch=4", "config.microbatch"),
    "a column of a reward": ("grpo", MINE, "column 'solution'"),
    "a column of the judge": ("grpo", "eval.every=1 eval.source=exam.jsonl eval.function=math.accuracy", "eval.source"),
    "over-long completions alone": ("sft", "rollout.max_completion_tokens=1", "rollout.max_completion_tokens"),
    "too long completions to learn": ("sft", "rollout.max_completion_tokens=512", "rollout.max_completion_tokens"),
    "rows without completions": ("sft", "data.source=sums.jsonl", "data.completion_column"),
    "a column of the judge, in fine-tuning":
        ("sft", f"model.path={MODEL} eval.every=1 eval.source=exam.jsonl eval.function=math.accuracy", "eval.source"),
})  # fmt: skip
def test_a_run_is_refused_before_it_writes_for(place, refused, monkeypatch, config, text, field):
    (place / "mine.py").write_text("def f(completions, solution):\n    return [1.0] * len(completions)\n")
    (place / "exam.jsonl").write_text('{"prompt": "1+1", "solution": "2"}\n')
    if field in ("column 'solution'", "eval.source"):
        monkeypatch.setattr(hf, "load_params", None)  # rows come before weights
    program = sft if config == "sft" else train
    with refused(field), program.build(config_of(text, config), "run"):
        pass


def a_run(folder: Path, **changes: Any) -> None:
    """Writes the first file of a run into its workdir, with some fields changed."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("").to_dict() | changes))


def a_folder(folder: Path, file: str, text: str) -> None:
    folder.mkdir()
    (folder / file).write_text(text)


@table("make workdir words", {
    "that is a file": (Path.touch, "run", "--workdir run"),
    "in a bucket to which Orbax does not write": (Path.mkdir, "s3://b/run", "--workdir"),
    "in a store that is not written": (Path.mkdir, "az://b/run", "--workdir"),
    "with a name that the locale cannot read": (Path.mkdir, "r\udcc3\udcbcn", "--workdir"),
    "below a file": (Path.touch, "run/1/2", "--workdir run/1/2"),
    "that holds something else": (lambda run: a_folder(run, "thesis.tex", "!"), "run", "--workdir run"),
    "that holds the checkpoints of something else":
        (lambda run: (run / "checkpoints" / "9").mkdir(parents=True), "run", "--workdir run"),
    "of a run with another config": (lambda run: a_run(run, seed=7), "run", "config.seed"),
    "of a run with fewer fields": (lambda run: a_run(run, kl={}), "run", "config.kl.coef"),
})  # fmt: skip
def test_a_workdir_is_refused(place, refused, make, workdir, words):
    make(place / "run")
    with refused(words), build(config_of(""), workdir):
        pass


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def configured(**values: Any) -> Change:
    """Changes config.json. The value None takes a field out."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def adapter(folder: Path) -> None:
    """Makes the folder one of PEFT."""
    without("config.json")(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "lab/base"}')


# tests/models/test_hf.py has the other faults of a folder.
@table("spoil words", {
    "with a list for config.json": (written("config.json", "[]"), "model/config.json"),
    "without weights": (without("model.safetensors"), "model.safetensors"),
    "of images, and new":
        (configured(model_type="new", vision_config={}, text_config={"model_type": "qwen3"}), "qwen3"),
    "of images, and unknown": (configured(model_type="new", vision_config={}), "'new'"),
    "that is an adapter": (adapter, "adapters.path"),
    "with a torn tokenizer": (written("tokenizer.json", "{"), "tokenizer.json"),
})  # fmt: skip
def test_a_model_is_refused(place, refused, spoil, words):
    shutil.copytree(MODEL, place / "model")
    spoil(place / "model")
    with refused(words):
        folder = hf.find_checkpoint("./model")
        model, _ = hf.load_model(folder), hf.load_tokenizer(folder)
        hf.load_params(folder, model, meshes.make_mesh(data=1, fsdp=1, tensor=1))


@table("spoil words", {
    "with the tokenizer of another": (configured(vocab_size=5), "config.json"),
    "without the chat template that chats need": (without("chat_template.jinja"), "sums.jsonl"),
})  # fmt: skip
def test_a_model_that_does_not_fit_the_rows_is_refused(place, refused, spoil, words):
    shutil.copytree(MODEL, place / "model")
    spoil(place / "model")
    with refused(words), build(config_of("model.path=./model"), "run"):
        pass


@table("spoil field", {
    "of adapters": (adapter, "critic.path"),
    "with fewer positions than the texts need": (configured(max_position_embeddings=16), "config.critic.path"),
})  # fmt: skip
def test_a_critic_is_refused(place, refused, spoil, field):
    shutil.copytree(MODEL, place / "model")
    spoil(place / "model")
    critic = config_of("critic.path=./model critic.warmup_steps=0 critic.optim.warmup_steps=0", "ppo")
    with refused(field), build(critic, "run"):
        pass


@table("argv words", {
    "no task": ("", "--task"),
    "a model and a run": ("--task=arithmetic --run=run", "--model"),
    "an unknown task": ("--task=arithmetik", "--task 'arithmetik'"),
    "the problems of a task": ("--task=arithmetic.held_out", "--task 'arithmetic.held_out'"),
    "a task like no other": ("--task=lab.exam", "--task 'lab.exam'"),
    "a file without a judge": ("--task=sums.jsonl", "--function"),
    "an unknown judge": ("--task=sums.jsonl --function=math.acuracy", "--function 'math.acuracy'"),
    "several samples at temperature 0": ("--task=arithmetic --samples=4", "--samples"),
    "no problem": ("--task=arithmetic --problems=0", "--problems"),
    "a temperature below 0": ("--task=arithmetic --temperature=-1", "--temperature"),
    "a word for a number": ("--task=arithmetic --batch=all", "--batch"),
    "an unknown argument": ("--task=arithmetic --tempo=1", "--tempo=1"),
    "template arguments that are no object": ("--task=arithmetic --chat-template-args=[1]", "--chat-template-args"),
    "an argument that the chat template does not read": ('--task=arithmetic --chat-template-args={"x":1}', "'x'"),
    "an over-long prompt": ("--task=sums.jsonl --function=math.accuracy --max-prompt-tokens=2", "max_prompt_tokens"),
    "a column that no row has": ("--task=answers.jsonl --function=math.accuracy", "--answer-column"),
})  # fmt: skip
def test_evaluation_is_refused_for(refused, monkeypatch, argv, words):
    monkeypatch.setattr(sys, "argv", ["evaluate", f"--model={MODEL}", *argv.split()])
    with refused(words):
        evaluate.main()


# ---- outputs of tools


@table("program argv", {
    "a page of a step": ("replay", "--run run --step 1 --to"),
    "the arrays of a step": ("replay", "--run run --step 1 --export"),
    "a page of runs": ("report", "run --to"),
    "a page of an evaluation": ("evaluate", "--run run --page"),
    "a model": ("export", "run --to"),
    "a config": ("translate", "trl.py --to"),
})  # fmt: skip
def test_an_output_that_cannot_be_written_is_refused_before_the_work_for(place, refused, monkeypatch, program, argv):
    """The run does not exist, so a program that begins its work is refused for another reason."""
    (place / "folder.py").mkdir()
    (place / "folder.py" / "file.py").touch()
    flag = argv.split()[-1]
    outputs = ["gs://b/x.py", "folder.py"]
    outputs += ["folder.py/file.py/x.py"] + ["nowhere/x.py"] * (program != "export")
    for output in outputs:
        monkeypatch.setattr(sys, "argv", [f"jaxrl {program}", *argv.split(), output])
        with refused(flag):
            tools.program(program)()


# ---- runs that stop


def test_a_run_stops_for_a_reward_that_raises(place, failed):
    (place / "mine.py").write_text("def f(completions, answer):\n    raise ValueError('no\\nunit')\n")
    failed(train, command(TINY + SMALL + MINE), "mine.f", "mine.py:2")


NOT_FINITE = """
def f(logprobs, batch, *, clip_low, clip_high, delta):
    return logprobs * float("nan"), {}
"""


def test_a_run_without_a_finite_gradient_stops(place, failed):
    (place / "mine.py").write_text(NOT_FINITE)
    text = "loss.name=mine.f num_steps=3 optim.learning_rate=1. checkpoint.every=1 health.max_skipped=2"
    output = failed(train, command(TINY + SMALL + text), "max_skipped", "run/checkpoints/1", code=3)
    assert "\nwarning: optim.learning_rate = 1 is " in output  # the banner has the advice
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record["updates/skipped_in_a_row"] for record in records] == [1, 2]
