"""Scripts in the forms that trainers publish: no key of them is lost, and each becomes exactly one thing."""

from __future__ import annotations

import re
from itertools import product

import pytest
from test_translate import (
    hub_installed,  # noqa: F401 (a fixture)
    made_of,
    read_and_translate,
)
from test_translated import EXPECTED, FILES

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools.translate import __main__ as program
from jaxrl_llm.tools.translate import launchers, readers
from jaxrl_llm.tools.translate.outcome import Unread

TRL = "--model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy_reward think_format_reward --max_steps 20"
KEY = re.compile(r"(?<![\w./'\"-])[+~]*([a-z_]\w*(?:\.\w+)+)=(?!=)|(?<![\w-])--([a-z_]+)(?=[ =\n])")


def keys_in(text: str) -> set[str]:
    """Returns what looks like a key of a trainer in a script, found in its text by itself."""
    text = re.sub(r"`#[^`]*`", "", text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found = {dotted or flag for line in lines for dotted, flag in KEY.findall(f"{line}\n".replace('"', " "))}
    return {key.removeprefix("no_") for key in found if "." in key or key in readers.TRL_FLAGS}


@pytest.mark.parametrize("file", [file for file in EXPECTED if file.endswith(".sh")])
def test_each_key_of_a_script_is_read_or_named(file):
    source = readers.read(FILES / file)
    # What the script says and what was read are the same keys, but for those that are named as lost.
    keys = {key.rpartition(".")[2] if key.startswith(launchers.LAUNCHERS) else key for key in source.keys}
    assert {key for key in keys_in((FILES / file).read_text()) - keys if key not in " ".join(source.lost)} == set()
    assert all(isinstance(value, Unread) or "$" not in str(value) for value in source.keys.values())


CALL = "algorithm.adv_estimator=grpo data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=8"
CALL += " actor_rollout_ref.model.path=m trainer.total_training_steps=9"
TRL = "--model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy_reward --max_steps 9"
PARTLY_READ = {  # a script, fields of its config, and what is named as lost
    "if blocks.sh": (
        f"""ENGINE=${{1:-vllm}}
USE_KL=1
ARGS=()
if [ "$USE_KL" = "1" ]; then
    ARGS+=(actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01)
else
    ARGS+=(actor_rollout_ref.actor.entropy_coeff=0.1)
fi
if [[ -f extra.sh ]]; then ARGS+=(data.seed=3); fi
case $ENGINE in
    vllm) ARGS+=(actor_rollout_ref.rollout.gpu_memory_utilization=0.6) ;;
    sglang) ARGS+=(actor_rollout_ref.rollout.multi_stage_wake_up=True) ;;
esac
if [ "${{NODE_RANK}}" -eq 0 ]; then
    ray start --head
    python3 -m verl.trainer.main_ppo {CALL} "${{ARGS[@]}}" actor_rollout_ref.rollout.name=$ENGINE
else
    ray start --address "$MASTER"
fi
""",
        {"kl.coef": 0.01, "kl.placement": "loss"},
        [
            "${ARGS: a branch decides}: not a key with a value that the script says",
            "line 7: actor_rollout_ref.actor.entropy_coeff=0.1",
            "line 9: data.seed=3",
            "line 12: actor_rollout_ref.rollout.multi_stage_wake_up=True",
        ],
    ),
    "torchrun in a comment's way.sh": (
        f"""torchrun --nproc_per_node=8 --nnodes 2 \\
    trl/scripts/grpo.py {TRL} \\
    --per_device_train_batch_size 2 \\
    # --num_generations 16 \\
    --beta 0.01
""",
        {"kl": None, "prompts_per_step": 4},
        ["line 5: --beta"],
    ),
}


@pytest.mark.parametrize(("text", "fields", "lost"), PARTLY_READ.values(), ids=PARTLY_READ)
def test_what_a_branch_or_a_comment_keeps_from_a_command_is_named_as_lost(text, fields, lost, tmp_path):
    source, made = read_and_translate(tmp_path, "run.sh", text)
    assert {name: made.fields()[name] for name in fields} == fields and [*source.lost] == lost


BEGIN = """
import os, argparse, utils, torch
from dataclasses import dataclass, field
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer, get_peft_config, get_quantization_config
from trl.rewards import accuracy_reward
from datasets import load_dataset, concatenate_datasets
from utils import build
name, extra = "Qwen/Qwen3-0.6B", {}
args = GRPOConfig("out", max_steps=5)
rows = load_dataset("a/b", split="train")
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16, device_map="auto")
tok = AutoTokenizer.from_pretrained(name)
"""
END = """
trainer = GRPOTrainer(model, accuracy_reward, args=args, train_dataset=rows, processing_class=tok, **extra)
trainer.train()
"""
LORA = "LoraConfig(r=4, target_modules=['q_proj'])"
WRAPPED = f"model = get_peft_model(model, {LORA})"
MODEL, ADAPTERS = ["adapters", "model.path"], {"adapters.rank": 4, "adapters.alpha": 8.0, "adapters.targets": "q_proj"}
ALL = ["advantage", "aggregate", "data", "kl", "loss", "optim", "reward", "rollout"]
OBJECTS = [  # what a script does before it trains, the fields that it decides, and what is unknown
    ("", {"model.path": "Qwen/Qwen3-0.6B", "data.source": "a/b@train", "adapters.rank": None,
          "model.dtype": "bfloat16"}, []),
    # the model between loading and trainer
    (WRAPPED, ADAPTERS | {"adapters.base_dtype": ""}, []),
    (f"extra['peft_config'] = {LORA}", ADAPTERS, []),
    ("from unsloth import FastLanguageModel\nmodel, tok = FastLanguageModel.from_pretrained('a/b', dtype=None)\n"
     "model = FastLanguageModel.get_peft_model(model, r=4, random_state=1)",
     {"model.path": "a/b", "adapters.rank": 4, "adapters.alpha": 16.0, "adapters.base_dtype": "int8"}, []),
    ("four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)\n"
     "model = AutoModelForCausalLM.from_pretrained(name, quantization_config=four)\n"
     f"model = prepare_model_for_kbit_training(model)\n{WRAPPED}", ADAPTERS | {"adapters.base_dtype": "int8"}, []),
    ("q = get_quantization_config(4)\n"
     f"model = AutoModelForCausalLM.from_pretrained(name, quantization_config=q)\n{WRAPPED}",
     ADAPTERS, ["adapters.base_dtype"]),
    ("model = PeftModel.from_pretrained(model, 'a/adapter')", {"adapters.path": "a/adapter"},
     ["adapters.alpha", "adapters.rank", "adapters.rs", "adapters.targets"]),
    ("model = torch.compile(model).to('cuda')\nmodel.config.use_cache = False\nprint(model)", {}, []),
    ("args.fp16 = torch.cuda.is_available()", {}, ["fp16"]),
    *((line, {}, MODEL) for line in (
        f"if os.environ.get('LORA'):\n    {WRAPPED}", f"model.add_adapter({LORA})", "build(model)",
        "model = build(name)",
        "from trl import SFTTrainer\nfirst = SFTTrainer(model)\nfirst.train()\nmodel = first.model",
        "for _, p in model.named_parameters():\n    p.requires_grad = False",
        "match name:\n    case 'a':\n        model = build(model)", "model.resize_token_embeddings(9)")),
    (f"def load():\n    global model\n    {WRAPPED}\nload()",
     ADAPTERS, []),
    (f"USE = 1 + 1\nif USE > 1 and True:\n    {WRAPPED}\nelse:\n    model = build(model)", ADAPTERS, []),
    ("extra['peft_config'] = get_peft_config(4)", {},
     ["adapters", "adapters.alpha", "adapters.rank", "adapters.targets"]),
    (f"if os.environ.get('LORA'):\n    extra['peft_config'] = {LORA}", {},
     ["adapters", "adapters.alpha", "adapters.rank", "adapters.targets"]),
    # the tokenizer
    ("tok.chat_template = 'x'", {}, ["model.path"]), ("tok = AutoTokenizer.from_pretrained('c/d')", {}, ["model.path"]),
    ("tok.pad_token = tok.eos_token", {}, []),
    ("from vllm import SamplingParams\nSamplingParams(stop=[tok.eos_token])", {}, []),
    ("from vllm import serve\nserve(tok)", {}, ["model.path"]),
    # arguments
    ("def beta(x=0.1): return x\nargs.beta = beta()", {"kl.coef": 0.1}, []),
    ("utils.beta = 0.1", {"kl": None}, []),
    ("if os.environ.get('KL'):\n    args.beta = 0.1", {}, ["kl"]),
    ("x = 0.1\nfor i in range(3):\n    x = 2 * x\nargs.beta = x", {}, ["kl"]),
    # environment variables: the default of one that nothing sets, and the value of one that the script sets
    ("args.beta = float(os.getenv('KL', 0.1))", {"kl.coef": 0.1}, []),
    ("os.environ['KL'] = '0.3'\nargs.beta = float(os.environ.get('KL', 0.1))", {"kl.coef": 0.3}, []),
    ("os.environ['KL'] = '0.3'\nargs.beta = float(os.environ['KL'])", {"kl.coef": 0.3}, []),
    ("args.beta = 0.1 * int(os.environ.get('WORLD_SIZE', 1))", {}, ["kl"]),
    ("args.beta = float(os.environ['KL'])", {}, ["kl"]),
    ("setattr(args, 'beta', 0.1)", {}, ["trainer.args.setattr()"]),
    ("parser = argparse.ArgumentParser()\nparser.add_argument('--beta', type=float, default=0.2)\n"
     "parser.add_argument('--lr', required=True)\n"
     "cli = parser.parse_args()\nargs.beta, args.learning_rate = cli.beta, cli.lr",
     {"kl.coef": 0.2}, ["optim.learning_rate"]),
    ("@dataclass\nclass A:\n    b: float = field(default=0.3)\n    c: float = field(metadata={})\n"
     "a = A()\nargs.beta, args.temperature = a.b, a.c", {"kl.coef": 0.3}, ["rollout.temperature"]),
    *((f"def make():\n    return [0.4]\n@dataclass\nclass A:\n    b: list = field(default_factory={factory})\n"
       f"a = A()\na.b.append(0.5)\nargs.beta = a.b[{index}]", {"kl.coef": beta}, [])
      for factory, index, beta in (("lambda: [0.4, 1.0]", 0, 0.4), ("make", 0, 0.4), ("list", 0, 0.5))),
    *((f"more = dict(beta=0.1)\n{line}\nargs.beta = more['beta']", {}, ["kl"])
      for line in ("more.pop('beta')", "del more['beta']", "more.update(beta=build(1))", "more.update(build(1))")),
    # an entry of a list, an operator, and what only looks like a value
    ("xs = [0.1]\nxs[0] = build(1)\nargs.beta = xs[0]", {}, ["kl"]), ("args.beta = +0.1", {}, ["kl"]),
    ("@dataclass\nclass A:\n    c: str\na = A()\nargs.beta = {'c': 0.1}[a.c]", {}, ["kl"]),
    ("names = [build(1)]\nif name not in names:\n    args.beta = 0.1", {}, ["kl"]),
    ("vars(args)['beta'] = 0.1", {}, ["trainer.args.beta="]),
    ("class C:\n    beta = 0.1\nC.beta = 0.2\nargs.beta = C.beta", {"kl.coef": 0.2}, []),
    # functions of other packages whose names are those of quiet ones
    *((f"{line}(model)", {}, MODEL) for line in ("from utils import train\ntrain", "from .logger import run\nrun")),
    # rows; of a chain of calls each is followed once
    (f"rows = rows{'.map(len)' * 40}", {"data.convert": "my_data.convert"}, ["data.source"]),
    ("rows = load_dataset('a/b', data_dir='c', split='train')", {}, ["data.convert", "data.source"]),
    ("rows = rows.shuffle(seed=1).remove_columns(['x'])", {"data.source": "a/b@train", "data.convert": ""}, []),
    *((f"rows = load_dataset('a/b'{rows}", {}, ["data.convert", "data.source"])
      for rows in (", split='train[:9]')", ")[args.split]", ", args.name)")),
    ("rows = load_dataset('json', data_files='a.jsonl', split='train')",
     {"data.source": "a.jsonl", "data.convert": ""}, []),
    ("rows = concatenate_datasets([rows, rows])", {"data.convert": "my_data.convert"}, ["data.source"]),
    ("parts = load_dataset('a/b', split='train').train_test_split(0.1)\nrows, extra['eval_dataset'] = parts['train'], "
     "parts['test']\nargs.eval_strategy, args.eval_steps = 'steps', 2", {"eval.every": 2},
     ["data.source", "eval.source"]),
    ("tests = load_dataset('a/b', split='test')\nextra['eval_dataset'] = tests\nargs.evaluation_strategy = 'steps'",
     {"eval.source": "a/b@test", "eval.every": 10}, []),
    # rewards, callbacks and the trainer
    ("def accuracy_reward(completions, label): return [1]", {"reward.functions": ("my_rewards.accuracy_reward",)}, []),
    ("from utils import accuracy_reward", {"reward.functions": ("utils.accuracy_reward",)}, []),
    ("from utils import *\naccuracy_reward = think_format_reward",
     {"reward.functions": ("utils.think_format_reward",)}, []),
    ("from trl.rewards import *\naccuracy_reward = think_format_reward", {"reward.functions": ("format.think",)}, []),
    ("@dataclass\nclass Own:\n    size: int = 3\naccuracy_reward = build(Own())", {}, ["reward.functions"]),
    ("accuracy_reward = [lambda completions: [1]]", {}, ["reward.functions"]),
    ("extra['callbacks'] = [WandbCallback()]", {}, []),
    ("extra['callbacks'] = [EarlyStoppingCallback(3)]", {}, ["trainer.callbacks"]),
    ("from own import GRPOTrainer", {}, ALL),
    ("class GRPOTrainer(GRPOTrainer):\n    pass\nGRPOTrainer.compute_loss = build", {}, ALL),
    ("class GRPOTrainer(GRPOTrainer):\n    def log(self): pass\n    def create_optimizer(self): pass", {}, ALL),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_what_a_script_does_to_its_objects_is_read_or_unknown(number, tmp_path):
    lines, fields, unknown = OBJECTS[number]
    source, made = read_and_translate(tmp_path, "grpo.py", BEGIN + lines + END)
    assert {name: made.fields().get(name) for name in fields} == fields
    assert sorted(made.unknown()) == unknown and source.lost == ()
    assert program.run(tmp_path / "grpo.py", None, 0, 0) == int(bool(unknown))


def test_a_default_of_an_environment_variable_is_in_a_note(tmp_path):
    script = f"{BEGIN}args.beta = float(os.environ.get('KL', '0.1')){END}"
    for launch, beta, notes in (("", 0.1, 1), ("export KL=0.4\n", 0.4, 0)):
        (tmp_path / "grpo.py").write_text(script)
        source, made = read_and_translate(tmp_path, "run.sh", f"{launch}python grpo.py\n")
        assert (made.fields()["kl.coef"], len([note for note in source.notes if "KL" in note])) == (beta, notes)


COMMENTS = {  # a comment of a script, and whether it leaves the number of processes unknown
    '"""Run with 8 GPUs."""': True,
    "# accelerate launch --num_processes 4 grpo.py": True,
    "# measured on 4x A100": True,
    "# one 24 GB GPU, a group of 8": False,
    "# runs on 1x A100": False,
    "# 16-bit GPUs": False,
    "# 1.5 GPUs": False,
}


def test_a_comment_on_several_processes_leaves_the_batch_unknown(tmp_path):
    for comment, is_unknown in COMMENTS.items():
        text = comment + BEGIN + END
        assert ("prompts_per_step" in made_of(tmp_path, "grpo.py", text).unknown()) == is_unknown, comment
        assert "prompts_per_step" not in made_of(tmp_path, "grpo.py", text, processes=2).unknown()


def test_a_script_that_changes_a_class_of_trl_is_told(tmp_path):
    source, _ = read_and_translate(tmp_path, "grpo.py", f"{BEGIN}GRPOTrainer.compute_loss = build{END}")
    assert ["GRPOTrainer.compute_loss" in line for line in source.lost] == [True]
    assert program.run(tmp_path / "grpo.py", None, 0, 0) == 1


UNSLOTH = "from unsloth import FastLanguageModel, PatchFastRL; PatchFastRL('GRPO', FastLanguageModel)\n"
CLASSES = "from trl import GRPOConfig, GRPOTrainer\n"
SURE = {"seed": 3407, "optim.learning_rate": 5e-5, "optim.warmup_ratio": 0.1}
UNSURE = ["kl", "optim.weight_decay"]  # defaults that versions of Unsloth have otherwise
OF_TRL = {"seed": 42, "optim.learning_rate": 1e-6, "optim.warmup_ratio": 0.0, "optim.weight_decay": 0.0, "kl": None}
BATCH = ["prompts_per_step", "prompts_per_update"]
PATCHED = [  # what a script imports, arguments of its config, fields, and what is unknown
    (UNSLOTH + CLASSES, "num_generations=4", SURE | {"prompts_per_update": 2}, UNSURE),
    (f"import unsloth, trl\n{CLASSES}", "num_generations=4, beta=0.1, weight_decay=0", SURE | {"kl.coef": 0.1}, []),
    (UNSLOTH + CLASSES, "seed=1, save_steps=3, per_device_train_batch_size=build()",
     {"seed": 1, "checkpoint.every": 3}, UNSURE + BATCH),
    (UNSLOTH + CLASSES, "num_generations=3", {"prompts_per_step": 2, "group_size": 3}, UNSURE),  # the batch of 4 is 3
    (UNSLOTH + CLASSES, "num_generations=8", {}, UNSURE + BATCH),
    (UNSLOTH + CLASSES, "max_prompt_length=9", {"seed": 3407, "rollout.max_completion_tokens": 256},
     [*UNSURE, *BATCH, "aggregate.mode", "model.dtype", "rollout.temperature", "rollout.top_k"]),
    (CLASSES + UNSLOTH, "num_generations=8", OF_TRL, []),  # the names keep TRL's own classes
    (f"try:\n    {UNSLOTH}except ImportError:\n    pass\n{CLASSES}", "num_generations=4", SURE, UNSURE),
    (f"if build():\n    {UNSLOTH}{CLASSES}", "num_generations=4", {},
     [*UNSURE, *BATCH, "optim", "optim.learning_rate", "optim.warmup_ratio", "optim.warmup_steps", "seed"]),
]  # fmt: skip


def made_by(folder, imports: str, arguments: str, lines: str = ""):
    imports += "from trl.rewards import accuracy_reward\n"
    config = f"args = GRPOConfig({arguments}, max_steps=9)\n"
    return made_of(
        folder, "grpo.py", f"{imports}{lines}{config}GRPOTrainer('a/b', accuracy_reward, args, 'c/d').train()"
    )


@pytest.mark.parametrize(("imports", "arguments", "fields", "unknown"), PATCHED)
def test_unsloth_changes_the_defaults_of_a_config_that_is_imported_after_it(
    imports, arguments, fields, unknown, tmp_path
):
    made = made_by(tmp_path, imports, arguments)
    assert sorted(made.unknown()) == sorted(unknown)
    assert {name: made.fields().get(name) for name in fields} == fields


MAPPINGS = [  # lines that make a mapping of settings, fields of a config with it, and whether the others are unknown
    ("kwargs = {'seed': 4} | build()", {}, True), ("kwargs = dict(build())", {}, True),
    ("kwargs = {**build(), 'seed': 4}", {"seed": 4}, True), ("kwargs = {'seed': 4, **build()}", {}, True),
    ("kwargs = asdict(build())", {}, True), ("kwargs = dict(seed=4)\nkwargs.update(build())", {}, True),
    ("kwargs = vars(parser.parse_args())", {}, True), ("kwargs = build()\nkwargs.pop('seed')", {}, True),
    ("@dataclass\nclass C:\n    seed: int = 4\n    x: int = 1\nkwargs = asdict(C())\nkwargs.pop('x')",
     {"seed": 4}, False),
    ("@dataclass\nclass C:\n    seed: int = 4\n    def __post_init__(self): self.seed = 5\nkwargs = asdict(C())",
     {}, True),
    ("kwargs = dict(seed=4, x=1)\nx = kwargs.pop('x')\nkwargs.update({'epsilon': 0.3}, num_iterations=x)",
     {"seed": 4, "loss.clip_low": 0.3, "epochs": 1}, False),
    ("kwargs = dict(seed=4)\nif build():\n    kwargs.pop('seed', None)", {}, True),
    ("@dataclass\nclass C:\n    seed: int = 4\nc = C()\nkwargs = asdict(c)\nkwargs.update(seed=5)\n"
     "kwargs['seed'] = c.seed", {"seed": 4}, False),
    ("kwargs = dict({'seed': 4})\nkwargs.setdefault('seed', 5)", {"seed": 4}, False),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "fields", "unknown"), MAPPINGS)
def test_a_mapping_that_is_not_read_leaves_all_settings_of_a_config_unknown(lines, fields, unknown, tmp_path):
    made = made_by(
        tmp_path, f"from dataclasses import asdict, dataclass\n{CLASSES}", "**kwargs, beta=0.1", f"{lines}\n"
    )
    assert {name: made.fields()[name] for name in fields} == fields and made.fields()["kl.coef"] == 0.1
    of_config = {"optim.learning_rate", "optim.decay", "prompts_per_step", "group_size", "rollout.temperature", "eval"}
    of_config |= {"seed", "reward.weights", "loss.name", "loss.clip_low"} - fields.keys()
    assert bool(made.unknown()) == unknown and (not unknown or of_config <= made.unknown().keys())
    assert made.unknown().keys().isdisjoint({"model.path", "data.source", "reward.functions", "kl", "adapters.name"})


def test_arguments_of_an_old_trainer_of_pairs_are_keys(tmp_path):
    script = (
        "from transformers import AutoModelForCausalLM, TrainingArguments\nfrom trl import DPOTrainer\n"
        "model = AutoModelForCausalLM.from_pretrained('a/b', load_in_4bit=True, bnb_4bit_quant_type='nf4')\n"
        "DPOTrainer(model, None, args=TrainingArguments('out', max_steps=9), beta=0.3, train_dataset='c/d', "
        "peft_config=LoraConfig(r=4, target_modules='q_proj')).train()"
    )
    source, made = read_and_translate(tmp_path, "old.py", script)
    fields = {"loss.beta": 0.3, "optim.learning_rate": 5e-5, "data.max_prompt_tokens": 128, "num_steps": 9}
    fields |= {"adapters.rank": 4, "adapters.base_dtype": "int8"}
    assert {name: made.fields()[name] for name in fields} == fields
    assert made.unknown() == {} and source.lost == () and made.notes
    with pytest.raises(UserError):
        made_of(
            tmp_path, "old.py", "from transformers import TrainingArguments\nTrainer(args=TrainingArguments('out'))"
        )


VERSIONS = [  # the keys of a file, and its fields
    ("grpo.yaml", "vllm_device: auto", {"kl.coef": 0.04, "rollout.temperature": 0.9}),
    ("grpo.yaml", "# trl==0.14.0", {"kl.coef": 0.04, "rollout.temperature": 0.9, "prompts_per_step": 32}),
    ("grpo.yaml", "vllm_device: auto\nlog_completions: true", {"kl.coef": 0.04, "prompts_per_step": 1}),
    ("grpo.yaml", "", {"rollout.max_completion_tokens": 512, "kl": None, "prompts_per_step": 1}),
    ("dpo.yaml", "evaluation_strategy: 'no'",
     {"optim.learning_rate": 5e-5, "data.max_prompt_tokens": 128, "rollout.max_completion_tokens": 512}),
    ("simpo.yaml", "beta: 10\ngamma_beta_ratio: 0.5\nmax_length: 2048\nmax_prompt_length: 1800",
     {"loss.beta": 10.0, "loss.gamma": 5.0, "loss.nll_coef": 0.0, "rollout.max_completion_tokens": 2048}),
    ("simpo.yaml", "sft_weight: 0.1", {"loss.beta": 2.0, "loss.gamma": 0.5, "loss.nll_coef": 0.1}),
    ("simpo.yaml", "loss_type: simpo", {"loss.beta": 0.1, "loss.gamma": 0.5, "loss.nll_coef": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "fields"), VERSIONS)
def test_a_key_of_an_old_version_brings_its_defaults(name, text, fields, tmp_path):
    common = "model_name_or_path: a/b\nmax_steps: 9\nper_device_train_batch_size: 4\nnum_processes: 1\n"
    made = made_of(tmp_path, name, common + "num_generations: 4\n" * (name == "grpo.yaml") + text)
    assert {field: made.fields().get(field) for field in fields} == fields
    assert bool(made.notes) == (text not in ("", "loss_type: simpo"))


def test_a_config_alone_does_not_say_how_many_processes_train(tmp_path):
    text = "model_name_or_path: a/b\nnum_generations: 4\nmax_steps: 9\n"
    assert "prompts_per_step" in made_of(tmp_path, "grpo.yaml", text).unknown()
    assert "prompts_per_step" not in made_of(tmp_path, "grpo.yaml", text, processes=2).unknown()
    for launch, count in (("accelerate launch", 0), ("deepspeed", 0), ("trl grpo", 0), ("python", 1), ("torchrun", 1)):
        program = "" if launch == "trl grpo" else "trl/scripts/grpo.py"
        made = made_of(tmp_path, "run.sh", f"{launch} {program} {TRL} --num_generations 4\n")
        assert ("prompts_per_step" in made.unknown()) == (count == 0), launch
    # 16 completions of two processes are no whole group: that is a file of TRL 0.14.
    text = text.replace("num_generations: 4", "num_generations: 32")
    assert "prompts_per_step" in made_of(tmp_path, "grpo.yaml", text, processes=2).unknown()


def test_a_positional_file_and_a_command_of_a_program_are_read(tmp_path):
    (tmp_path / "x.yaml").write_text("model_name_or_path: a/b\nbeta: 0.1\nper_device_train_batch_size: 4\n")
    launch = "accelerate launch --num_processes 2 scripts/run_dpo.py "
    for command, beta in product((launch, launch + "train ", "python trl/scripts/cli.py dpo "), (0.1, 0.5)):
        source, made = read_and_translate(tmp_path, "run.sh", f"{command}x.yaml" + f" --beta={beta}" * (beta != 0.1))
        assert source.table.name == "TRL's DPO" and source.lost == ()
        assert made.fields()["loss.beta"] == beta
    assert "config" in made_of(tmp_path, "run.sh", f"{launch}not_there.yaml").unknown()


def test_patterns_of_a_parser_are_no_keys_and_a_flag_behind_a_comment_is_named(tmp_path):
    (path := tmp_path / "run.sh").write_text(
        'while [ $# -gt 0 ]; do\n  case "$1" in\n    --learning_rate) LR="$2"; shift 2 ;;\n'
        '    --beta | --loss_type) B="$2"; shift 2 ;;\n  esac\ndone\n'
        f"python trl/scripts/grpo.py {TRL} \\\n  # --num_generations 16 \\\n  --beta 0.01\n"
    )
    assert readers.read(path).lost == ("line 9: --beta",)


def test_a_place_for_a_path_is_not_read(tmp_path):
    script = (
        "MODEL='<your/model>'\npython trl/scripts/grpo.py --output_dir <OUT> --model_name_or_path $MODEL \\\n"
        "    --dataset_name <DATA-DIR>/train.jsonl --reward_funcs accuracy_reward --max_steps 20 <in.txt > out.log\n"
    )
    config = "model_name_or_path: <MODEL>\ndataset_name: <DATA>\nreward_funcs: [accuracy_reward]\nmax_steps: 20\n"
    for name, text in (("run.sh", script), ("grpo.yaml", config)):
        source, made = read_and_translate(tmp_path, name, text)
        assert {"model.path", "data.source"} <= made.unknown().keys() and "reward.functions" not in made.unknown()
        assert source.keys["max_steps"] == 20 and source.lost == ()


PINS = [  # a text before the keys, fields of its config, and what is unknown
    ("# trl==0.16.1", {"rollout.temperature": 0.9, "rollout.top_k": 50, "kl.coef": 0.04}, set()),
    ("# pip install trl[vllm]==0.23.1", {"rollout.temperature": 1.0, "kl": None, "model.dtype": "bfloat16"}, set()),
    ("# trl 0.15", {"aggregate.mode": "sequence_mean", "kl.coef": 0.04}, {"rollout.top_k"}),
    ("max_prompt_length: 99", {}, {"rollout.temperature", "rollout.top_k", "kl", "model.dtype", "aggregate.mode"}),
    ("max_prompt_length: 99\nepsilon: 0.2", {}, {"rollout.temperature", "rollout.top_k", "kl", "model.dtype"}),
    ("max_prompt_length: 99\nsteps_per_generation: 2", {"rollout.temperature": 1.0}, {"kl", "model.dtype"}),
    ("max_prompt_length: 99\ngeneration_kwargs: {}\nbf16: true", {"kl": None, "rollout.temperature": 1.0}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fields", "unknown"), PINS)
def test_a_default_of_several_releases_is_the_users(text, fields, unknown, tmp_path):
    common = "model_name_or_path: a/b\nmax_steps: 9\nnum_processes: 1\nnum_generations: 4\nreward_funcs: [accuracy]\n"
    made = made_of(tmp_path, "grpo.yaml", f"{text}\n{common}dataset_name: c/d\n")
    assert {field: made.fields().get(field) for field in fields} == fields
    assert set(made.unknown()) == unknown
