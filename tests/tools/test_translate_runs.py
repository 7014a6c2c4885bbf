"""`jaxrl translate`: keys and defaults that decide what is trained, in launches that a stranger wrote.

Each launch once became another run without a word.
"""

from __future__ import annotations

import pytest
from test_translate import made_of, read_and_translate, write

from jaxrl_llm.tools.translate import __main__ as program

COMMON = (
    "python3 -m verl.trainer.main_ppo data.train_files=d/gsm8k/train.parquet data.train_batch_size=128 "
    "actor_rollout_ref.model.path=a/b actor_rollout_ref.actor.ppo_mini_batch_size=128 "
    "actor_rollout_ref.rollout.n=4 trainer.total_training_steps=100 "
)
VERL = COMMON + "algorithm.adv_estimator=grpo "
ACTOR = "actor_rollout_ref.actor"
OLD = f"{VERL}{ACTOR}.fsdp_config.grad_offload=False {ACTOR}.optim.warmup_style=cosine"
SEARCH = f"{VERL}max_turns=2 retriever.topk=3 {ACTOR}.state_masking="
EASYR1 = "worker: {actor: {model: {model_path: a/b}}, rollout: {n: 4}}\ntrainer: {max_steps: 9, %s}"
SPRING = (
    "python3 -m verl.trainer.main worker.actor.model.model_path=a/b worker.rollout.n=4 trainer.max_steps=9 "
    "worker.actor.optim."
)
PAIRS = "trl dpo --model_name_or_path a/b --dataset_name c/d --max_steps 9 --load_best_model_at_end True"
EPISODES = (
    "trl rloo --model_name_or_path a/b --dataset_name c/d --reward_model_path e/f --rloo_k 4 --num_ppo_epochs 2 "
    "--num_mini_batches 2 --per_device_train_batch_size 8 --total_episodes 6400 --num_processes 1 --save_steps 500"
)
TRL = "model_name_or_path: a/b\ndataset_name: c/d\nmax_steps: 9\nnum_processes: 1\nnum_generations: 4\n"
SCRIPT = """
import functools, os
os.environ.setdefault("WANDB_PROJECT", "countdown")
from trl import GRPOConfig, GRPOTrainer
def first(completions, **kwargs): return [0.0 for _ in completions]
def second(completions, size, **kwargs): return [0.0 for _ in completions]
args = GRPOConfig("out", max_steps=9, num_generations=4, report_to="wandb", reward_weights=[0.1, 1.0], {})
GRPOTrainer("a/b", {}, args, "c/d", eval_dataset="c/d").train()
"""
EVALUATES = "eval_strategy='steps', eval_steps=3"
PARTIAL = "[first, functools.partial(second, size=2.5)]"
RUNS = [  # file, text, fields, and some of what is unknown
    ("s.sh", f"{SEARCH}true", {"num_steps": 99}, []),
    ("s.sh", f"{SEARCH}false", {}, [f"{ACTOR}.state_masking"]),
    ("s.sh", SEARCH.replace(f"{ACTOR}.state_masking=", ""), {}, [f"{ACTOR}.state_masking"]),
    ("s.sh", f"{SEARCH}true {ACTOR}.optim.warmup_style=cosine", {"optim.decay": "constant"}, []),
    ("s.sh", f"{SEARCH}true do_search=false", {}, ["do_search"]),
    ("v.sh", OLD, {"optim.decay": "constant", "num_steps": 99}, []),
    ("v.sh", f"{VERL}{ACTOR}.optim.warmup_style=cosine", {"optim.decay": "cosine", "num_steps": 100}, []),
    ("v.sh", f"{VERL}{ACTOR}.megatron.grad_offload=True", {"kl": None, "loss.delta": 3.0}, []),
    ("v.sh", f"{COMMON}algorithm.adv_estimator=gae trainer.critic_warmup=20", {"critic.warmup_steps": 19}, []),
    ("v.sh", f"{VERL}trainer.critic_warmup=20", {}, ["trainer.critic_warmup"]),
    ("v.sh", f"{VERL}trainer.critic_warmup=1", {"num_steps": 100}, []),
    ("v.sh", f"{VERL}actor_rollout_ref.rollout.do_sample=False", {}, ["actor_rollout_ref.rollout.do_sample"]),
    ("v.sh", f"{VERL}data.train_max_samples=64", {}, ["data.train_max_samples"]),
    ("v.sh", f"{VERL}trainer.resume_from_path=x/global_step_5", {}, ["trainer.resume_from_path"]),
    # the best checkpoint of a run that evaluates
    ("d.sh", f"{PAIRS} --eval_strategy steps", {"checkpoint.keep_best": 1}, []),
    ("d.sh", PAIRS, {"checkpoint.keep_best": 0}, []),
    ("v.sh", f"{VERL}trainer.experiment_name=$NAME", {}, ["log.name"]),
    ("r.sh", f"{EPISODES} --run_name $NAME", {}, ["log.name"]),
    ("e.yaml", EASYR1 % "critic_warmup: 3", {}, ["trainer.critic_warmup"]),
    ("e.yaml", "data: {val_files: a/b@test}\n" + EASYR1 % "test_freq: 5", {"eval.every": 5}, []),
    ("e.sh", f"{SPRING}warmup_style=constant", {"optim.decay": "constant"}, []),
    ("e.sh", f"{SPRING}warmup_style=cosine", {}, ["optim.decay"]),
    ("e.sh", f"{SPRING}warmup_style=cosine worker.actor.clip_ratio=0.2", {"optim.decay": "constant"}, []),
    ("e.sh", f"{SPRING}lr=1e-6 worker.actor.clip_ratio=0.1 worker.actor.use_kl_loss=true",
     {"loss.clip_low": 0.1, "loss.clip_high": 0.1, "loss.delta": 0.0, "entropy.coef": 1e-3, "kl.placement": "loss",
      "kl.coef": 1e-3, "kl.estimator": "k3"}, []),
    ("r.sh", EPISODES, {"optim.clip_norm": 0.0}, ["checkpoint.every"]),
    ("g.yaml", f"{TRL}reward_weights: [1.0, 0.2, 0.1]", {"reward.weights": (1.0, 0.2, 0.1)}, ["reward.functions"]),
    ("g.yaml", f"{TRL}reward_funcs: [accuracy]\nlora_dropout: 0.1\nuse_peft: true", {}, ["lora_dropout"]),
    ("g.py", SCRIPT.format(EVALUATES, "[f for f in ALL]"), {}, ["eval.function", "reward.functions"]),
    ("g.py", SCRIPT.format("bf16=True", PARTIAL), {
        "log.project": "countdown", "reward.functions": ("my_rewards.first", "my_rewards.second(size=2.5)"),
        "eval.function": "my_rewards.second(size=2.5)"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "fields", "unknown"), RUNS)
def test_what_makes_another_run_is_translated_or_told(name, text, fields, unknown, tmp_path):
    made = made_of(tmp_path, name, text)
    assert {field: made.fields().get(field) for field in fields} == fields
    assert set(unknown) <= made.unknown().keys()
    assert not (fields.keys() & made.unknown().keys())


HYDRA = (
    "data: {train_batch_size: 64}\nalgorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {optim: {lr: '%s'}}}\n"
)
MATH = "worker: {actor: {model: {model_path: a/b}, optim: {lr: %s}}, rollout: {n: 8}}\ntrainer: {max_steps: 9}\n"
DPO_SCRIPT = """
from dataclasses import dataclass
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, TrlParser
@dataclass
class Own:
    rank: int = 4
    lora_r: int = 4
own, args = TrlParser((Own, DPOConfig)).parse_args_and_config()
DPOTrainer("a/b", None, args, train_dataset="c/d", peft_config=LoraConfig(r=own.lora_r)).train()
"""
LAUNCHES = [  # files beside the launch, the launch, fields, and what is unknown
    # a variable that the script exports wins over the default of a reference, and a command sees no other variable
    ({"conf/a.yaml": HYDRA % "${oc.env:LR,1e-6}"},
     "export LR=$(cat lr.txt)\npython3 -m verl.trainer.main_ppo --config-path=conf --config-name=a",
     {}, ["optim.learning_rate"]),
    *(({"conf/a.yaml": HYDRA % "${oc.env:LR,1e-6}"},
       f"{before}python3 -m verl.trainer.main_ppo --config-path=conf --config-name=a",
       {"optim.learning_rate": rate}, [])
      for before, rate in {
          "LR=5e-6\n": 1e-6, "LR=5e-6 ": 5e-6, "export LR=5e-6\n": 5e-6, "LR=5e-6\nexport LR\n": 5e-6,
          "declare -x LR=5e-6\n": 5e-6, "set -a\nLR=5e-6\nset +a\n": 5e-6, "set -a\nset +a\nLR=5e-6\n": 1e-6,
      }.items()),
    # a config that the script writes, with and without an unknown value
    ({}, f"cat > a.yaml <<EOF\n{MATH % '5e-6'}EOF\npython3 -m verl.trainer.main config=a.yaml",
     {"optim.learning_rate": 5e-6}, []),
    ({}, f"cat > a.yaml <<EOF\n{MATH % '$(cat lr.txt)'}EOF\npython3 -m verl.trainer.main config=a.yaml",
     {"group_size": 8}, ["optim.learning_rate"]),
    # versions of EasyR1 are no months, so they say no release
    ({}, "# easyr1==0.3.2\npython3 -m verl.trainer.main worker.rollout.n=4 worker.actor.model.model_path=a/b",
     {"loss.clip_high": 0.3, "entropy": None}, []),
    # options of a program in an array
    ({"dpo.py": DPO_SCRIPT}, "A=(\n --output_dir x\n --lora_r 8\n)\ntorchrun --nproc_per_node=2 dpo.py ${A[@]}",
     {"adapters.rank": 8}, []),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(LAUNCHES)))
def test_variables_and_files_of_a_launch_reach_its_config(number, tmp_path):
    files, text, fields, unknown = LAUNCHES[number]
    for name, content in files.items():
        write(tmp_path, name, content)
    source, made = read_and_translate(tmp_path, "run.sh", text)
    assert {field: made.fields().get(field) for field in fields} == fields and source.lost == ()
    assert set(unknown) <= made.unknown().keys() and not (fields.keys() & made.unknown().keys())


def test_a_requirements_file_that_a_launch_installs_names_the_release(tmp_path):
    write(tmp_path, "requirements.txt", "trl==0.16.1\n")
    text = (
        "pip install -r requirements.txt\ntrl grpo --model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy"
    )
    source, made = read_and_translate(tmp_path, "run.sh", text)
    assert source.pinned == "0.16.1" and made.fields()["rollout.top_k"] == 50


SAID = [  # a launch, and a word of the comments on its config, which another launch does not have
    (f"# verl==0.5.0\n{VERL}", f"# verl==0.9.1\n{VERL}", "micro-batch"),
    (f"{VERL}{ACTOR}.grad_clip=0.5", f"{VERL}{ACTOR}.grad_clip=1.0", "clip_grad"),
    (
        f"{SPRING}lr=1e-6 worker.actor.fsdp.torch_dtype=bf16",
        f"{SPRING}lr=1e-6 worker.actor.fsdp.torch_dtype=fp32",
        "model.dtype is of",
    ),
]


@pytest.mark.parametrize(("text", "other", "words"), SAID)
def test_a_difference_from_one_release_or_value_is_said_for_it_alone(text, other, words, tmp_path):
    reasons = []
    for launch in (text, other):
        made = made_of(tmp_path, "run.sh", launch)
        outcomes = [*made.outcomes.values(), *made.defaults.values()]
        reasons.append(" ".join(one.reason for one in outcomes if one.kind in ("changed", "unsupported")))
    assert (words in reasons[0], words in reasons[1]) == (True, False)


def test_a_template_in_a_config_is_complete_and_a_file_is_the_users_to_set(tmp_path, capsys):
    for template, is_task in (("./a.jinja", True), ("'{{ content }} Think first.'", False)):
        text = f"data: {{format_prompt: {template}}}\n" + EASYR1 % "total_epochs: 1"
        assert ("data.format_prompt" in made_of(tmp_path, "e.yaml", text).user_tasks()) == is_task
        program.run(tmp_path / "e.yaml", None, 0, 0)
        assert ("yours to set: data.format_prompt" in capsys.readouterr().err) == is_task
