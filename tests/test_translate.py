"""`jaxrl translate`: configs of TRL, veRL, EasyR1 and Search-R1, key by key."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import records
from jaxrl_llm.config.load import flatten, load, override
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.tools.translate import __main__ as program
from jaxrl_llm.tools.translate import (
    easyr1,
    lint,
    readers,
    search_r1,
    trl,
    trl_pairs,
    trl_ppo,
    trl_rloo,
    trl_rules,
    verl,
    writer,
)
from jaxrl_llm.tools.translate.outcome import KINDS, Keys, Outcome, Translation, Unread, translate

CONFIGS = Path(__file__).parent.parent / "configs"
SYSTEMS = {
    "verl": verl.VERL,
    "easyr1": easyr1.EASYR1,
    "search_r1": search_r1.SEARCH_R1,
    "trl_grpo": trl.GRPO,
    "trl_ppo": trl_ppo.PPO,
    "trl_rloo": trl_rloo.RLOO,
    "trl_dpo": trl_pairs.DPO,
    "trl_simpo": trl_pairs.SIMPO,
}
ACTOR = "actor_rollout_ref.actor."

VERL = """#!/bin/bash
set -e
ROOT=${DATA_ROOT:-"$HOME/sums"}   # where the rows are
export MODEL="Qwen/Qwen2.5-0.5B-Instruct"
prompts=$((64 * 2))
LENGTHS=(
    data.max_prompt_length=96
    data.max_response_length=$((256 - 56))
)
unused=one; name=sums

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo "${LENGTHS[@]}" \\
    data.train_files="$ROOT/train.parquet" data.val_files="['$ROOT/test.parquet']" \\
    data.train_batch_size=$prompts \\
    actor_rollout_ref.model.path=${MODEL} \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.kl_loss_coef=2e-3 \\
    actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=5 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.top_p=0.9 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \\
    +actor_rollout_ref.rollout.surprise=7 \\
    trainer.total_training_steps=40 trainer.test_freq=10 trainer.save_freq=-1 \\
    trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.experiment_name=$name $@ 2>&1 | tee log.txt
"""
EASYR1 = """
data:
  train_files: someone/sums@train
  val_files: someone/sums@test
  prompt_key: question
  answer_key: answer
  rollout_batch_size: 64
  format_prompt: ./sums.jinja
  max_prompt_length: 128
  max_response_length: 256
algorithm: {adv_estimator: grpo, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 1.0e-2}
worker:
  actor:
    global_batch_size: 32
    micro_batch_size_per_device_for_update: 2
    clip_ratio_high: 0.25
    model: {model_path: Qwen/Qwen3-0.6B}
    optim: {lr: 2.0e-6, lr_warmup_ratio: 0.1}
  rollout: {n: 4, temperature: 0.9}
  reward: {reward_function: ./mine.py:judge}
trainer: {total_epochs: 3, val_freq: 5, save_freq: 5, save_limit: -1, n_gpus_per_node: 4}
"""
SEARCH_R1 = """
python3 -m verl.trainer.main_ppo data.train_files=nq/train.parquet data.val_files=nq/test.parquet \\
    data.train_batch_size=64 data.max_start_length=300 data.max_response_length=100 data.max_obs_length=80 \\
    algorithm.adv_estimator={estimator} actor_rollout_ref.model.path=Qwen/Qwen2.5-3B \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n_agent={group} \\
    actor_rollout_ref.actor.use_kl_loss={kl} actor_rollout_ref.actor.state_masking=true \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.2 algorithm.kl_ctrl.kl_coef=0.005 \\
    trainer.total_training_steps=30 trainer.test_freq=10 max_turns=3 retriever.url=http://there:8000/retrieve
"""
TRL_YAML = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: someone/sums
reward_funcs: [accuracy_reward, my_bonus]
reward_weights: [1.0, 0.5]
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
steps_per_generation: 8
num_generations: 4
num_processes: 2
max_completion_length: 200
max_prompt_length: 64
learning_rate: 5e-6
lr_scheduler_type: cosine
warmup_ratio: 0.1
max_steps: 60
beta: 0.02
loss_type: dr_grpo
scale_rewards: false
epsilon_high: 0.28
report_to: [wandb]
min_p: 0.1
"""
TRL_SCRIPT = """
from pathlib import Path
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

Path(__file__).with_name("ran").touch()
rows = load_dataset("someone/sums", split="train")
rows = rows.map(lambda row: row)
steps = 25


def short(completions, **columns):
    return [-len(c) for c in completions]


trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=[short],
    args=GRPOConfig("out", max_steps=steps * 2, num_generations=4, per_device_train_batch_size=args.size,
                    learning_rate=1e-6 / 2, temperature=0.8, importance_sampling_level="sequence", loss_type="grpo"),
    train_dataset=rows,
)
"""
TRL_DPO = """
accelerate launch --num_processes 2 trl/scripts/dpo.py --dataset_name trl-lib/ultrafeedback_binarized \\
    --model_name_or_path Qwen/Qwen2-0.5B-Instruct --learning_rate 5.0e-7 --num_train_epochs 1 --max_steps 1000 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --loss_type sigmoid sft --loss_weights 1.0 0.2 \\
    --eval_strategy steps --eval_steps 50 --output_dir Qwen2-0.5B-DPO --no_remove_unused_columns \\
    --max_length 768 --use_peft --lora_r 32 --lora_alpha 16 \\
    --lora_target_modules all-linear --precompute_ref_log_probs --ld_alpha 0.5
"""
TRL_DPO_SCRIPT = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

name = "Qwen/Qwen3-0.6B"
model = AutoModelForCausalLM.from_pretrained(name)
rows = load_dataset("someone/pairs")
config = DPOConfig(output_dir="out", beta=0.2, label_smoothing=0.1, max_steps=100, rpo_alpha=0.5,
                   per_device_train_batch_size=4, eval_strategy="steps", eval_steps=20, max_prompt_length=200)
DPOTrainer(model, None, config, train_dataset=rows["train"], eval_dataset=rows["test"],
           processing_class=AutoTokenizer.from_pretrained(name)).train()
"""
TRL_SIMPO_SCRIPT = """
from trl.experimental.cpo import CPOConfig, CPOTrainer

args = CPOConfig("out", loss_type="simpo", cpo_alpha=0.0, simpo_gamma=1.4, beta=2.0, num_train_epochs=1)
CPOTrainer("google/gemma-2-2b-it", args, train_dataset=make_pairs())
"""
TRL_PPO = """
accelerate launch --num_processes 4 train.py --sft_model_path someone/sft --reward_model_path someone/rm \\
    --dataset_name someone/prompts --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --num_mini_batches 2 --total_episodes 1280 --kl_coef 0.03 --cliprange_value=0.3 --warmup-steps 3 --bf16
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def keys_of(folder: Path, name: str, text: str) -> dict:
    return readers.read(write(folder, name, text)).keys


def made_of(folder: Path, name: str, text: str, **more: int) -> Translation:
    source = readers.read(write(folder, name, text))
    return translate(source.system, source.keys, referred=source.referred, **more)


def config_of(made: Translation, folder: Path) -> tuple[str, dict]:
    """Writes the config, loads what was written, and returns both."""
    text = writer.source(made, Path("given.sh"), Path("configs/mine.py"))
    return text, flatten(lint.load_text(text))


def test_a_script_of_verl_becomes_a_config_with_its_numbers(tmp_path):
    made = made_of(tmp_path, "run.sh", VERL)
    assert made.system is verl.VERL and made.base == "grpo"
    text, c = config_of(made, tmp_path)
    expected = {
        "prompts_per_step": 128, "prompts_per_update": 32, "group_size": 4, "num_steps": 40, "epochs": 1,
        "microbatch": 4,  # 8 sequences on 2 GPUs are 4 prompts
        "data.source": "~/sums/train.parquet", "data.convert": "verl.convert", "data.max_prompt_tokens": 96,
        "eval.source": "~/sums/test.parquet", "eval.every": 10, "rollout.max_completion_tokens": 200,
        "model.path": "Qwen/Qwen2.5-0.5B-Instruct", "model.dtype": "bfloat16", "rollout.top_p": 0.9,
        "kl.placement": "loss", "kl.estimator": "k3", "kl.coef": 2e-3,
        "advantage.name": "grpo", "advantage.epsilon": 1e-6, "aggregate.mode": "token_mean",
        "loss.clip_low": 0.2, "loss.clip_high": 0.28, "loss.delta": 3.0,
        "optim.learning_rate": 3e-6, "optim.warmup_steps": 20,  # 5 rollouts of 4 updates
        "optim.decay": "constant", "optim.weight_decay": 0.01, "optim.b2": 0.999, "entropy": None,
    }  # fmt: skip
    assert {name: c[name] for name in expected} == expected
    assert made.outcomes["actor_rollout_ref.rollout.surprise"].kind == "unsupported"
    assert made.outcomes["actor_rollout_ref.rollout.top_p"].kind == "changed"
    assert made.outcomes["trainer.save_freq"].kind == "changed"
    assert "# actor_rollout_ref.actor.optim.lr_warmup_steps: counts rollouts: 5 x 4 optimizer steps." in text
    assert "# - actor_rollout_ref.rollout.surprise: veRL 0.9.1 has no such key" in text


FILES = {
    "run.sh": VERL,
    "easyr1.yaml": EASYR1,
    "search.sh": SEARCH_R1.format(estimator="grpo", group=5, kl="true"),
    "search_ppo.sh": SEARCH_R1.format(estimator="gae", group=1, kl="false"),
    "grpo.yaml": TRL_YAML,
    "grpo.py": TRL_SCRIPT,
    "ppo.sh": TRL_PPO,
    "dpo.sh": TRL_DPO,
    "dpo.py": TRL_DPO_SCRIPT,
    "simpo.py": TRL_SIMPO_SCRIPT,
}


def test_pairs_of_trl_are_learned_from_by_the_same_loss(tmp_path):
    made = made_of(tmp_path, "run.sh", TRL_DPO)
    text, c = config_of(made, tmp_path)
    expected = {
        "prompts_per_step": 32, "microbatch": 4, "num_steps": 1000, "loss.name": "dpo", "loss.beta": 0.1,
        "loss.nll_coef": 0.2, "aggregate.mode": "sequence_mean", "optim.learning_rate": 5e-7, "optim.decay": "linear",
        "data.source": "trl-lib/ultrafeedback_binarized@train", "data.rejected_column": "rejected",
        "eval.source": "trl-lib/ultrafeedback_binarized@test", "eval.function": "preference", "eval.every": 50,
        "data.max_prompt_tokens": 384, "rollout.max_completion_tokens": 384, "adapters.rank": 32,
    }  # fmt: skip
    assert {name: c[name] for name in expected} == expected
    assert list(made.with_kind("unsupported")) == ["ld_alpha"] and "jaxrl sft --config configs/mine.py" in text
    _, c = config_of(made_of(tmp_path, "dpo.py", TRL_DPO_SCRIPT, rows=10), tmp_path)
    expected = {
        "model.path": "Qwen/Qwen3-0.6B", "prompts_per_step": 4, "loss.beta": 0.2, "loss.label_smoothing": 0.1,
        "loss.nll_coef": 0.5, "data.source": "someone/pairs@train", "eval.source": "someone/pairs@test",
        "data.max_prompt_tokens": 200, "rollout.max_completion_tokens": 824,
    }  # fmt: skip
    assert {name: c[name] for name in expected} == expected
    file = {"dataset_name": "data/pairs.jsonl", "eval_strategy": "steps", "max_steps": 40, "eval_steps": 0.1}
    made = translate(trl_pairs.DPO, file)
    assert "eval.source" in made.yours() and made.fields()["eval.every"] == 4
    made = made_of(tmp_path, "simpo.py", TRL_SIMPO_SCRIPT, rows=100)
    _, c = config_of(made, tmp_path)
    expected = {
        "loss.name": "simpo", "loss.beta": 2.0, "loss.gamma": 1.4, "loss.nll_coef": 0.0, "num_steps": 13, "eval": None,
    }  # fmt: skip
    assert {name: c[name] for name in expected} == expected and made.outcomes["loss_type"].kind == "mapped"


@pytest.mark.parametrize("loss", ["hinge", "robust", ["sigmoid", "hinge"], ["sft"]])
def test_a_loss_of_pairs_that_is_not_here_is_named(loss):
    made = translate(trl_pairs.DPO, {"loss_type": loss, "max_steps": 10})
    assert made.outcomes["loss_type"].kind == "unsupported" and "loss.name" not in made.fields()
    assert translate(trl_pairs.SIMPO, {"loss_type": "ipo"}).outcomes["loss_type"].kind == "unsupported"


@pytest.mark.parametrize(
    ("command", "system"),
    [
        ("trl dpo --model_name_or_path a/b", trl_pairs.DPO),
        ("python dpo.py --model_name_or_path a/b --beta 0.1", trl_pairs.DPO),
        ("python -m recipes.simpo --model_name_or_path a/b --simpo_gamma 1", trl_pairs.SIMPO),
        ("python scripts/grpo_after_dpo.py --model_name_or_path a/b --beta 0.1", trl.GRPO),
    ],
)
def test_the_name_of_a_program_tells_pairs_from_rewards(command, system, tmp_path):
    assert made_of(tmp_path, "run.sh", command).system is system
    assert made_of(tmp_path, "dpo.yaml", "model_name_or_path: a/b\nbeta: 0.1\n").system is trl_pairs.DPO


@pytest.mark.parametrize("name", FILES)
def test_every_key_becomes_exactly_one_thing_and_what_is_written_passes_the_checks(tmp_path, name):
    made = made_of(tmp_path, name, FILES[name])
    assert list(made.outcomes) == list(keys_of(tmp_path, name, FILES[name]))
    assert sum(len(made.with_kind(kind)) for kind in KINDS) == len(made.outcomes)
    text, c = config_of(made, tmp_path)
    fields = {name: value for name, value in made.fields().items() if not name.startswith("eval.") or c.get(name)}
    assert {name: c[name] for name in fields} == fields
    comments = " ".join(text.replace("\n", " ").replace("# ", " ").split())
    for key, outcome in made.outcomes.items():  # what is not mapped is in a comment, with its reason
        said = " ".join(outcome.reason.replace("# ", " ").split())
        assert outcome.kind == "mapped" or not said or (key in comments and said in comments), key
    checked = lint.lint(lint.load_text(text), set(made.yours()))
    assert checked.refused == "" and checked.sizes


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_is_formatted_as_our_configs_are(tmp_path, name):
    text, _ = config_of(made_of(tmp_path, name, FILES[name]), tmp_path)
    ruff = [Path(sys.executable).with_name("ruff"), "format", "--check", "--line-length", "120", "-"]
    assert subprocess.run(ruff, input=text, text=True, capture_output=True).returncode == 0, text
    assert max(map(len, text.splitlines())) <= 120


def test_easyr1_counts_prompts_and_its_script_may_name_a_file_beside_it(tmp_path):
    (tmp_path / "examples").mkdir()
    write(tmp_path / "examples", "config.yaml", EASYR1)
    script = "M=Qwen/Qwen3-4B\npython3 -m verl.trainer.main config=examples/config.yaml " + (
        "worker.actor.model.model_path=${M} algorithm.online_filtering=True trainer.max_steps=12 "
        """worker.rollout.val_override_config='{"n": 4, "top_p": 0.7}'"""
    )
    made = made_of(tmp_path / "examples", "run.sh", script)
    _, c = config_of(made, tmp_path)
    expected = {
        "prompts_per_step": 64, "prompts_per_update": 32, "group_size": 4, "num_steps": 12,
        "model.path": "Qwen/Qwen3-4B", "microbatch": 2, "rollout.resample_rounds": 19, "rollout.temperature": 0.9,
        "loss.clip_high": 0.25, "loss.delta": 3.0, "kl.coef": 0.01, "kl.placement": "loss",
        "optim.warmup_ratio": 0.1, "optim.warmup_steps": 0, "seed": 1, "checkpoint.every": 5,
    }  # fmt: skip
    assert {name: c[name] for name in expected} == expected
    assert made.outcomes["worker.rollout.val_override_config"].kind == "unsupported"
    assert "reward.functions" in made.yours() and "num_steps" not in made.yours()
    alone = made_of(tmp_path, "elsewhere.sh", script.replace("examples/config.yaml", "not/there.yaml"))
    assert alone.outcomes["config"].kind == "unsupported"


def test_search_r1_counts_sequences_in_a_mini_batch_and_turns_as_searches(tmp_path):
    made = made_of(tmp_path, "s.sh", FILES["search.sh"])
    assert made.base == "search_grpo"
    _, c = config_of(made, tmp_path)
    expected = {
        "prompts_per_update": 8,  # 32 / 5 = 6.4 sequences; 8 divides 64
        "group_size": 5, "env.most_searches": 3, "turns.most": 4, "turns.tokens": 100, "turns.observation_tokens": 80,
        "rollout.max_completion_tokens": 4 * 100 + 3 * 80, "data.max_prompt_tokens": 300,
        "env.url": "http://there:8000/retrieve", "env.corpus": "", "env.topk": 3, "kl.placement": "loss",
        "kl.coef": 0.001, "rollout.top_p": 0.95, "entropy.coef": 0.001, "loss.delta": 0.0,
    }  # fmt: skip
    assert {name: c[name] for name in expected} == expected
    assert "6.4 prompts" in made.outcomes[f"{ACTOR}ppo_mini_batch_size"].reason
    ppo = made_of(tmp_path, "p.sh", FILES["search_ppo.sh"])
    _, c = config_of(ppo, tmp_path)
    assert (ppo.base, c["kl.placement"], c["kl.estimator"], c["kl.coef"]) == ("search_ppo", "reward", "k1", 0.005)
    assert (c["prompts_per_update"], c["critic.clip"], c["critic.warmup_steps"], c["advantage.lam"]) == (
        32,
        0.5,
        0,
        1.0,
    )


def test_a_yaml_file_of_trl_becomes_a_config_with_its_numbers(tmp_path):
    made = made_of(tmp_path, "grpo.yaml", TRL_YAML)
    _, c = config_of(made, tmp_path)
    expected = {
        "prompts_per_step": 32, "prompts_per_update": 16, "group_size": 4,  # 8 x 8 x 2 and 8 x 4 x 2 completions
        "num_steps": 30, "microbatch": 4, "advantage.normalize": "none", "aggregate.mode": "constant",
        "aggregate.constant_length": 200, "loss.clip_low": 0.2, "loss.clip_high": 0.28, "loss.delta": 0.0,
        "kl.placement": "loss", "kl.coef": 0.02, "kl.estimator": "k3_weighted", "optim.decay": "cosine",
        "optim.warmup_ratio": 0.1, "optim.b2": 0.999, "seed": 42, "eval": None,
        "reward.functions": ("math.accuracy(anchors=True)", "my_rewards.my_bonus"), "reward.weights": (1.0, 0.5),
    }  # fmt: skip
    assert {name: c[name] for name in expected} == expected
    assert made.outcomes["min_p"].kind == "unsupported" and made.outcomes["report_to"].kind == "no effect"
    assert "reward.functions" in made.yours()
    from_json = made_of(tmp_path, "grpo.json", json.dumps(keys_of(tmp_path, "again.yaml", TRL_YAML)))
    assert from_json.fields() == made.fields()


def test_a_script_of_trl_is_read_and_never_run(tmp_path):
    made = made_of(tmp_path, "train.py", TRL_SCRIPT)
    assert not (tmp_path / "ran").exists()
    fields = made.fields()
    assert fields["model.path"] == "Qwen/Qwen3-0.6B" and fields["optim.learning_rate"] == 5e-7
    assert fields["reward.functions"] == ("my_rewards.short",) and "reward.functions" in made.yours()
    assert (fields["loss.name"], fields["aggregate.mode"]) == ("gspo", "sequence_mean")
    assert fields["num_steps"] == 50  # one update on a rollout
    assert fields["data.source"] == "someone/sums@train"
    # What only running it would tell is the user's to set, and the default stands there meanwhile.
    assert made.outcomes["per_device_train_batch_size"].kind == "unsupported"
    assert "args.size" in made.yours()["prompts_per_step"] and fields["prompts_per_step"] == 2


@pytest.mark.parametrize(
    ("keys", "base_dtype", "kind"),
    [
        ("use_peft: true\nload_in_8bit: true\n", "int8", "changed"),
        ("load_in_8bit: true\nuse_peft: true\n", "int8", "changed"),
        ("use_peft: true\nload_in_8bit: false\n", "", "no effect"),
        ("load_in_8bit: true\n", None, "unsupported"),
    ],
)
def test_a_quantized_model_of_trl_is_a_base_in_int8_if_only_adapters_learn(keys, base_dtype, kind, tmp_path):
    made = made_of(tmp_path, "grpo.yaml", TRL_YAML + keys)
    assert made.outcomes["load_in_8bit"].kind == kind
    _, c = config_of(made, tmp_path)
    assert c.get("adapters.base_dtype") == base_dtype


def test_ppo_of_trl_has_a_critic_and_its_schedule_counts_rollouts(tmp_path):
    made = made_of(tmp_path, "ppo.sh", TRL_PPO)
    _, c = config_of(made, tmp_path)
    expected = {
        "prompts_per_step": 128, "prompts_per_update": 64, "group_size": 1, "epochs": 4, "num_steps": 10,
        "model.path": "someone/sft", "kl.placement": "reward", "kl.estimator": "k1", "kl.coef": 0.03,
        "optim.warmup_steps": 24, "critic.optim.warmup_steps": 24, "critic.clip": 0.3, "critic.lam": 0.95,
        "optim.learning_rate": 3e-6, "critic.optim.learning_rate": 3e-6, "rollout.temperature": 0.7,
    }  # fmt: skip
    assert {name: c[name] for name in expected} == expected
    assert made.outcomes["reward_model_path"].kind == "changed"
    assert made.fields()["reward_model.path"] == "someone/rm" and made.fields()["reward.functions"] == ()


@pytest.mark.parametrize(
    ("keys", "placement", "estimator", "kind"),
    [
        (dict(use_kl_loss=True, kl_loss_type="low_var_kl"), "loss", "k3", "mapped"),
        (dict(use_kl_loss=True, kl_loss_type="mse"), "loss", "k2", "mapped"),
        (dict(use_kl_loss=True, kl_loss_type="kl"), "loss", "k2", "changed"),  # its gradient has mean zero
        (dict(use_kl_loss=True, kl_loss_type="k3+"), "loss", "k2", "changed"),
        (dict(use_kl_loss=True, kl_loss_type="abs"), None, None, "unsupported"),
        (dict(use_kl_loss=False), None, None, "mapped"),
        (dict(use_kl_loss=False, reward=True, estimator="rloo"), "reward", "k1", "mapped"),
        (dict(use_kl_loss=False, reward=True, estimator="grpo"), "loss", "k2", "changed"),
        (dict(use_kl_loss=True, reward=True, estimator="rloo"), "loss", "k3", "mapped"),
    ],
)
def test_the_kl_penalty_of_verl_has_its_place_and_estimator(keys, placement, estimator, kind):
    given = {f"{ACTOR}{key}": value for key, value in keys.items() if "kl" in key}
    given |= {"algorithm.use_kl_in_reward": keys.get("reward", False), "actor_rollout_ref.rollout.n": 4}
    given["algorithm.adv_estimator"] = keys.get("estimator", "grpo")
    made = translate(verl.VERL, given)
    assert (made.fields().get("kl.placement"), made.fields().get("kl.estimator")) == (placement, estimator)
    assert placement or made.fields()["kl"] is None
    assert made.outcomes[f"{ACTOR}use_kl_loss"].kind == kind
    # Advantages of grpo would be divided by a deviation that the penalty is a part of; and it has one place.
    expected = {"grpo": "changed", "rloo": "unsupported" if keys["use_kl_loss"] else "mapped"}
    if "estimator" in keys:
        assert made.outcomes["algorithm.use_kl_in_reward"].kind == expected[keys["estimator"]]


@pytest.mark.parametrize(
    ("system", "key", "value", "mode", "length"),
    [
        ("verl", f"{ACTOR}loss_agg_mode", "token-mean", "token_mean", 0),
        ("verl", f"{ACTOR}loss_agg_mode", "seq-mean-token-mean", "sequence_mean", 0),
        ("verl", f"{ACTOR}loss_agg_mode", "seq-mean-token-sum", "sequence_sum", 0),
        ("verl", f"{ACTOR}loss_agg_mode", "seq-mean-token-sum-norm", "constant", 512),
        ("easyr1", "worker.actor.loss_avg_mode", "seq", "sequence_mean", 0),
        ("trl_grpo", "loss_type", "grpo", "sequence_mean", 0),
        ("trl_grpo", "loss_type", "bnpo", "token_mean", 0),
        ("trl_grpo", "loss_type", "dr_grpo", "constant", 512),
        ("trl_grpo", "loss_type", "luspo", "sequence_sum", 0),
    ],
)
def test_an_aggregation_has_our_name(system, key, value, mode, length):
    fields = translate(SYSTEMS[system], {key: value}).fields()
    assert (fields["aggregate.mode"], fields["aggregate.constant_length"]) == (mode, length)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("gae", "gae"), ("grpo", "grpo"), ("rloo", "rloo"), ("remax", "remax"), ("opo", "opo"),
        ("reinforce_plus_plus", "reinforce_pp"), ("reinforce_plus_plus_baseline", "reinforce_pp_baseline"),
    ],
)  # fmt: skip
def test_an_estimator_of_verl_has_our_name_and_passes_the_checks(value, name, tmp_path):
    given = {"algorithm.adv_estimator": value, "actor_rollout_ref.rollout.n": 1 if value == "gae" else 4}
    made = translate(verl.VERL, given | {"trainer.total_training_steps": 10})
    text, c = config_of(made, tmp_path)
    assert c["advantage.name"] == name
    assert made.base == ("ppo" if value == "gae" else "grpo")
    assert lint.lint(lint.load_text(text), set(made.yours())).refused == ""


@pytest.mark.parametrize("mode", verl.LOSSES)
def test_a_loss_of_verl_has_our_name_and_passes_the_checks(mode, tmp_path):
    given = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4, verl.MODE: mode}
    made = translate(verl.VERL, given | {"trainer.total_training_steps": 10})
    text, c = config_of(made, tmp_path)
    assert c["loss.name"] == verl.LOSSES[mode][0]
    assert lint.lint(lint.load_text(text), set(made.yours())).refused == ""


@pytest.mark.parametrize("mode", trl_rules.LOSSES)
def test_a_loss_of_trl_has_our_name_and_passes_the_checks(mode, tmp_path):
    more = {"epsilon_high": 5.0} if mode == "cispo" else {}
    made = translate(trl.GRPO, {"loss_type": mode, "max_steps": 10} | more)
    text, c = config_of(made, tmp_path)
    assert c["loss.name"] == trl_rules.LOSSES[mode][0]
    assert mode != "cispo" or c["loss.clip_high"] == 4.0  # TRL's is the bound itself
    assert lint.lint(lint.load_text(text), set(made.yours())).refused == ""


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_table_sets_fields_that_are_there_and_knows_its_defaults(name):
    system = SYSTEMS[name]
    pairs, there = system in (trl_pairs.DPO, trl_pairs.SIMPO), set()
    for base in ("dpo", "simpo") if pairs else ("ppo", "search_ppo"):
        c = load(CONFIGS / f"{base}.py")
        if not pairs:
            c.entropy, c.kl.adaptive, c.kl.refresh = {"coef": 1.0, "adaptive": {}}, {}, {}
        table = records.table(SftRecipe if pairs else Recipe, c.to_dict())
        there |= set(table.fields) | table.optional | set(flatten(c))
    of_functions = ("advantage.", "loss.", "adapters.", "reward_model.", "data.mixture")
    values = (None, True, False, 0, 1, 8, 0.5, "", "gae", "cosine", [1, 2], {"a": 1}, "someone/thing")
    for key in [*system.rules, *system.defaults]:
        key = key.replace("[*][*]", "**").replace("*", "anything")
        for value in (*values, system.defaults.get(key)):
            try:
                outcome = system.rule(key)(value, Keys({key: value}, system.defaults, rows=0, processes=0))
            except (TypeError, ValueError, ArithmeticError, AttributeError):  # what `translate` reports: a wrong type
                continue
            assert isinstance(outcome, Outcome) and outcome.kind in KINDS
            assert all(field in there or field.startswith(of_functions) for field in outcome.fields), outcome.fields
            assert outcome.kind not in ("unsupported", "no effect") or outcome.reason
    keys = Keys({}, system.defaults, rows=0, processes=0)
    for key, value in system.defaults.items():
        assert "has no such key" not in system.rule(key)(value, keys).reason, key


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("verl", f"{ACTOR} {ACTOR}optim. actor_rollout_ref.rollout. actor_rollout_ref.model. data. algorithm. critic. "
                 "critic.optim. trainer. reward_model. reward."),
        ("search_r1", f"{ACTOR} actor_rollout_ref.rollout. data. algorithm. retriever. trainer."),
        ("easyr1", "worker.actor. worker.actor.optim. worker.rollout. worker.critic. worker.reward. data. algorithm. "
                   "trainer."),
    ],
)  # fmt: skip
def test_an_unknown_key_of_any_section_is_named_and_not_taken_for_one_without_effect(name, sections):
    system = SYSTEMS[name]
    keys = [f"{section}surprise" for section in sections.split()]
    made = translate(system, dict.fromkeys(keys, 1))
    assert list(made.with_kind("unsupported")) == keys
    assert all("has no such key, or this table does not know it" in one.reason for one in made.outcomes.values())


def test_epochs_become_steps_once_the_rows_are_known(tmp_path):
    unknown = made_of(tmp_path, "e.yaml", EASYR1)
    assert "num_steps" in unknown.yours()
    known = made_of(tmp_path, "e.yaml", EASYR1, rows=1000)
    assert known.fields()["num_steps"] == 3 * (1000 // 64) and "num_steps" not in known.yours()
    passes = translate(trl.GRPO, {"num_train_epochs": 2, "per_device_train_batch_size": 8}, rows=100, processes=4)
    assert passes.fields()["prompts_per_step"] == 4 and passes.fields()["num_steps"] == 50


def test_a_command_of_trl_may_name_a_yaml_file(tmp_path):
    write(tmp_path, "grpo.yaml", TRL_YAML)
    keys = keys_of(tmp_path, "run.sh", "accelerate launch --num_processes=3 go.py --config grpo.yaml --beta 0.5\n")
    assert (keys["beta"], keys["num_generations"], keys["accelerate.num_processes"]) == (0.5, 4, 3)
    made = made_of(tmp_path, "cli.sh", "trl grpo --config nowhere.yaml --beta 0.5\n")
    assert made.outcomes["config"].kind == "unsupported" and made.fields()["kl.coef"] == 0.5


@pytest.mark.parametrize(
    ("heading", "systems"),
    [
        ("TRL's GRPO", [trl.GRPO]),
        ("TRL's PPO", [trl_ppo.PPO]),
        ("TRL's RLOO", [trl_rloo.RLOO]),
        ("TRL's DPO and SimPO", [trl_pairs.DPO, trl_pairs.SIMPO]),
        ("Pictures", [easyr1.EASYR1, verl.VERL, trl.GRPO]),
        ("veRL", [verl.VERL]),
        ("EasyR1", [easyr1.EASYR1]),
        ("Search-R1", [search_r1.SEARCH_R1]),
    ],
)
def test_the_keys_in_the_docs_are_in_the_table(heading, systems):
    text = (CONFIGS.parent / "docs" / "coming_from.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    first = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    names = [name for cell in first for name in re.findall(r"`([\w.*]+)`", cell)]
    rules = [key for system in systems for key in system.rules]
    assert len(names) > 4
    for name in names:
        end = name.replace(".*", ".").rstrip("*")
        assert any(f".{rule}".endswith(f".{end}") or f".{end}" in f".{rule}" for rule in rules), name


def test_a_reference_to_another_key_has_its_value(tmp_path):
    keys = keys_of(
        tmp_path,
        "v.yaml",
        "data: {max_response_length: 77}\nactor_rollout_ref:\n"
        "  actor: {ppo_mini_batch_size: 16, a: '${.ppo_mini_batch_size}', b: '${oc.select:no.x,5}'}\n"
        "  rollout: {response_length: '${data.max_response_length}', c: 'x-${data.max_response_length}',"
        " d: '${no.x}'}\n",
    )
    assert keys[f"{ACTOR}a"] == 16 and keys[f"{ACTOR}b"] == 5
    assert keys["actor_rollout_ref.rollout.response_length"] == 77 and keys["actor_rollout_ref.rollout.c"] == "x-77"
    assert isinstance(keys["actor_rollout_ref.rollout.d"], Unread)


COMMAND = "python3 -m verl.trainer.main_ppo {} actor_rollout_ref.rollout.n=4 trainer.total_training_steps=9"
OF_CONFIG = """
defaults:
  - ppo_trainer
  - data: small
  - optim@actor_rollout_ref.actor.optim: fast
  - _self_
data: {train_batch_size: 256}
actor_rollout_ref: {model: {path: a/b}}
algorithm: {adv_estimator: grpo}
"""
NAMED = [  # arguments of a command, and where the file is that they name
    ("--config-name=mine", "mine.yaml"),
    ("--config-name mine.yaml", "config/mine.yaml"),
    ("-cn mine", "mine.yaml"),
    ("--config-path=settings --config-name='mine'", "settings/mine.yaml"),
    ('--config-path="$(pwd)/settings" -cn mine', "settings/mine.yaml"),
    ("--config-dir $UNKNOWN/x --config-name=mine", "configs/mine.yaml"),
]


@pytest.mark.parametrize(("words", "place"), NAMED)
def test_a_command_may_name_a_file_that_is_made_of_others(words, place, tmp_path):
    file = tmp_path / place
    for name, text in {
        "data/small.yaml": "max_prompt_length: 99\ntrain_batch_size: 7\n",
        "optim/fast.yaml": "lr: 1e-5\n",
        file.name: OF_CONFIG,
    }.items():
        (file.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (file.parent / name).write_text(text)
    made = made_of(tmp_path, "run.sh", COMMAND.format(words))
    expected = {
        "prompts_per_step": 256, "model.path": "a/b", "data.max_prompt_tokens": 99, "optim.learning_rate": 1e-5,
        "group_size": 4, "num_steps": 9,
    }  # fmt: skip
    assert {name: made.fields()[name] for name in expected} == expected
    assert "--config-name" not in made.outcomes and made.with_kind("unsupported") == {}


def test_a_file_that_is_not_there_is_unsupported_and_verls_own_is_not(tmp_path):
    made = made_of(tmp_path, "run.sh", COMMAND.format("--config-name=mine"))
    assert list(made.with_kind("unsupported")) == ["--config-name"]
    for own in ("ppo_trainer", "ppo_megatron_trainer.yaml"):
        made = made_of(tmp_path, "run.sh", COMMAND.format(f"--config-path=config --config-name='{own}'"))
        assert made.with_kind("unsupported") == {}, own
    made = made_of(tmp_path, "v.yaml", OF_CONFIG.replace("  - data: small", "  - data: small\n  - lost/file"))
    assert "lost/file" in made.outcomes["defaults"].reason and made.outcomes["defaults"].kind == "unsupported"


def test_values_of_the_environment_and_of_other_sections_are_said(tmp_path, capsys):
    text = """
vars: {root: '~/rows', user: '${oc.env:USER,me}', unused: 3}
data: {train_files: '${vars.root}/${oc.env:USER,me}/train.parquet', max_prompt_length: 64}
actor_rollout_ref: {model: {path: '${oc.env:MODEL}'}, rollout: {n: 4, n_gpus: "${now:%H}"}}
algorithm: &a {adv_estimator: grpo}
trainer: {total_training_steps: 5, total_training_steps: 6, project_name: '${vars.user}'}
"""
    file = write(tmp_path, "v.yaml", text)
    assert program.run(file, tmp_path / "mine.py", 0, 0) == 1
    said = capsys.readouterr().out
    made = made_of(tmp_path, "v.yaml", text)
    assert made.fields()["data.source"] == "~/rows/me/train.parquet"
    assert "note: data.train_files: ${oc.env:USER,me} is its default here, me" in said
    assert "belongs to no key of the training command: line 6: total_training_steps again" in said
    assert "model.path" in made.yours()
    kinds = {key: made.outcomes[key].kind for key in ("vars.root", "vars.user", "vars.unused")}
    assert kinds == {"vars.root": "no effect", "vars.user": "no effect", "vars.unused": "unsupported"}
    assert isinstance(keys_of(tmp_path, "v.yaml", text)["actor_rollout_ref.rollout.n_gpus"], Unread)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "- 1\n- 2\n", "no mapping"),
        ("a.yaml", "a: [1\n", "cannot be parsed"),
        ("a.json", "{", "cannot be parsed"),
        ("a.yaml", "colour: red\nshape: round\n", "none of TRL, veRL, EasyR1 and Search-R1"),
        ("a.yaml", '"learning_rate: 1\\nimport os #": 2\n', "is no name"),
        ("a.py", "import os\n", "no GRPOConfig, RLOOConfig, PPOConfig, DPOConfig or CPOConfig"),
        ("a.py", "KTOConfig()\n", "KTOConfig, which is not translated"),
        ("a.py", "def (\n", "no Python"),
        ("a.py", "GRPOConfig(beta=1)\nGRPOConfig(beta=2)\n", "2 configs, at lines 1, 2"),
        ("a.sh", "echo hello\n", "no training command"),
        ("a.sh", 'echo "hello\n', "has no end"),
        ("a.sh", "python -m verl.trainer.main_ppo trainer.nnodes=1\n" * 2, "2 training commands"),
        ("a.yaml", "num_generations: many\nbeta: 0.1\n", "cannot be translated"),
        ("a.yaml", "num_generations: 0\nbeta: 0.1\n", "cannot be translated"),
    ],
)
def test_a_wrong_file_gives_one_line(tmp_path, name, text, words):
    with pytest.raises(UserError, match=words) as error:
        made_of(tmp_path, name, text)
    assert "\n" not in str(error.value)


def test_text_of_a_file_never_becomes_code(tmp_path):
    ran = tmp_path / "ran"
    evil = f'"""\nopen({str(ran)!r}, "w")\n"""'
    given = {"model_name_or_path": f"a/b{evil}", "reward_funcs": [evil], "system_prompt": evil, "max_steps": 4}
    file = tmp_path / 'x""" + print(1) + """.json'
    file.write_text(json.dumps(given))
    source = readers.read(file)
    made = translate(source.system, source.keys)
    text = writer.source(made, file, Path("configs/mine.py"))
    assert lint.load_text(text).model.path == given["model_name_or_path"]
    assert not ran.exists()


def test_the_program_writes_a_config_prints_the_table_and_what_the_doctor_says(tmp_path, capsys):
    many = VERL.replace("ppo_mini_batch_size=32", "ppo_mini_batch_size=8")
    to = tmp_path / "mine.py"  # in any folder
    assert program.run(write(tmp_path, "run.sh", many), to, 0, 0) == 0
    said = capsys.readouterr().out
    assert "run.sh: 25 keys of veRL (0.9.1)" in said and "mapped" in said and "unsupported" in said
    assert "the checks pass" in said and "16 optimizer steps on a rollout, more than 4" in said
    assert "could not look: learning_rate (no config.json of Qwen/Qwen2.5-0.5B-Instruct here)" in said
    c = load(to)
    recipes.read(c.lock())
    assert c.prompts_per_update == 8
    with pytest.raises(UserError, match="this one is there"):
        program.run(tmp_path / "run.sh", to, 0, 0)
    with pytest.raises(UserError, match="--processes"):
        program.run(tmp_path / "run.sh", None, 0, 8)
    with pytest.raises(UserError, match="there is no folder"):
        program.run(tmp_path / "run.sh", tmp_path / "other" / "mine.py", 0, 0)


def test_a_translation_that_the_checks_refuse_says_why_and_is_written_all_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    alone = VERL.replace("rollout.n=4", "rollout.n=1")  # a group of one has no advantage
    assert program.run(write(tmp_path, "run.sh", alone), None, 0, 0) == 1
    said = capsys.readouterr().out
    assert "the checks refuse it: config.group_size = 1: advantage 'grpo' compares the members of a group" in said
    assert "c.group_size = 1" in said


def test_one_line_says_that_the_file_is_written_also_if_the_checks_refuse_it(tmp_path, capsys):
    to = tmp_path / "mine.py"
    for text, code, said in (
        (VERL, 0, "the checks pass"),
        (VERL.replace("rollout.n=4", "rollout.n=1"), 1, "the checks refuse it: config.group_size = 1"),
    ):
        assert program.run(write(tmp_path, "run.sh", text), to, 0, 0) == code
        line = f"{to} is written and complete; {said}"
        assert any(x.startswith(line) for x in capsys.readouterr().out.splitlines())
        to.unlink()
    program.run(tmp_path / "run.sh", None, 0, 0)
    assert "is written" not in capsys.readouterr().out
    to.symlink_to(tmp_path / "nowhere" / "mine.py")
    with pytest.raises(UserError, match=r"--to .* cannot be written \(No such file or directory\)"):
        program.run(tmp_path / "run.sh", to, 0, 0)


def test_without_pyarrow_all_the_rest_is_checked_and_one_line_says_what_is_missing(tmp_path, capsys, monkeypatch):
    for module in (lint, extras):
        monkeypatch.setattr(module, "find_spec", lambda name: name != "pyarrow")
    parts = VERL.replace('"$ROOT/train.parquet"', "\"['a.parquet','b.parquet']\"")
    for name, text, files in (
        ("v.sh", VERL, "~/sums/train.parquet, ~/sums/test.parquet"),
        ("parts.sh", parts, "~/sums/test.parquet, a.parquet, b.parquet"),
        ("t.yaml", TRL_YAML.replace("dataset_name: ", "dataset_name: d/a.parquet #"), "d/a.parquet"),
    ):
        assert program.run(write(tmp_path, name, text), tmp_path / f"{name}.py", 0, 0) == 0
        said = capsys.readouterr().out
        assert f"{name}.py is written and complete; the checks pass" in said
        assert f"train needs pyarrow for {files}, which is not installed here: pip install 'jaxrl_llm[parquet]'" in said
    assert "yours to set: data.source" not in said


def test_a_run_without_evaluations_keeps_the_problems_for_who_sets_them_later(tmp_path):
    text, c = config_of(made_of(tmp_path, "run.sh", VERL.replace("test_freq=10", "test_freq=-1")), tmp_path)
    assert c["eval"] is None and "# To evaluate, set eval.every instead.\n" in text
    config = lint.load_text(text)
    override(config, "eval.every", "5")
    assert (config.eval.source, config.eval.convert) == ("~/sums/test.parquet", "verl.convert")
    assert config.eval.function == c["reward.functions"][0].replace("score", "accuracy")
    text, c = config_of(made_of(tmp_path, "grpo.yaml", TRL_YAML), tmp_path)
    assert c["eval"] is None and "# To evaluate, set eval.every instead, and name the problems in eval.source" in text
    several = "data.val_files=\"['a.parquet','b.parquet']\" algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    made = made_of(tmp_path, "several.sh", f"python -m verl.trainer.main_ppo {several}\n")
    assert made.fields()["eval.source"] == "a.parquet" and "eval.source" not in made.yours()


def test_a_placeholder_says_that_it_is_one(tmp_path):
    for name, text in (
        ("e.yaml", EASYR1),
        ("t.sh", f"python {TRAIN.replace('--max_steps 10', '--num_train_epochs 2')}\n"),
        ("default.sh", "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4\n"),
    ):
        lines = config_of(made_of(tmp_path, name, text), tmp_path)[0].splitlines()
        at = lines.index("    c.num_steps = 100")
        assert "(or give --rows); 100 is a placeholder." in " ".join(lines[at - 2 : at]), (name, lines[at - 2 :])


def test_a_model_that_is_here_is_looked_at_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    here = VERL.replace("Qwen/Qwen2.5-0.5B-Instruct", "jaxrl_llm/assets/arithmetic").replace("lr=3e-6", "lr=3e-3")
    program.run(write(tmp_path, "run.sh", here), None, 0, 0)
    said = capsys.readouterr().out
    assert "optim.learning_rate = 0.003 is 0.0004 or more" in said and "is not here" not in said


VERL_GRPO = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}
VERL_PPO = {"algorithm.adv_estimator": "gae"}
SEARCHES = {"max_turns": 2, "data.max_obs_length": 50}
# A system, the keys of a file, the key that is looked at, what it becomes, fields, and words of what is said.
MEANINGS = [
    # transformers' schedule "constant" ignores the warm-up
    ("trl_grpo", dict(lr_scheduler_type="constant", warmup_ratio=0.1), "warmup_ratio", "mapped",
     {"optim.warmup_ratio": 0.0, "optim.warmup_steps": 0, "optim.decay": "constant"}, "constant has no warm-up"),
    ("trl_grpo", dict(lr_scheduler_type="constant", warmup_steps=20), "warmup_steps", "mapped",
     {"optim.warmup_ratio": 0.0, "optim.warmup_steps": 0}, "constant has no warm-up"),
    ("trl_ppo", dict(lr_scheduler_type="constant", warmup_steps=20), "warmup_steps", "mapped",
     {"optim.warmup_steps": 0, "critic.optim.warmup_steps": 0}, "constant has no warm-up"),
    ("trl_grpo", dict(lr_scheduler_type="constant_with_warmup", warmup_ratio=0.1), "warmup_ratio", "mapped",
     {"optim.warmup_ratio": 0.1, "optim.decay": "constant"}, ""),
    # a share of the run
    ("trl_grpo", dict(eval_strategy="steps", eval_steps=0.1, max_steps=200), "eval_steps", "changed",
     {"eval.every": 20}, "0.1 x 200 steps"),
    ("trl_grpo", dict(save_steps=0.25, max_steps=200, num_iterations=2), "save_steps", "changed",
     {"checkpoint.every": 25}, "0.25 x 100 steps"),
    ("trl_grpo", dict(eval_strategy="steps", eval_steps=7, max_steps=200), "eval_steps", "mapped",
     {"eval.every": 7}, ""),
    ("trl_grpo", dict(reward_funcs=["accuracy_reward"]), "reward_funcs", "mapped",
     {"reward.functions": ("math.accuracy(anchors=True)",)}, ""),
    # gspo of veRL always takes the mean of completions
    *(("verl", VERL_GRPO | {verl.MODE: "gspo", f"{ACTOR}loss_agg_mode": mode}, f"{ACTOR}loss_agg_mode", "mapped",
       {"aggregate.mode": "sequence_mean", "aggregate.constant_length": 0}, said)
      for mode, said in (("token-mean", "mean of completions"), ("seq-mean-token-sum", "mean of completions"),
                         ("seq-mean-token-sum-norm", "mean of completions"), ("seq-mean-token-mean", ""))),
    ("verl", VERL_GRPO | {verl.MODE: "gspo", f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm",
                          f"{ACTOR}loss_scale_factor": 99}, f"{ACTOR}loss_scale_factor", "no effect",
     {"aggregate.constant_length": 0}, "does not divide"),
    # what the critic has of its own
    ("verl", VERL_PPO | {"critic.ppo_epochs": 4}, "critic.ppo_epochs", "changed", {"epochs": 1}, "4 for the critic"),
    ("verl", VERL_PPO | {"critic.ppo_epochs": 1}, "critic.ppo_epochs", "no effect", {}, "as there"),
    ("verl", VERL_PPO | {"critic.ppo_mini_batch_size": 64}, "critic.ppo_mini_batch_size", "changed", {}, "256"),
    ("verl", VERL_PPO | {"critic.loss_agg_mode": "seq-mean-token-mean"}, "critic.loss_agg_mode", "changed", {},
     "token-mean"),
    ("easyr1", VERL_PPO | {"worker.critic.ppo_epochs": 2}, "worker.critic.ppo_epochs", "changed", {}, "2 for"),
    ("easyr1", VERL_PPO | {"worker.critic.global_batch_size": 64}, "worker.critic.global_batch_size", "changed", {},
     "64 for"),
    ("search_r1", SEARCHES | VERL_PPO | {"critic.ppo_epochs": 3}, "critic.ppo_epochs", "changed", {}, "3 for"),
    ("trl_ppo", dict(reward_model_path="a/rm"), "reward_model_path", "changed", {"critic.path": "a/rm"},
     "critic begins as the same model"),
    ("search_r1", SEARCHES | {"data.max_response_length": 100}, "data.max_response_length", "changed",
     {"turns.tokens": 100}, "ends the episode here"),
    *((system, dict(weight_decay=decay), "weight_decay", kind, {"optim.weight_decay": decay}, said)
      for system in ("trl_grpo", "trl_ppo")
      for decay, kind, said in ((0.1, "changed", "embedding"), (0.0, "mapped", ""))),
    *(("trl_grpo", dict(loss_type=loss, mask_truncated_completions=on), "mask_truncated_completions", kind,
       {"mask.truncated": on}, said)
      for loss, on, kind, said in (("grpo", True, "changed", "all completions"), ("dr_grpo", True, "changed", "all"),
                                   ("dapo", True, "mapped", ""), ("grpo", False, "mapped", ""))),
    # a longer prompt is filtered before truncation looks at it
    *(("verl", VERL_GRPO | {"data.filter_overlong_prompts": filtered, "data.truncation": cut}, "data.truncation", kind,
       {"data.overlong": overlong}, "")
      for filtered, cut, kind, overlong in ((True, "error", "mapped", "drop"), (False, "error", "mapped", "error"),
                                            (True, "left", "mapped", "drop"), (False, "left", "changed", "drop"))),
]  # fmt: skip


def test_a_key_whose_meaning_differs_has_the_right_value_or_a_sentence():
    wrong = []
    for name, given, key, kind, fields, said in MEANINGS:
        made = translate(SYSTEMS[name], given)
        one, set_to = made.outcomes[key], made.fields()
        is_so = one.kind == kind and said in one.reason and all(set_to.get(field) == x for field, x in fields.items())
        wrong += [] if is_so else [(name, given, one, {field: set_to.get(field) for field in fields})]
    assert wrong == []
    assert "eval.every" in translate(trl.GRPO, dict(eval_strategy="steps", eval_steps=0.1)).yours()


TRAIN = "train.py --model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy_reward " + (
    "--per_device_train_batch_size 2 --num_generations 4 --max_steps 10"
)
LAUNCHES = [  # how a script is started, the processes that train (0: the file does not say), and files beside it
    ("torchrun --nproc_per_node=8 --nnodes 2", 16, {}),
    ("torchrun --standalone --nproc-per-node 4", 4, {}),
    ("N=3\ntorchrun --nnodes=$N --nproc_per_node 2 --rdzv_backend c10d", 6, {}),
    ("torchrun --nproc_per_node=$GPUS", 0, {}),
    ("torchrun --nproc_per_node=gpu", 0, {}),
    ("torchrun --nnodes=1:4 --nproc_per_node=8", 0, {}),
    ("torchrun --nnodes=2", 2, {}),
    ("python -m torch.distributed.run --nproc_per_node 8", 8, {}),
    ("python3 -m torch.distributed.launch --nproc_per_node=2 --nnodes=2", 4, {}),
    ("deepspeed --num_gpus=8", 8, {}),
    ("deepspeed --num_gpus 8 --num_nodes 2 --hostfile hosts", 16, {}),
    ("deepspeed --include localhost:0,1,2", 3, {}),
    ("deepspeed --include=a:0,1@b:0", 3, {}),
    ("deepspeed", 0, {}),
    ("accelerate launch --num_processes 4 --multi_gpu", 4, {}),
    ("accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0", 16, {}),  # of all machines
    ("accelerate launch --config_file zero3.yaml", 8, {"zero3.yaml": "num_machines: 1\nnum_processes: 8\n"}),
    ("accelerate launch --config_file zero3.yaml --num_processes=7", 7, {"zero3.yaml": "num_processes: 8\n"}),
    ("accelerate launch --config_file elsewhere/zero3.yaml", 0, {}),
    ("python3 -m accelerate.commands.launch --num_processes 2", 2, {}),
    ("cat > acc.yaml <<EOF\nnum_processes: 6\nEOF\naccelerate launch --config_file acc.yaml", 6, {}),
    ("CUDA_VISIBLE_DEVICES=0,1 python", 0, {}),
    ("mpirun -np 8 python", 8, {}),
    ("mpirun --np 4 --bind-to none -x NCCL_DEBUG=INFO python -u", 4, {}),
    ("/opt/openmpi/bin/mpiexec.hydra -n 6 -H a:3,b:3 python", 6, {}),
    ("mpiexec -np $N python", 0, {}),
    ("mpirun --host a:4 python", 0, {}),
    ("mpirun -np 2 --hostfile hosts torchrun --nproc_per_node=4 --nnodes=2", 8, {}),  # the program inside counts
    ("srun -n 8 python", 8, {}),
    ("srun -N2 -n16 --gres gpu:8 python", 16, {}),
    ("srun --ntasks=4 --exclusive python", 4, {}),
    ("srun --ntasks 4 python", 4, {}),
    ("srun --ntasks-per-node=4 python", 4, {}),
    ("srun --ntasks-per-node=4 --nodes=2 python", 8, {}),
    ("srun -N 3 --ntasks-per-node 2 singularity exec image.sif python", 6, {}),
    ("srun --nodes=3 python", 3, {}),  # one on each
    ("srun --nodes=$NODES --ntasks-per-node=4 python", 0, {}),
    ("srun --nodes=1-4 --ntasks-per-node=4 python", 0, {}),
    ("srun --nodes=2 --gpus-per-node=4 --ntasks-per-gpu=1 python", 0, {}),
    ("srun --gres=gpu:8 python", 0, {}),
    ("srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=8", 16, {}),
    ("#SBATCH --nodes=2 --ntasks-per-node=8\n#SBATCH --time=9:00:00\nsrun python", 16, {}),
    ("#SBATCH -N 4 # machines\n#SBATCH -n 32\nsrun --nodes=1 --ntasks-per-node=8 python", 8, {}),
    ("#SBATCH --nodes=2\nsrun --ntasks-per-node=4 python", 8, {}),
    ("#SBATCH --nodes=2 --ntasks-per-node=8\npython", 0, {}),  # without srun there is one
]


def test_the_processes_of_every_launcher_count_and_its_flags_are_keys(tmp_path):
    wrong = []
    for launch, count, files in LAUNCHES:
        for name, text in files.items():
            write(tmp_path, name, text)
        made = made_of(tmp_path, "run.sh", f"{launch} {TRAIN}\n")
        per, said = made.fields()["prompts_per_step"], made.outcomes["per_device_train_batch_size"].reason
        unknown = "names no number of processes" in said
        flags = set(re.findall(r"--([a-z_-]+)", launch.splitlines()[-1]))
        there = {key.partition(".")[2] for key in made.outcomes if "." in key}
        if (per, unknown) != (max(round(count / 2), 1), not count) or not {x.replace("-", "_") for x in flags} <= there:
            wrong.append((launch, per, said, there))
        for name in files:
            (tmp_path / name).unlink()
    assert wrong == []


def test_several_files_to_train_on_are_a_mixture(tmp_path):
    script = VERL.replace(
        'data.train_files="$ROOT/train.parquet"', """data.train_files="['a/x/train.parquet','b/train.parquet']" """
    )
    made = made_of(tmp_path, "run.sh", script)
    text, c = config_of(made, tmp_path)
    assert (c["data.source"], c["data.mixture.train.source"], c["data.mixture.b_train.source"]) == (
        "", "a/x/train.parquet", "b/train.parquet",
    )  # fmt: skip
    assert "data.mixture" in made.yours() and c["data.mixture.train.convert"] == "verl.convert"
    assert 'c.data.mixture.train = ConfigDict(dict(source="a/x/train.parquet"' in text
    assert lint.lint(lint.load_text(text), set(made.yours())).refused == ""
    long = translate(verl.VERL, {"data.train_files": ["d" * 90 + "/train.parquet", "e" * 200 + ".parquet"]})
    text, _ = config_of(long, tmp_path)
    ruff = [Path(sys.executable).with_name("ruff"), "format", "--check", "--line-length", "120", "-"]
    assert subprocess.run(ruff, input=text, text=True, capture_output=True).returncode == 0, text


LOST = {  # files whose keys were easily lost: the fields that must come of them
    "a reward in a file of Python": (
        "run.sh",
        VERL.replace("test_freq=10", "test_freq=10 custom_reward_function.path=recipe/r1/score.py"),
        {"prompts_per_step": 128, "optim.learning_rate": 3e-6, "reward.functions": ("my_rewards.compute_score",)},
    ),
    "the reward of data_source": (
        "run.sh",
        "python3 -m verl.trainer.main_ppo data.train_files=a/dapo-math-17k.parquet algorithm.adv_estimator=grpo"
        " actor_rollout_ref.rollout.n=4 reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"
        " reward_model.reward_kwargs.overlong_buffer_cfg.len=64 data.apply_chat_template_kwargs.enable_thinking=False",
        {"reward.functions": ("verl.score",), "reward.overlong_tokens": 64,
         "data.chat_template_args": {"enable_thinking": False}},
    ),
    "names of programs and redirections": (
        "run.sh",
        "torchrun --standalone train.py --model_name_or_path a/b --dataset_name c/d --dataset_config main"
        " --reward_funcs accuracy_reward --no_gradient_checkpointing --learning_rate 1e-5 > train.py 2>&1 &"
        "\npython -m json.tool x.py",
        {"data.source": "c/d:main@train", "data.answer_column": "solution", "optim.learning_rate": 1e-5,
         "model.remat": "dots"},
    ),
    "the answer after a thought": (
        "run.sh",
        "trl grpo --model_name_or_path a/b --dataset_name c/d --reward_funcs reasoning_accuracy_reward --run_name trl",
        {"reward.functions": ("math.accuracy(after='</think>', anchors=True)",), "data.answer_column": "solution"},
    ),
    "what a script sets in several places": (
        "grpo.py",
        "base = dict(num_generations=16)\nargs = GRPOConfig('x', **base, **{'beta': 0.1})\nargs.learning_rate = 3e-6\n"
        "other.beta = 0.2\nrows = load_dataset('c/d', 'main')['test'].map(f).filter(g)\n"
        "GRPOTrainer('a/b', accuracy_reward, args, rows)",
        {"group_size": 16, "kl.coef": 0.1, "optim.learning_rate": 3e-6, "data.source": "c/d:main@test",
         "data.convert": "my_data.convert", "data.answer_column": ""},
    ),
    "a file of rows": (
        "grpo.py",
        "rows = load_dataset('json', data_files='a.jsonl', split='train')\n"
        "GRPOTrainer('a/b', accuracy_reward, GRPOConfig(), rows)",
        {"data.source": "a.jsonl", "data.convert": ""},
    ),
}  # fmt: skip


SCRIPTS = {  # scripts of TRL: a text, keys with their kind, and fields
    "arguments of a LoraConfig": (
        "GRPOTrainer('a/b', accuracy_reward, GRPOConfig(max_steps=5), load_dataset('c/d'), peft_config=LoraConfig("
        "r=8, lora_alpha=32, lora_dropout=0.05, bias='none', task_type='CAUSAL_LM', layers_to_transform=[1]))",
        {"trainer.peft_config.lora_dropout": "unsupported", "trainer.peft_config.layers_to_transform": "unsupported",
         "trainer.peft_config.bias": "no effect", "trainer.peft_config.r": "mapped"},
        {"adapters.name": "lora", "adapters.rank": 8, "adapters.alpha": 32.0},
    ),
    "functions of modules": (
        "from mymod.rewards import good as fine\nimport other.place\nfrom trl.rewards import think_format_reward\n"
        "def own(completions, **columns):\n    return [1.0] * len(completions)\n"
        "GRPOTrainer('a/b', [fine, other.place.f, think_format_reward, own], GRPOConfig(max_steps=5))",
        {"trainer.reward_funcs": "changed"},
        {"reward.functions": ("mymod.rewards.good", "other.place.f", "format.think", "my_rewards.own")},
    ),
    "names in a list": (
        "names: list = ['mymod.rewards.good', 'owner/reward-model']\n"
        "GRPOTrainer('a/b', names, GRPOConfig(reward_weights=[2.0, 0.5]))",
        {"trainer.reward_funcs": "changed", "reward_weights": "mapped"},
        {"reward.functions": ("mymod.rewards.good",), "reward.weights": (2.0,),
         "reward_model.path": "owner/reward-model", "reward_model.weight": 0.5},
    ),
    "a dataclass, f-strings, casts and a model that is loaded": (
        "@dataclass\nclass Args:\n    rate: float = 3e-6\n    group: int = 4\n    name: str = 'Qwen3-0.6B'\n"
        "args = Args(group=16)\nconfig: GRPOConfig = GRPOConfig(learning_rate=args.rate, num_generations=args.group,"
        " beta=float('0.1'), output_dir=f'out/{args.name}', max_steps=args.nothing)\n"
        "model = AutoModelForCausalLM.from_pretrained(f'Qwen/{args.name}', torch_dtype='auto')\n"
        "GRPOTrainer(model=model, reward_funcs=accuracy_reward, args=config)",
        {"max_steps": "unsupported", "output_dir": "no effect"},
        {"optim.learning_rate": 3e-6, "group_size": 16, "kl.coef": 0.1, "model.path": "Qwen/Qwen3-0.6B"},
    ),
    "a mapping that is read from a file": (
        "GRPOTrainer('a/b', accuracy_reward, GRPOConfig(**yaml.safe_load(open('x.yaml')), beta=0.1))",
        {"beta": "mapped"},
        {"kl.coef": 0.1},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "kinds", "fields"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_script_of_python_says_what_its_syntax_tree_says(text, kinds, fields, tmp_path):
    made = made_of(tmp_path, "grpo.py", text)
    assert {key: made.outcomes[key].kind for key in kinds} == kinds
    assert {name: made.fields()[name] for name in fields} == fields
    source, _ = config_of(made, tmp_path)
    assert lint.lint(lint.load_text(source), set(made.yours())).refused == ""


def test_a_script_whose_config_comes_from_its_command_line_says_so(tmp_path, capsys):
    script = "parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\n" + (
        "script_args, training_args, model_args = parser.parse_args_and_config()\n"
        "GRPOTrainer(model_args.model_name_or_path, accuracy_reward, args=training_args)\n"
    )
    assert program.run(write(tmp_path, "grpo.py", script), None, 0, 0) == 1
    said = capsys.readouterr().out
    assert "line 3: args=training_args is not made there: give the command line (a .sh)" in said


@pytest.mark.parametrize(("name", "text", "expected"), LOST.values(), ids=LOST.keys())
def test_no_key_is_lost(tmp_path, name, text, expected):
    made = made_of(tmp_path, name, text)
    _, c = config_of(made, tmp_path)
    assert {name: c[name] for name in expected} == expected


def test_a_part_of_a_split_and_the_steps_of_a_script_are_the_users_to_write(tmp_path):
    made = made_of(tmp_path, "grpo.py", LOST["what a script sets in several places"][1])
    assert made.yours()["data.convert"].startswith("the script calls map, filter: a function of a row")
    for rows in (
        "load_dataset('c/d', split='train[:9]')",
        "load_dataset('c/d')[a.split]",
        "load_dataset('c/d', a.name)",
    ):
        made = made_of(tmp_path, "grpo.py", f"GRPOTrainer('a/b', accuracy_reward, GRPOConfig(), {rows})")
        assert made.outcomes["trainer.train_dataset"].kind == "unsupported"
        assert "data.source" in made.yours()


def test_no_text_of_a_script_controls_the_terminal_or_stands_in_the_config_as_it_is(tmp_path, capsys):
    attack = "\x1b]52;c;aGk=\x07\x1b[2J\x9b2J"
    path = tmp_path / "run.sh"
    keys = f"algorithm.adv_estimator=grpo actor_rollout_ref.model.path='M{attack}' actor_rollout_ref.rollout.n=8"
    path.write_text(f"python -m verl.trainer.main_ppo {keys} data.train_files=t.parquet\ntrainer.a='{attack}'\n")
    assert program.run(path, tmp_path / "mine.py", 0, 0) == 1
    told = capsys.readouterr().out + (tmp_path / "mine.py").read_text()
    assert told.count("\\x1b]52;c;aGk=\\x07") >= 3 and not set("\x1b\x07\x9b") & set(told)


def test_a_reward_function_of_verl_or_easyr1_is_copied_and_not_rewritten(tmp_path):
    easyr1_rewards = "worker: {reward: {reward_function: 'a/score.py:f'}, rollout: {n: 5}}"
    of_verl = "test_freq=10 custom_reward_function.path=a/score.py custom_reward_function.name=f"
    verl_rewards = VERL.replace("test_freq=10", of_verl)
    for name, text in {"e.yaml": easyr1_rewards, "v.sh": verl_rewards}.items():
        made = made_of(tmp_path, name, text)
        assert made.fields()["reward.functions"] == ("my_rewards.f",)
        assert made.yours()["reward.functions"].startswith("copy a/score.py to my_rewards.py beside this file")
