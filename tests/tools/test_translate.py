"""`jaxrl translate`: configs of TRL, veRL, EasyR1 and Search-R1, key by key.

tests/wording.json has the whole config of each file, and the reason of each key whose meaning differs.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from jaxrl_llm import recipe as recipes
from jaxrl_llm.config import records
from jaxrl_llm.config.load import flatten, load, override
from jaxrl_llm.data import hub
from jaxrl_llm.errors import UserError
from jaxrl_llm.machine import extras
from jaxrl_llm.recipe.recipe import Recipe, SftRecipe
from jaxrl_llm.tools.translate import __main__ as program
from jaxrl_llm.tools.translate import conversions, easyr1, lint, readers, search_r1, trl, trl_objectives, verl, writer
from jaxrl_llm.tools.translate.outcome import KINDS, QUIET_FIELDS, Keys, Outcome, Translation, Unread, translate
from jaxrl_llm.tools.translate.releases import Releases, matches

CONFIGS = Path(__file__).parents[2] / "configs"
TRANSLATED = Path(__file__).parent / "translated"
SYSTEMS = {
    "verl": verl.VERL,
    "easyr1": easyr1.EASYR1,
    "search_r1": search_r1.SEARCH_R1,
    "trl_grpo": trl.GRPO,
    "trl_ppo": trl.PPO,
    "trl_rloo": trl.RLOO,
    "trl_dpo": trl.DPO,
    "trl_simpo": trl.SIMPO,
}
QUICK = "easyr1", "trl_rloo"  # trainers with few keys, one of YAML files and one of scripts
ACTOR = "actor_rollout_ref.actor."
MODE = verl.LOSS_MODE

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
KNOWN = VERL.replace("    +actor_rollout_ref.rollout.surprise=7 \\\n", "")  # without a key of no table
EASYR1 = """
data: {train_files: someone/sums@train, val_files: someone/sums@test, prompt_key: question, answer_key: answer,
       rollout_batch_size: 64, format_prompt: ./sums.jinja, max_prompt_length: 128, max_response_length: 256}
algorithm: {adv_estimator: grpo, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 1.0e-2}
worker:
  actor: {global_batch_size: 32, micro_batch_size_per_device_for_update: 2, clip_ratio_high: 0.25,
          model: {model_path: Qwen/Qwen3-0.6B}, optim: {lr: 2.0e-6, lr_warmup_ratio: 0.1}}
  rollout: {n: 4, temperature: 0.9}
  reward: {reward_function: ./mine.py:judge}
trainer: {total_epochs: 3, val_freq: 5, save_freq: 5, save_limit: -1, n_gpus_per_node: 4}
"""
TRL_YAML = """
{model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct, dataset_name: someone/sums, reward_weights: [1.0, 0.5],
 reward_funcs: [accuracy_reward, my_bonus], per_device_train_batch_size: 8, gradient_accumulation_steps: 4,
 steps_per_generation: 8, num_generations: 4, num_processes: 2, max_completion_length: 200, max_prompt_length: 64,
 learning_rate: 5e-6, lr_scheduler_type: cosine, warmup_ratio: 0.1, max_steps: 60, beta: 0.02, loss_type: dr_grpo,
 scale_rewards: false, epsilon_high: 0.28, report_to: [wandb], min_p: 0.1, adam_beta1: 0.8, adam_beta2: 0.99,
 max_grad_norm: 0.1, optim: paged_adamw_8bit}
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


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def keys_of(folder: Path, name: str, text: str) -> dict:
    return readers.read(write(folder, name, text)).keys


@pytest.fixture(autouse=True)
def hub_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `datasets`, a config also says how to install it."""
    for module in (conversions, hub):
        monkeypatch.setattr(module, "find_spec", lambda name: True)


def read_and_translate(folder: Path, name: str, text: str, **more: int) -> tuple[readers.ForeignConfig, Translation]:
    source = readers.read(write(folder, name, text))
    return source, translate(source.table, source.keys, referred=source.referred, pinned=source.pinned, **more)


def made_of(folder: Path, name: str, text: str, **more: int) -> Translation:
    return read_and_translate(folder, name, text, **more)[1]


def written(folder: Path, name: str, text: str, **more: int) -> tuple[Translation, dict, str]:
    """Translates a file, asserts what holds for every file, and returns the translation, the config and its text."""
    source, made = read_and_translate(folder, name, text, **more)
    # Each key has one kind, and what is not mapped is in a comment, with its reason.
    assert list(made.outcomes) == list(source.keys)
    assert sum(len(made.with_kind(kind)) for kind in KINDS) == len(source.keys)
    text = writer.source(made, Path("given.sh"), Path("configs/mine.py"), source.lost)
    comments = " ".join(text.replace("\n", " ").replace("# ", " ").split())
    for key, outcome in made.outcomes.items():
        reason = " ".join(outcome.reason.replace("# ", " ").split())
        written_out = outcome.kind != "mapped" and reason and "adapters.targets" not in outcome.fields
        assert not written_out or (key in comments and reason in comments), key
        assert outcome.reason or outcome.kind not in ("unsupported", "no effect"), key
    assert all(" ".join(line.split()) in comments for line in source.lost)
    assert max(map(len, text.splitlines())) <= 120
    # What is written has the fields of the translation, and passes the checks.
    config = lint.load_text(text)
    c = flatten(config)
    fields = made.fields()
    assert {name for name in differing(fields, c) if not name.startswith("eval.")} <= {"data.mixture"}
    checked = lint.lint(config, set(made.user_tasks()))
    assert checked.refused == "" and checked.sizes
    return made, c, text


def differing(expected: dict, config: dict) -> dict:
    """Returns the fields of a config that are not as expected, as they are."""
    return {name: config.get(name, "absent") for name, x in expected.items() if config.get(name, "absent") != x}


def differing_kinds(expected: dict[str, str], made: Translation) -> dict:
    """Returns the keys that became something else. The kind "yours" is that of a field which the user must complete."""
    yours = made.user_tasks()
    kinds = {key: made.outcomes[key].kind if kind != "yours" else key in yours for key, kind in expected.items()}
    return {key: kind for key, kind in kinds.items() if kind not in (True, expected[key])}


# Files, with fields of their configs and the kinds of their keys.
FILES = {
    "verl.sh": (VERL, {
        "prompts_per_step": 128, "prompts_per_update": 32, "group_size": 4, "num_steps": 40, "epochs": 1,
        "microbatch": 4,  # 8 sequences on 2 GPUs are 4 prompts
        "data.source": "~/sums/train.parquet", "data.convert": "verl.convert", "rollout.max_completion_tokens": 200,
        "eval.source": "~/sums/test.parquet", "kl.placement": "loss", "kl.estimator": "k3", "advantage.epsilon": 1e-6,
        "loss.clip_low": 0.2, "loss.clip_high": 0.28, "loss.delta": 3.0, "entropy": None,
        "optim.warmup_steps": 20,  # 5 rollouts of 4 updates
    }, {"actor_rollout_ref.rollout.surprise": "unsupported", "actor_rollout_ref.rollout.top_p": "changed",
        "trainer.save_freq": "changed"}),
    "easyr1.yaml": (EASYR1, {}, {"num_steps": "yours", "data.format_prompt": "yours"}),
    "search.sh": (
        (TRANSLATED / "search_r1_grpo.sh").read_text().replace("n_agent=4", "n_agent=5"),
        {"prompts_per_update": 32}, {},  # 128 / 5 = 25.6 sequences; 32 divides 256
    ),
    "grpo.yaml": (TRL_YAML, {
        "prompts_per_step": 32, "prompts_per_update": 16, "group_size": 4,  # 8 x 8 x 2 and 8 x 4 x 2 completions
        "num_steps": 30, "microbatch": 4, "advantage.normalize": "none", "aggregate.constant_length": 200,
        "kl.placement": "loss", "kl.coef": 0.02, "kl.estimator": "k3", "optim.decay": "cosine", "eval": None,
        "reward.functions": ("math.accuracy(anchors=True)", "my_rewards.my_bonus"), "reward.weights": (1.0, 0.5),
        "optim.b1": 0.8, "optim.b2": 0.99, "optim.clip_norm": 0.1,
    }, {"optim": "changed", "min_p": "unsupported", "report_to": "mapped", "reward.functions": "yours"}),
    # The number of prompts is the user's: only running the script would tell it, and the default stands there.
    "grpo.py": (TRL_SCRIPT, {
        "model.path": "Qwen/Qwen3-0.6B", "optim.learning_rate": 5e-7, "reward.functions": ("my_rewards.short",),
        "loss.name": "gspo", "aggregate.mode": "sequence_mean", "num_steps": 50, "data.source": "someone/sums@train",
        "prompts_per_step": 2,
    }, {"per_device_train_batch_size": "unsupported", "prompts_per_step": "yours", "reward.functions": "yours"}),
    "ppo.sh": (
        f"{(TRANSLATED / 'trl_ppo.sh').read_text().rstrip()} --total_episodes 2560 --kl_coef 0.03"
        " --cliprange_value=0.3 --warmup-steps 3 --bf16",
        {"num_steps": 10, "kl.coef": 0.03, "critic.clip": 0.3, "optim.warmup_steps": 12,
         "critic.optim.warmup_steps": 12}, {"reward_model_path": "changed"},
    ),
    "dpo.sh": (TRL_DPO, {
        "prompts_per_step": 32, "microbatch": 4, "loss.name": "dpo", "loss.nll_coef": 0.2, "adapters.rank": 32,
        "data.source": "trl-lib/ultrafeedback_binarized@train", "eval.source": "trl-lib/ultrafeedback_binarized@test",
        "data.max_prompt_tokens": 768, "rollout.max_completion_tokens": 768, "eval.function": "preference",
    }, {"ld_alpha": "unsupported"}),
    "dpo.py": (TRL_DPO_SCRIPT, {
        "model.path": "Qwen/Qwen3-0.6B", "prompts_per_step": 4, "loss.beta": 0.2, "loss.label_smoothing": 0.1,
        "loss.nll_coef": 0.5, "data.source": "someone/pairs@train", "eval.source": "someone/pairs@test",
        "data.max_prompt_tokens": 200, "rollout.max_completion_tokens": 1024,
    }, {}),
    "simpo.py": (TRL_SIMPO_SCRIPT, {
        "loss.name": "simpo", "loss.beta": 2.0, "loss.gamma": 1.4, "loss.nll_coef": 0.0, "eval": None,
    }, {"loss_type": "mapped", "num_steps": "yours"}),
    "the reward of data_source.sh": (
        "python3 -m verl.trainer.main_ppo data.train_files=a/dapo-math-17k.parquet algorithm.adv_estimator=grpo"
        " actor_rollout_ref.rollout.n=4 reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"
        " reward_model.reward_kwargs.overlong_buffer_cfg.len=64 data.apply_chat_template_kwargs.enable_thinking=False",
        {"reward.functions": ("verl.score",), "reward.overlong_tokens": 64,
         "data.chat_template_args": {"enable_thinking": False}}, {},
    ),
    "a LoraConfig.py": (
        "GRPOTrainer('a/b', accuracy_reward, GRPOConfig(max_steps=5), load_dataset('c/d'), peft_config=LoraConfig("
        "r=8, lora_alpha=32, lora_dropout=0.05, bias='none', task_type='CAUSAL_LM', layers_to_transform=[1]))",
        {"adapters.name": "lora", "adapters.rank": 8, "adapters.alpha": 32.0},
        {"trainer.peft_config.lora_dropout": "unsupported", "trainer.peft_config.layers_to_transform": "unsupported",
         "trainer.peft_config.bias": "no effect", "trainer.peft_config.r": "mapped"},
    ),
    "names in a list.py": (
        "names: list = ['mymod.rewards.good', 'owner/reward-model']\n"
        "GRPOTrainer('a/b', names, GRPOConfig(reward_weights=[2.0, 0.5]))",
        {"reward.functions": ("mymod.rewards.good",), "reward.weights": (2.0,),
         "reward_model.path": "owner/reward-model", "reward_model.weight": 0.5},
        {"trainer.reward_funcs": "changed", "reward_weights": "mapped"},
    ),
    "a dataclass, f-strings, casts and a model that is loaded.py": (
        "@dataclass\nclass Args:\n    rate: float = 3e-6\n    group: int = 4\n    name: str = 'Qwen3-0.6B'\n"
        "args = Args(group=16)\nconfig: GRPOConfig = GRPOConfig(learning_rate=args.rate, num_generations=args.group,"
        " beta=float('0.1'), output_dir=f'out/{args.name}', max_steps=args.nothing)\n"
        "model = AutoModelForCausalLM.from_pretrained(f'Qwen/{args.name}', torch_dtype='auto')\n"
        "GRPOTrainer(model=model, reward_funcs=accuracy_reward, args=config)",
        {"optim.learning_rate": 3e-6, "group_size": 16, "kl.coef": 0.1, "model.path": "Qwen/Qwen3-0.6B"},
        {"max_steps": "unsupported", "output_dir": "no effect"},
    ),
    "a mapping that is read from a file.py": (
        "GRPOTrainer('a/b', accuracy_reward, GRPOConfig(**yaml.safe_load(open('x.yaml')), beta=0.1))",
        {"kl.coef": 0.1}, {"beta": "mapped"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_a_complete_config_with_its_numbers(name, tmp_path, wording):
    text, fields, kinds = FILES[name]
    made, c, text = written(tmp_path, name, text)
    assert differing(fields, c) == {} and differing_kinds(kinds, made) == {}
    assert not (tmp_path / "ran").exists()  # the script itself
    wording(text)


OVERLONG_TRL = (
    "GRPOTrainer('a/b', [accuracy_reward, get_soft_overlong_punishment(900, 90)], GRPOConfig(), load_dataset('c/d'))"
)
VERL_RUN = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    " data.train_files=a/gsm8k/train.parquet "
)
EVALUATES = "data.val_files=a/test.parquet trainer.test_freq=5 "
TRL_RUN = "trl grpo --model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy_reward --max_steps 9 "
# Files whose run differs in something, and a pattern of the comments that say so; with False they must not say it.
SAID = [
    (VERL_RUN, "####72", True), (VERL_RUN.replace("gsm8k", "geo3k"), "####72", False),
    (VERL_RUN, "best checkpoint.keep_best", True),
    (f"{VERL_RUN} trainer.max_actor_ckpt_to_keep=null", "best checkpoint.keep_best", True),
    (f"{VERL_RUN} trainer.max_actor_ckpt_to_keep=3", "best checkpoint.keep_best", False),
    (TRL_RUN, "best checkpoint.keep_best", True),
    (f"{TRL_RUN} --save_total_limit 3", "best checkpoint.keep_best", False),
    (EASYR1.replace(" save_limit: -1,", ""), "best checkpoint.keep_best", True),
    (OVERLONG_TRL, "advantage.normalize is none", True),
    (f"{VERL_RUN} reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=9",
     "advantage.normalize is none", True),
    (EASYR1.replace("actor: {", "actor: {fsdp: {mp_param_dtype: bf16, torch_dtype: bf16}, "),
     "float32 in both trainers", False),
    ("GRPOTrainer(name(), accuracy_reward, GRPOConfig(), load_dataset('c/d'), peft_config=LoraConfig(r=8, "
     "lora_dropout=0.1))", r"until then they are those of grpo.py:\s[^:]*(adapters|lora_dropout)", False),
    (f"{VERL_RUN} {EVALUATES}", "first eval.problems", True),
    (f"{VERL_RUN} {EVALUATES} data.val_max_samples=9", "first eval.problems", False),
    (f"{TRL_RUN} --eval_strategy steps --eval_steps 5", "first eval.problems", True), (TRL_RUN, "eval.problems", False),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SAID)))
def test_a_comment_says_where_a_run_differs_and_nothing_untrue(number, tmp_path):
    text, pattern, is_said = SAID[number]
    name = "run.py" if text.startswith("GRPOTrainer") else "run.yaml" if text.startswith("\ndata:") else "run.sh"
    _, _, config = written(tmp_path, name, text)
    comments = re.sub(r"\s+# (?!- )", " ", config)
    assert bool(re.search(pattern, comments)) == is_said


def test_the_checks_judge_no_stand_in_beside_the_rows_of_the_user(tmp_path):
    script = f"{VERL_RUN} data.val_files=[a/test.parquet,b/test.parquet] trainer.test_freq=5"
    made, _, text = written(tmp_path, "run.sh", script)
    found = lint.lint(lint.load_text(text), set(made.user_tasks())).findings
    assert "eval.source" in made.user_tasks() and not [x for x in found if "arithmetic" in x.evidence]


@pytest.mark.needs("ruff")
def test_configs_are_formatted_as_ours_are(tmp_path):
    long = {"data.train_files": ["d" * 90 + "/train.parquet", "e" * 200 + ".parquet"]}
    texts = [writer.source(translate(verl.VERL, long), Path("given.sh"), Path("configs/mine.py"))]
    for name, (text, *_) in FILES.items():
        texts.append(writer.source(made_of(tmp_path, name, text), Path("given.sh"), Path("configs/mine.py")))
    for number, text in enumerate(texts):
        write(tmp_path, f"written/config{number}.py", text)
    ruff = [Path(sys.executable).with_name("ruff"), "format", "--check", "--line-length", "120", "--isolated"]
    done = subprocess.run([*ruff, tmp_path / "written"], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_a_json_file_is_read_as_a_yaml_file_is(tmp_path):
    in_json = json.dumps(keys_of(tmp_path, "grpo.yaml", TRL_YAML))
    assert made_of(tmp_path, "grpo.json", in_json).fields() == made_of(tmp_path, "grpo.yaml", TRL_YAML).fields()


def test_the_name_of_a_program_tells_pairs_from_rewards(tmp_path):
    for name, text, system in (
        ("run.sh", "trl dpo --model_name_or_path a/b", trl.DPO),
        ("run.sh", "python dpo.py --model_name_or_path a/b --beta 0.1", trl.DPO),
        ("run.sh", "python -m recipes.simpo --model_name_or_path a/b --simpo_gamma 1", trl.SIMPO),
        ("run.sh", "python scripts/grpo_after_dpo.py --model_name_or_path a/b --beta 0.1", trl.GRPO),
        ("dpo.yaml", "model_name_or_path: a/b\nbeta: 0.1\n", trl.DPO),
        ("run.sh", "trl rloo --model_name_or_path a/b --beta 0.1", trl.RLOO),
        ("run.sh", "python rloo.py --model_name_or_path a/b --beta 0.1", trl.RLOO),
    ):
        assert made_of(tmp_path, name, text).table is system, text


def test_every_estimator_and_loss_has_our_name_and_passes_the_checks():
    estimators = {
        "gae": "gae", "grpo": "grpo", "rloo": "rloo", "remax": "remax", "opo": "opo",
        "reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    }  # fmt: skip
    wanted = [
        *((verl.VERL, {"algorithm.adv_estimator": theirs}, "advantage.name", ours)
          for theirs, ours in estimators.items()),
        *((verl.VERL, VERL_GRPO | {MODE: mode}, "loss.name", loss)
          for mode, loss in verl.FAMILY.losses.items()),
        *((trl.GRPO, {"loss_type": mode} | ({"epsilon_high": 5.0} if mode == "cispo" else {}), "loss.name", loss[0])
          for mode, loss in trl_objectives.LOSSES.items()),
    ]  # fmt: skip
    for system, given, field, name in wanted:
        group = {"actor_rollout_ref.rollout.n": 1 if "gae" in given.values() else 4}
        made = translate(system, given | ({"max_steps": 10} if system is trl.GRPO else group))
        config = lint.load_text(writer.source(made, Path("given.sh"), Path("configs/mine.py")))
        assert flatten(config)[field] == name and made.base == ("ppo" if name == "gae" else "grpo"), given
        # TRL's upper bound of cispo is the bound itself.
        assert system is verl.VERL or name != "cispo" or config.loss.clip_high == 4.0
        assert lint.lint(config, set(made.user_tasks())).refused == "", given


@cache
def known_fields(*, pairs: bool) -> set[str]:
    known: set[str] = set()
    for base in ("dpo", "simpo") if pairs else ("ppo", "search_ppo"):
        c = load(CONFIGS / f"{base}.py")
        if not pairs:
            c.entropy, c.kl.adaptive, c.kl.refresh = {"coef": 1.0, "adaptive": {}}, {}, {}
        table = records.table(SftRecipe if pairs else Recipe, c.to_dict())
        known |= set(table.fields) | table.optional_sections | set(flatten(c))
    return known


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_table_sets_known_fields_and_knows_its_defaults(name):
    system = replace(SYSTEMS[name], absent=())
    there = known_fields(pairs=name in ("trl_dpo", "trl_simpo"))
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
    assert system.defaults.keys() <= system.rules.keys()


def test_an_unknown_key_of_any_section_is_unsupported():
    for name, sections in {
        "verl": f"{ACTOR} {ACTOR}optim. actor_rollout_ref.rollout. actor_rollout_ref.model. data. algorithm. critic. "
        "critic.optim. trainer. reward_model. reward.",
        "search_r1": f"{ACTOR} actor_rollout_ref.rollout. data. algorithm. retriever. trainer.",
        "easyr1": "worker.actor. worker.actor.optim. worker.rollout. worker.critic. worker.reward. data. algorithm. "
        "trainer.",
    }.items():
        keys = [f"{section}surprise" for section in sections.split()]
        assert list(translate(SYSTEMS[name], dict.fromkeys(keys, 1)).with_kind("unsupported")) == keys


def test_epochs_become_steps_once_the_rows_are_known(tmp_path):
    known = made_of(tmp_path, "e.yaml", EASYR1, rows=1000)
    assert known.fields()["num_steps"] == 3 * (1000 // 64) and "num_steps" not in known.user_tasks()
    passes = translate(trl.GRPO, {"num_train_epochs": 2, "per_device_train_batch_size": 8}, rows=100, processes=4)
    assert passes.fields()["prompts_per_step"] == 4 and passes.fields()["num_steps"] == 50
    assert made_of(tmp_path, "simpo.py", TRL_SIMPO_SCRIPT, rows=100).fields()["num_steps"] == 13
    assert written(tmp_path, "dpo.py", TRL_DPO_SCRIPT, rows=10)[1]["num_steps"] == 100  # as the script says


def test_a_command_of_trl_may_name_a_yaml_file(tmp_path):
    write(tmp_path, "grpo.yaml", TRL_YAML)
    keys = keys_of(tmp_path, "run.sh", "accelerate launch --num_processes=3 go.py --config grpo.yaml --beta 0.5\n")
    assert (keys["beta"], keys["num_generations"], keys["accelerate.num_processes"]) == (0.5, 4, 3)
    made = made_of(tmp_path, "cli.sh", "trl grpo --config nowhere.yaml --beta 0.5\n")
    assert made.outcomes["config"].kind == "unsupported" and made.fields()["kl.coef"] == 0.5


DOCUMENTED = {
    "TRL's GRPO": [trl.GRPO],
    "TRL's PPO": [trl.PPO],
    "TRL's RLOO": [trl.RLOO],
    "TRL's DPO and SimPO": [trl.DPO, trl.SIMPO],
    "Images": [easyr1.EASYR1, verl.VERL, trl.GRPO],
    "veRL": [verl.VERL],
    "EasyR1": [easyr1.EASYR1],
    "Search-R1": [search_r1.SEARCH_R1],
}


def test_the_keys_in_the_docs_are_in_the_table():
    page = (CONFIGS.parent / "docs" / "coming_from.md").read_text()
    for heading, systems in DOCUMENTED.items():
        text = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        first = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
        names = [name for cell in first for name in re.findall(r"`([\w.*]+)`", cell)]
        rules = [key for system in systems for key in {*system.rules, *system.renamed}]
        assert len(names) > 4
        for name in names:
            end = name.replace(".*", ".").rstrip("*")
            assert any(f".{rule}".endswith(f".{end}") or f".{end}" in f".{rule}" for rule in rules), name


def test_the_fields_in_the_docs_are_those_of_the_table():
    page = (CONFIGS.parent / "docs" / "coming_from.md").read_text()
    sections = {field.split(".")[0] for field in known_fields(pairs=False)}
    for heading, system in (("veRL", verl.VERL), ("EasyR1", easyr1.EASYR1), ("Search-R1", search_r1.SEARCH_R1)):
        lines = page.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
        for keys, here in (line.split("|")[1:3] for line in lines if line.startswith("| `")):
            ends = [f".{name.rstrip('*')}".replace("..", ".") for name in re.findall(r"`([\w.*]+)`", keys)]
            rules = {rule for rule in system.rules if any(end in f".{rule}" for end in ends)}
            fields = {field for rule in rules for field in system.decides.get(rule, ())}
            # A field stands there alone, or with a * for the rest of its section.
            for name in re.findall(r"`([a-z_]+\.[a-z_.]+)\*?`", here):
                is_value = name.split(".")[0] not in sections
                assert is_value or any(field.startswith(name) for field in fields), (heading, name, keys)


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
    ("-cn mine.yaml", "config/mine.yaml"),
    ("--config-path=settings --config-name='mine'", "settings/mine.yaml"),
    ('--config-path="$(pwd)/settings" -cn mine', "settings/mine.yaml"),
    ("--config-dir $UNKNOWN/x --config-name mine", "configs/mine.yaml"),
]


def test_a_command_may_name_a_file_that_is_made_of_others(tmp_path):
    expected = {
        "prompts_per_step": 256, "model.path": "a/b", "data.max_prompt_tokens": 99, "optim.learning_rate": 1e-5,
        "group_size": 4, "num_steps": 9,
    }  # fmt: skip
    for number, (words, place) in enumerate(NAMED):
        file = tmp_path / str(number) / place
        write(file.parent, "data/small.yaml", "max_prompt_length: 99\ntrain_batch_size: 7\n")
        write(file.parent, "optim/fast.yaml", "lr: 1e-5\n")
        write(file.parent, file.name, OF_CONFIG)
        made = made_of(tmp_path / str(number), "run.sh", COMMAND.format(words))
        assert differing(expected, made.fields()) == {}, words
        assert "--config-name" not in made.outcomes and made.with_kind("unsupported") == {}, words


def test_a_file_that_is_not_there_is_unsupported_and_verls_own_is_not(tmp_path):
    made = made_of(tmp_path, "run.sh", COMMAND.format("--config-name=mine"))
    assert list(made.with_kind("unsupported")) == ["--config-name"]
    made = made_of(tmp_path, "run.sh", "python3 -m verl.trainer.main config=not/there.yaml worker.rollout.n=4")
    assert list(made.with_kind("unsupported")) == ["config"]
    for own in ("ppo_trainer", "ppo_megatron_trainer.yaml"):
        made = made_of(tmp_path, "run.sh", COMMAND.format(f"--config-path=config --config-name='{own}'"))
        assert made.with_kind("unsupported") == {}, own
    made = made_of(tmp_path, "v.yaml", OF_CONFIG.replace("  - data: small", "  - data: small\n  - lost/file"))
    assert "lost/file" in made.outcomes["defaults"].reason and made.outcomes["defaults"].kind == "unsupported"


def test_values_of_the_environment_and_of_other_sections_are_said(tmp_path, capsys, wording):
    text = """
vars: {root: '~/rows', user: '${oc.env:USER,me}', unused: 3}
data: {train_files: '${vars.root}/${oc.env:USER,me}/train.parquet', max_prompt_length: 64}
actor_rollout_ref: {model: {path: '${oc.env:MODEL}'}, rollout: {n: 4, n_gpus: "${now:%H}"}}
algorithm: &a {adv_estimator: grpo}
trainer: {total_training_steps: 6, project_name: '${vars.user}'}
"""
    assert program.run(write(tmp_path, "v.yaml", text), tmp_path / "mine.py", 0, 0) == 1
    printed = capsys.readouterr().out
    assert "${oc.env:USER,me}" in printed
    wording(printed)
    made = made_of(tmp_path, "v.yaml", text)
    assert made.fields()["data.source"] == "~/rows/me/train.parquet"
    kinds = {"vars.root": "no effect", "vars.user": "no effect", "vars.unused": "unsupported", "model.path": "yours"}
    assert differing_kinds(kinds, made) == {}
    assert isinstance(keys_of(tmp_path, "v.yaml", text)["actor_rollout_ref.rollout.n_gpus"], Unread)


WRONG = [  # a file, and what the line names that refuses it
    ("a.yaml", "- 1\n- 2\n", "a.yaml"), ("a.yaml", "a: [1\n", "a.yaml"), ("a.json", "{", "a.json"),
    ("a.yaml", "colour: red\nshape: round\n", "colour"),
    ("a.yaml", '"learning_rate: 1\\nimport os #": 2\n', "learning_rate"), ("a.py", "import os\n", "GRPOConfig"),
    ("a.py", "KTOConfig()\n", "KTOConfig"), ("a.py", "def (\n", "a.py"),
    ("a.py", "GRPOConfig(beta=1)\nGRPOConfig(beta=2)\n", "lines 1, 2"), ("a.sh", "echo hello\n", "a.sh"),
    ("a.sh", 'echo "hello\n', "a.sh"),
    ("a.sh", "python -m verl.trainer.main_ppo trainer.nnodes=1\n" * 2, "2 training commands"),
    ("a.yaml", "num_generations: many\nbeta: 0.1\n", "num_generations"),
    ("a.yaml", "num_generations: 0\nbeta: 0.1\n", "num_generations"),
]  # fmt: skip


def test_a_wrong_file_gives_one_line(tmp_path, refused):
    for name, text, named in WRONG:
        with refused(named) as error:
            made_of(tmp_path, name, text)
        assert "\n" not in str(error.value)


def test_text_of_a_file_never_becomes_code(tmp_path):
    ran = tmp_path / "ran"
    evil = f'"""\nopen({str(ran)!r}, "w")\n"""'
    given = {"model_name_or_path": f"a/b{evil}", "reward_funcs": [evil], "system_prompt": evil, "max_steps": 4}
    file = tmp_path / 'x""" + print(1) + """.json'
    file.write_text(json.dumps(given))
    source = readers.read(file)
    made = translate(source.table, source.keys)
    text = writer.source(made, file, Path("configs/mine.py"))
    assert lint.load_text(text).model.path == given["model_name_or_path"]
    assert not ran.exists()


def test_the_program_writes_a_config_and_prints_what_the_doctor_says(tmp_path, capsys, wording, refused):
    many = KNOWN.replace("ppo_mini_batch_size=32", "ppo_mini_batch_size=8")
    to = tmp_path / "mine.py"  # in any folder
    assert program.run(write(tmp_path, "run.sh", many), to, 0, 0) == 0
    wording(printed := capsys.readouterr().out)
    assert any(line.startswith(f"{to} is written") for line in printed.splitlines())
    recipes.read((c := load(to)).lock())
    assert c.prompts_per_update == 8
    with refused("mine.py"):  # which is there
        program.run(tmp_path / "run.sh", to, 0, 0)
    with refused("--processes"):
        program.run(tmp_path / "run.sh", None, 0, 8)
    with refused("other"):
        program.run(tmp_path / "run.sh", tmp_path / "other" / "mine.py", 0, 0)
    to.unlink()
    to.symlink_to(tmp_path / "nowhere" / "mine.py")
    with refused("--to"):
        program.run(tmp_path / "run.sh", to, 0, 0)


def test_a_config_that_the_checks_refuse_is_written_all_the_same(tmp_path, capsys, monkeypatch, wording):
    monkeypatch.chdir(CONFIGS.parent)
    alone = write(tmp_path, "run.sh", VERL.replace("rollout.n=4", "rollout.n=1"))  # a group of one has no advantage
    for to in (None, tmp_path / "mine.py"):
        assert program.run(alone, to, 0, 0) == 1
        printed = "".join(capsys.readouterr())
        assert "config.group_size = 1" in printed and "c.group_size = 1" in (to.read_text() if to else printed)
        assert ("mine.py" in printed) == bool(to)
        wording(printed)


def test_without_pyarrow_all_the_rest_is_checked_and_a_line_names_each_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: name != "pyarrow")
    parts = KNOWN.replace('"$ROOT/train.parquet"', "\"['a.parquet','b.parquet']\"")
    for name, text, files in (
        ("v.sh", KNOWN, "~/sums/train.parquet, ~/sums/test.parquet"),
        ("parts.sh", parts, "~/sums/test.parquet, a.parquet, b.parquet"),
        ("t.yaml", TRL_YAML.replace("someone/sums", "d/a.parquet"), "d/a.parquet"),
    ):
        # The weights of two sources are in no file, and min_p has no counterpart.
        assert program.run(write(tmp_path, name, text), None, 0, 0) == int(name != "v.sh")
        lines = [line for line in capsys.readouterr().err.splitlines() if "jaxrl_llm[parquet]" in line]
        assert [file for file in files.split(", ") if not any(f"'{file}'" in line for line in lines)] == []


def test_a_run_without_evaluations_keeps_the_problems_for_later(tmp_path, wording):
    _, c, text = written(tmp_path, "run.sh", VERL.replace("test_freq=10", "test_freq=-1"))
    assert c["eval"] is None
    override(config := lint.load_text(text), "eval.every", "5")
    assert (config.eval.source, config.eval.convert) == ("~/sums/test.parquet", "verl.convert")
    assert config.eval.function == c["reward.functions"][0].replace("score", "accuracy")
    wording(next(line for line in text.splitlines() if "eval.every" in line))
    several = "data.val_files=\"['a.parquet','b.parquet']\" algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    made = made_of(tmp_path, "several.sh", f"python -m verl.trainer.main_ppo {several}\n")
    assert made.fields()["eval.source"] == "a.parquet" and "eval.source" not in made.user_tasks()


def test_a_placeholder_says_that_it_is_one(tmp_path):
    for name, text in (
        ("t.sh", f"python {TRAIN.replace('--max_steps 10', '--num_train_epochs 2')}\n"),
        ("default.sh", "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4\n"),
    ):
        made = made_of(tmp_path, name, text)
        lines = writer.source(made, Path("given.sh"), Path("configs/mine.py")).splitlines()
        at = lines.index("    c.num_steps = 100")
        assert "--rows" in " ".join(lines[at - 2 : at]), (name, lines[at - 2 :])


def test_a_model_that_is_here_is_looked_at_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    here = VERL.replace("Qwen/Qwen2.5-0.5B-Instruct", "jaxrl_llm/assets/arithmetic").replace("lr=3e-6", "lr=3e-3")
    program.run(write(tmp_path, "run.sh", here), None, 0, 0)
    assert "optim.learning_rate = 0.003" in capsys.readouterr().out


VERL_GRPO = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4, "trainer.total_training_steps": 10}
VERL_PPO = {"algorithm.adv_estimator": "gae"}
SEARCHES = {"max_turns": 2, "data.max_obs_length": 50}
LOAD = "load_in_8bit"


def kl_of_verl(estimator: str = "grpo", in_reward: bool = False, **keys: object) -> dict:
    keys = {f"{ACTOR}{key}": value for key, value in keys.items()}
    return VERL_GRPO | keys | {"algorithm.use_kl_in_reward": in_reward, "algorithm.adv_estimator": estimator}


# A system, keys of a file, what some of them become, and fields (None: not set).
MEANINGS = [
    # transformers' schedule "constant" ignores the warm-up
    ("trl_grpo", dict(lr_scheduler_type="constant", warmup_ratio=0.1), {"warmup_ratio": "mapped"},
     {"optim.warmup_ratio": 0.0, "optim.warmup_steps": 0, "optim.decay": "constant"}),
    ("trl_grpo", dict(lr_scheduler_type="constant", warmup_steps=20), {"warmup_steps": "mapped"},
     {"optim.warmup_ratio": 0.0, "optim.warmup_steps": 0}),
    ("trl_ppo", dict(lr_scheduler_type="constant", warmup_steps=20), {"warmup_steps": "mapped"},
     {"optim.warmup_steps": 0, "critic.optim.warmup_steps": 0}),
    # a share of the run
    ("trl_grpo", dict(eval_strategy="steps", eval_steps=0.1, max_steps=200), {"eval_steps": "changed"},
     {"eval.every": 20}),
    ("trl_grpo", dict(save_steps=0.25, max_steps=200, num_iterations=2), {"save_steps": "changed"},
     {"checkpoint.every": 25}),
    ("trl_dpo", dict(dataset_name="data/pairs.jsonl", eval_strategy="steps", max_steps=40, eval_steps=0.1),
     {"eval.source": "yours"}, {"eval.every": 4}),
    ("trl_grpo", dict(run_name="first"), {"run_name": "mapped"}, {"log.name": "first"}),
    # what a schedule does with other arguments is not here
    ("trl_grpo", dict(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2}),
     {"lr_scheduler_kwargs": "unsupported"}, {}),
    # bf16 is on by default, and then float32 is the dtype of parameters
    *(("trl_grpo", dict(dtype="float32") | bf16, {"dtype": "mapped"}, {"model.dtype": dtype})
      for bf16, dtype in (({}, "bfloat16"), ({"bf16": False}, "float32"))),
    # the penalty for long completions has no weight here, and ends at the limit, and not always at 1280
    *(("trl_grpo", dict(reward_funcs=["accuracy", "get_soft_overlong_punishment"], reward_weights=[1.0, weight],
                        max_completion_length=limit), {"reward_funcs": kind}, {"reward.overlong_tokens": 256})
      for weight, limit, kind in ((1.0, 1280, "changed"), (0.5, 1280, "unsupported"), (1.0, 1536, "unsupported"))),
    # TRL 0.26 and 0.27 accept a limit of prompts, and do not read it
    ("trl_grpo", dict(max_prompt_length=99), {"max_prompt_length": "changed"}, {"data.max_prompt_tokens": 99}),
    ("trl_ppo", dict(reward_model_path=None), {"reward_model_path": "unsupported"}, {}),
    # gspo of veRL always takes the mean of completions
    *(("verl", VERL_GRPO | {MODE: "gspo", f"{ACTOR}loss_agg_mode": mode}, {f"{ACTOR}loss_agg_mode": "mapped"},
       {"aggregate.mode": "sequence_mean", "aggregate.constant_length": 0})
      for mode in ("token-mean", "seq-mean-token-sum-norm", "seq-mean-token-mean")),
    ("verl", VERL_GRPO | {MODE: "gspo", f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm",
                          f"{ACTOR}loss_scale_factor": 99}, {f"{ACTOR}loss_scale_factor": "no effect"},
     {"aggregate.constant_length": 0}),
    # what the critic has of its own
    ("verl", VERL_PPO | {"critic.ppo_epochs": 4}, {"critic.ppo_epochs": "unsupported"}, {"epochs": 1}),
    ("verl", VERL_PPO | {"critic.ppo_mini_batch_size": 64}, {"critic.ppo_mini_batch_size": "unsupported"}, {}),
    ("verl", VERL_PPO | {"critic.loss_agg_mode": "seq-mean-token-mean"}, {"critic.loss_agg_mode": "unsupported"}, {}),
    ("easyr1", VERL_PPO | {"worker.critic.ppo_epochs": 2, "worker.critic.global_batch_size": 64},
     {"worker.critic.ppo_epochs": "unsupported", "worker.critic.global_batch_size": "unsupported"}, {}),
    ("search_r1", SEARCHES | VERL_PPO | {"critic.ppo_epochs": 3}, {"critic.ppo_epochs": "unsupported"}, {}),
    *((system, dict(weight_decay=0.1), {"weight_decay": "changed"}, {"optim.weight_decay": 0.1})
      for system in ("trl_grpo", "trl_ppo")),
    *(("trl_grpo", dict(loss_type=loss, mask_truncated_completions=True), {"mask_truncated_completions": "changed"},
       {"mask.truncated": True}) for loss in ("grpo", "dr_grpo")),
    ("verl", VERL_GRPO | {"data.filter_overlong_prompts": False, "data.truncation": "error"},
     {"data.truncation": "mapped"}, {"data.overlong": "error"}),
    # the penalty of veRL: the gradients of kl and k3+ have mean zero, and those of grpo would be divided by a deviation
    *(("verl", kl_of_verl(use_kl_loss=True, kl_loss_type=theirs), {f"{ACTOR}use_kl_loss": kind},
       {"kl.placement": placement, "kl.estimator": ours})
      for theirs, placement, ours, kind in (("kl", "loss", "k2", "changed"), ("k3+", "loss", "k2", "changed"),
                                            ("abs", None, None, "unsupported"))),
    ("verl", kl_of_verl("grpo", True, use_kl_loss=False), {"algorithm.use_kl_in_reward": "changed"},
     {"kl.placement": "loss", "kl.estimator": "k2"}),
    ("verl", kl_of_verl("reinforce_plus_plus_baseline", True, use_kl_loss=False),
     {"algorithm.use_kl_in_reward": "changed"}, {"kl.placement": "loss", "kl.estimator": "k2"}),
    ("verl", kl_of_verl("rloo", True, use_kl_loss=True, kl_loss_type="low_var_kl"),
     {"algorithm.use_kl_in_reward": "unsupported"}, {"kl.placement": "loss", "kl.estimator": "k3"}),
    # names of aggregations
    *((system, {key: value}, {}, {"aggregate.mode": mode, "aggregate.constant_length": 0})
      for system, key, value, mode in (
        ("verl", f"{ACTOR}loss_agg_mode", "seq-mean-token-mean", "sequence_mean"),
        ("verl", f"{ACTOR}loss_agg_mode", "seq-mean-token-sum", "sequence_sum"),
        ("trl_grpo", "loss_type", "bnpo", "token_mean"), ("trl_grpo", "loss_type", "luspo", "sequence_sum"))),
    ("trl_grpo", dict(beta=0.1), {}, {"kl.estimator": "k3_weighted"}),
    # losses of pairs that are not here
    *(("trl_dpo", {"loss_type": loss, "max_steps": 10}, {"loss_type": "unsupported"}, {"loss.name": None})
      for loss in ("hinge", ["sigmoid", "hinge"], ["sft"])),
    ("trl_simpo", {"loss_type": "ipo"}, {"loss_type": "unsupported"}, {}),
    # a quantized model is a base in int8 if only adapters learn, in any order of the keys
    ("trl_grpo", {"use_peft": True, LOAD: True}, {LOAD: "changed"}, {"adapters.base_dtype": "int8"}),
    ("trl_grpo", {LOAD: True, "use_peft": True}, {LOAD: "changed"}, {"adapters.base_dtype": "int8"}),
    ("trl_grpo", {"use_peft": True, LOAD: False}, {LOAD: "no effect"}, {"adapters.base_dtype": ""}),
    ("trl_grpo", {LOAD: True}, {LOAD: "unsupported"}, {"adapters.base_dtype": None}),
]  # fmt: skip


def test_a_key_whose_meaning_differs_has_the_right_value_or_a_sentence(wording):
    for name, given, kinds, fields in MEANINGS:
        made = translate(SYSTEMS[name], given)
        values = {field: made.fields().get(field) for field in fields}
        assert (differing_kinds(kinds, made), values) == ({}, fields), (name, given)
        wording("\n".join(made.outcomes[key].reason for key, kind in kinds.items() if kind != "yours"))


TRAIN = "trl/scripts/grpo.py --model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy_reward " + (
    "--per_device_train_batch_size 2 --num_generations 4 --max_steps 10"
)
TINY_ZERO = (
    "python3 -m verl.trainer.main_ppo data.train_files=d/gsm8k/train.parquet data.train_batch_size=256 {}"
    " actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size=8"
    " actor_rollout_ref.model.path=a/b trainer.total_training_steps=9"
)
VERSIONS = [  # a file, fields of its config, and what is unknown
    ("v.sh", "# pip install verl==0.2\n" + TINY_ZERO.format(""),
     {"kl.placement": "reward", "kl.estimator": "k1", "kl.coef": 0.001, "entropy.coef": 0.001, "loss.delta": 0.0,
      "loss.clip_low": 0.2, "loss.clip_high": 0.2, "advantage.name": "gae", "num_steps": 8}, []),
    ("v.sh", TINY_ZERO.format("actor_rollout_ref.actor.use_kl_loss=True"), {"kl.placement": "loss"},
     ["entropy", "loss.delta", "num_steps"]),
    ("v.sh", TINY_ZERO.format("actor_rollout_ref.actor.loss_agg_mode=token-mean"),
     {"kl": None, "entropy": None, "loss.delta": 3.0, "num_steps": 9}, []),
    ("v.sh", TINY_ZERO.format(f"{ACTOR}loss_agg_mode=token-mean {ACTOR}fsdp_config.grad_offload=True"), {},
     ["entropy", "kl", "loss.delta", "num_steps"]),
    ("v.sh", TINY_ZERO.replace("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu").format(""),
     {"kl": None, "entropy": None, "loss.delta": 3.0}, []),
]  # fmt: skip


def test_a_key_of_old_versions_alone_brings_their_defaults(tmp_path):
    for name, text, fields, unknown in VERSIONS:
        made, c, _ = written(tmp_path, name, text)
        assert (differing(fields, c), sorted(made.unknown())) == ({}, sorted(unknown)), (text, made.unknown())
        assert bool(made.notes) == ("per_gpu" not in text)


TOOLS = """
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config: {}
    tool_schema: {type: function, function: {name: search, description: Searches.}}
"""
TURNS = "actor_rollout_ref.rollout.multi_turn"


def test_tools_of_several_turns_are_an_environment_or_unknown(tmp_path):
    write(tmp_path, "tools/search.yaml", TOOLS)
    several = f"{V}{OWN}{TURNS}.enable=True {TURNS}.max_assistant_turns=3 {TURNS}.max_tool_response_length=100 "
    made, c, text = written(tmp_path, "a.sh", f"{several} {TURNS}.tool_config_path=tools/search.yaml")
    expected = {
        "env.name": "tools.Tools", "env.functions": ("my_tools.search",), "turns.most": 3, "turns.tokens": 512,
        "turns.observation_tokens": 100,
    }  # fmt: skip
    assert differing(expected, c) == {} and list(made.unknown()) == ["env.functions"]
    assert "c.env = ConfigDict" in text and "c.turns = ConfigDict" in text
    for more, unknown in (
        (f"{TURNS}.tool_config_path=elsewhere.yaml", ["env.functions"]),
        ("", ["env"]),
        (f"{TURNS}.enable=False {TURNS}.max_assistant_turns=$N", []),
        ("data.tool_config_path=t.yaml", ["env"]),
    ):
        assert list(made_of(tmp_path, "a.sh", several + more).unknown()) == unknown, more
        assert program.run(tmp_path / "a.sh", None, 0, 0) == int(bool(unknown)), more


@pytest.mark.parametrize(
    ("more", "is_said"),
    [("", True), ("mode=async", True), ("mode=sync", False), ("agent.default_agent_loop=tool_agent", False)],
)
def test_that_verl_gives_tools_only_to_rows_with_an_agent_name_is_said(more, is_said, tmp_path):
    tools = f"{V}{OWN}{TURNS}.enable=True {TURNS}.tool_config_path=tools.yaml "
    made = made_of(tmp_path, "a.sh", tools + f"actor_rollout_ref.rollout.{more}" * bool(more))
    assert ("agent_name" in made.outcomes[f"{TURNS}.enable"].reason) == is_said


def test_arguments_of_a_reward_and_loggers_are_carried_over(tmp_path):
    reward = "custom_reward_function.path=my_rw.py +custom_reward_function.reward_kwargs.alpha=0.25 "
    logs = "trainer.logger='[console,wandb]' trainer.project_name=sums"
    _, c, _ = written(tmp_path, "a.sh", V + OWN + reward + logs.replace("wandb", "tensorboard"))
    assert c["reward.functions"] == ("my_rewards.compute_score(alpha=0.25)",)
    assert (c["log.to"], c["log.project"]) == (("tensorboard",), "")
    made = made_of(tmp_path, "a.sh", V + OWN + reward + logs)
    assert (made.fields()["log.to"], made.fields()["log.project"]) == (("wandb",), "sums")
    assert program.run(tmp_path / "a.sh", None, 0, 0) == 0  # also where wandb is not installed
    reward = "reward: {reward_function: 'a.py:f', reward_function_kwargs: {w: 2}}"
    made = made_of(tmp_path, "e.yaml", f"worker: {{actor: {{model: {{model_path: a/b}}}}, {reward}}}")
    assert made.fields()["reward.functions"] == ("my_rewards.f(w=2)",)
    assert "a.py" in made.user_tasks()["reward.functions"]


def test_a_translation_imports_no_part_of_a_run():
    heavy = "{'jax', 'torch', 'jaxrl_llm.build', 'jaxrl_llm.selftest', 'transformers'} & set(sys.modules)"
    code = f"import sys; import jaxrl_llm.tools.translate.__main__; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.stdout.strip() == "set()"


V = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "
OWN = "actor_rollout_ref.model.path=a/b data.train_files=c/gsm8k/d.parquet trainer.total_training_steps=9 "
SCRIPT = "GRPOTrainer('a/b', accuracy_reward, GRPOConfig(max_steps=9, {}), load_dataset('c/d'))"
UNKNOWN = [  # a file, and what it leaves unknown
    ("a.sh", V + OWN + f"{ACTOR}ppo_micro_batch_size_per_gpu=2 trainer.nnodes=TO_BE_FILLED", []),  # changes no number
    ("a.sh", V + OWN + "data.train_files=$D/train.parquet",
     ["data.source", "data.convert", "reward.functions", "reward.weights"]),
    ("a.sh", V + OWN + "trainer.test_freq=5 data.val_files=$D/test.parquet", ["eval.source", "eval.convert"]),
    ("a.sh", V + OWN + "trainer.test_freq=$T data.val_files=t.parquet", ["eval", "eval.every"]),
    ("a.sh", V + OWN + "reward_model.reward_manager=ttrl", ["reward.functions"]),
    ("a.sh", V + OWN + "reward_model.reward_manager=dapo", []),
    ("a.sh", V + OWN + "algorithm.adv_estimator=mine", ["advantage.name"]),
    ("a.sh", V + OWN + "algorithm.of_a_fork=1", ["algorithm.of_a_fork"]),
    ("a.sh", V + OWN + "algorithm.use_pf_ppo=$P", ["algorithm.use_pf_ppo"]),
    ("a.sh", V + OWN + "algorithm.lam=$L critic.optim.lr=$L trainer.n_gpus_per_node=$N", []),  # without a critic
    ("a.sh", V + OWN.replace("steps=9", "steps=$S"), ["num_steps"]),
    ("a.py", SCRIPT.format("beta=0.1"), []),
    ("a.py", SCRIPT.format("beta=args.beta"), ["kl"]),
    ("a.py", "# trl==0.23.1\n" + SCRIPT.format("max_prompt_length=args.most"), ["data.max_prompt_tokens"]),
    ("a.py", SCRIPT.format("eval_strategy='no', eval_steps=args.steps"), []),
]  # fmt: skip


def test_what_the_file_does_not_say_is_unknown_and_ends_with_one(tmp_path):
    for name, text, unknown in UNKNOWN:
        file = write(tmp_path, name, text)
        source = readers.read(file)
        made = translate(source.table, source.keys, pinned=source.pinned)
        assert (sorted(made.unknown()), sorted(unknown)) == (sorted(unknown), sorted(made.unknown())), text
        assert program.run(file, None, 0, 0) == int(bool(unknown)), text
        assert set(unknown) <= set(made.user_tasks())
        written_text = writer.source(made, Path("given.sh"), Path("configs/mine.py"))
        assert all(re.search(rf"\b{field}\b", written_text) for field in unknown), text


VALUES = (None, True, 0, 8, 0.5, "gae", "steps", ["a", "b"])
CONTEXTS = {  # keys that give others an effect
    "verl": [{"algorithm.adv_estimator": "grpo"}, {f"{ACTOR}use_kl_loss": True}],
    "easyr1": [{}, {"algorithm.adv_estimator": "gae", "algorithm.online_filtering": True}],
    "trl_grpo": [{}, {"eval_strategy": "steps", "use_peft": True, "beta": 0.1}],
}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SYSTEMS if name not in QUICK)]
)
def test_a_key_that_cannot_be_read_is_unknown_or_decides_nothing(name):
    system = SYSTEMS[name]

    def decided(given: dict) -> tuple[dict, set]:
        made = translate(system, given)
        fields = {field: x for field, x in made.fields().items() if field not in QUIET_FIELDS}
        absent = tuple(f"{field}." for field, x in fields.items() if x is None)
        fields = {field: x for field, x in fields.items() if not field.startswith(absent)}
        return fields, {key for key, one in made.outcomes.items() if one.kind == "unsupported"}

    wrong = []
    for context in CONTEXTS.get(name, [{}]):
        for key in {*system.rules, *system.defaults} - context.keys():
            if "(" in key or matches(key, system.absent):
                continue  # of no file
            key = key.replace("[*][*]", "**").replace("*", "anything")
            results = []
            # Whether the key stands there may prove a version.
            for value in VALUES[1:] if system.releases.until else VALUES:
                with contextlib.suppress(UserError, KeyError):
                    results.append(decided(context | {key: value}))
            unknown = translate(system, context | {key: Unread("args.x")}).unknown()
            decides = any(one != results[0] for one in results)
            if decides and not any(f"{key} = args.x" in why for why in unknown.values()):
                wrong.append((key, context))
    assert wrong == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_reason_of_a_key_is_true_for_its_file(name):
    system = SYSTEMS[name]
    wrong = []
    for context in CONTEXTS.get(name, [{}]):
        for key in {*system.rules, *system.defaults} - context.keys():
            for value in (True, 0, "dapo"):
                with contextlib.suppress(UserError, KeyError):
                    made = translate(system, context | {key: value})
                    reason = made.outcomes[key].reason
                    values = system.defaults | made.table.defaults | context | {key: value}
                    of_others = re.search(r"read only if (\S+?)(!?=|$)", reason)
                    # A key is not off because of itself, and what is on is in use.
                    circular = of_others and of_others[1] == key
                    states = re.findall(r"(\S+) is (set|False|True)", reason)
                    untrue = [
                        (k, x) for k, x in states if k in values and str(bool(values[k])) != x.replace("set", "True")
                    ]
                    if circular or untrue or (reason == "not in use" and value not in (None, False, 0)):
                        wrong.append((key, value, reason))
    assert wrong == []


def test_flags_of_a_launcher_in_a_variable_are_not_named_as_lost(tmp_path):
    script = "ARGS='--num_processes 4 --machine_rank 0'\naccelerate launch $ARGS " + TRAIN
    made_of(tmp_path, "run.sh", script)
    assert readers.read(tmp_path / "run.sh").lost == ()


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_old_and_the_new_name_of_a_key_mean_the_same(name):
    system = replace(SYSTEMS[name], releases=Releases(""))  # an old name may prove a version
    for old, new in system.renamed.items():
        for value in (True, False, "gae", ["a"]):
            with contextlib.suppress(UserError):
                by_new = translate(system, {new: system.respelled.get(old, {}).get(str(value), value)})
                assert translate(system, {old: value}).fields() == by_new.fields(), (old, value)
                # Of both the new one counts, unless it says nothing.
                if old not in system.respelled or not system.respelled[old]:
                    assert translate(system, {old: "no", new: value}).fields() == by_new.fields(), (old, value)
                    assert translate(system, {old: value, new: None}).fields() == by_new.fields(), (old, value)
        unread = [translate(system, {key: Unread("x")}).unknown() for key in (old, new)]
        assert unread[0] == unread[1], old


LAUNCHES = [  # how a script is started, the processes that train (0: the file does not say), and files beside it
    ("torchrun --nproc_per_node=8 --nnodes 2", 16, {}), ("torchrun --standalone --nproc-per-node 4", 4, {}),
    ("N=3\ntorchrun --nnodes=$N --nproc_per_node 2 --rdzv_backend c10d", 6, {}),
    ("torchrun --nproc_per_node=gpu", 0, {}), ("torchrun --nnodes=1:4 --nproc_per_node=8", 0, {}),
    ("torchrun --nnodes=2", 2, {}), ("python3 -m torch.distributed.launch --nproc_per_node=2 --nnodes=2", 4, {}),
    ("deepspeed --num_gpus 8 --num_nodes 2 --hostfile hosts", 16, {}), ("deepspeed --include=a:0,1@b:0", 3, {}),
    ("accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0", 16, {}),  # of all machines
    ("accelerate launch --config_file zero3.yaml --num_processes=7", 7, {"zero3.yaml": "num_processes: 8\n"}),
    ("accelerate launch --config_file elsewhere/zero3.yaml", 0, {}),
    ("python3 -m accelerate.commands.launch --num_processes 2", 2, {}),
    ("cat > acc.yaml <<EOF\nnum_processes: 6\nEOF\naccelerate launch --config_file acc.yaml", 6, {}),
    ("CUDA_VISIBLE_DEVICES=0,1 python", 0, {}),
    ("mpirun -np 2 --hostfile hosts torchrun --nproc_per_node=4 --nnodes=2", 8, {}),  # the program inside counts
    ("srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=8", 16, {}),
    ("srun --nodes=2 accelerate launch --num_processes 16", 16, {}),
    ("#SBATCH --nodes=2 --ntasks-per-node=8\npython", 0, {}),  # without srun there is one
]  # fmt: skip


def test_the_processes_of_every_launcher_count_and_its_flags_are_keys(tmp_path):
    wrong = []
    for launch, count, files in LAUNCHES:
        for name, text in files.items():
            write(tmp_path, name, text)
        made = made_of(tmp_path, "run.sh", f"{launch} {TRAIN}\n")
        per, reason = made.fields()["prompts_per_step"], made.outcomes["per_device_train_batch_size"].reason
        unknown = "number of processes" in reason
        # Flags of mpirun and srun count no processes of a launcher inside.
        inside = re.sub("^(mpirun|srun) .*?(?=torchrun|accelerate)", "", launch.splitlines()[-1])
        flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z_-]+)", inside)}
        there = {key.partition(".")[2] for key in made.outcomes if "." in key}
        if (per, unknown) != (max(round(count / 2), 1), not count) or not flags <= there:
            wrong.append((launch, per, reason, there))
        for name in files:
            (tmp_path / name).unlink()
    assert wrong == []


# Launchers of Slurm and MPI whose flags are not read: the number of processes is the user's to say.
TOLD_LAUNCHES = [
    "/opt/openmpi/bin/mpiexec.hydra -n 6 -H a:3,b:3 python", "mpirun -np $N python", "srun python -u",
    "srun -N 3 --ntasks-per-node 2 singularity exec image.sif python", "srun --nodes=2 accelerate launch",
]  # fmt: skip


def test_a_launcher_whose_processes_are_not_read_leaves_the_batch_unknown(tmp_path):
    for launch in TOLD_LAUNCHES:
        made = made_of(tmp_path, "run.sh", f"{launch} {TRAIN}\n")
        assert "--processes" in made.unknown().get("prompts_per_step", ""), launch
        assert made_of(tmp_path, "run.sh", f"{launch} {TRAIN}\n", processes=4).unknown() == {}, launch


def test_an_unknown_variable_behind_a_value_is_told_and_is_no_value(tmp_path, capsys):
    command = "trl grpo --dataset_name a/b --reward_funcs accuracy_reward --max_steps 9 --learning_rate 2e-6"
    for words in ("--model_name_or_path m/n $MORE --beta 0.1", "--beta 0.1 --model_name_or_path m/n ${MORE}"):
        made = made_of(tmp_path, "run.sh", f"{command} {words}\n")
        assert (made.fields()["model.path"], made.fields()["kl.coef"]) == ("m/n", 0.1)
        assert program.run(tmp_path / "run.sh", None, 0, 0) == 1 and "MORE" in capsys.readouterr().out, words


def test_the_project_of_a_tracker_is_that_of_the_environment(tmp_path):
    command = "trl grpo --model_name_or_path m/n --reward_funcs accuracy_reward --max_steps 9 --report_to wandb"
    for before in ("export WANDB_PROJECT=sums\n", "WANDB_PROJECT=sums ", "WANDB_PROJECT=other\nWANDB_PROJECT=sums "):
        assert made_of(tmp_path, "run.sh", f"{before}{command}\n").fields()["log.project"] == "sums"


def test_several_files_to_train_on_are_a_mixture(tmp_path):
    script = VERL.replace(
        'data.train_files="$ROOT/train.parquet"', """data.train_files="['a/x/train.parquet','b/train.parquet']" """
    )
    made, c, text = written(tmp_path, "run.sh", script)
    expected = {
        "data.source": "", "data.mixture.train.source": "a/x/train.parquet",
        "data.mixture.b_train.source": "b/train.parquet", "data.mixture.train.convert": "verl.convert",
    }  # fmt: skip
    assert differing(expected, c) == {} and "data.mixture" in made.user_tasks()
    assert 'c.data.mixture.train.source = "a/x/train.parquet"' in text


def test_a_script_whose_config_comes_from_its_command_line_names_the_line(tmp_path, capsys, wording):
    script = "parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\n" + (
        "script_args, training_args, model_args = parser.parse_args_and_config()\n"
        "GRPOTrainer(model_args.model_name_or_path, accuracy_reward, args=training_args)\n"
    )
    assert program.run(write(tmp_path, "grpo.py", script), None, 0, 0) == 1
    printed = "".join(capsys.readouterr())
    assert "line 2: parser.parse_args_and_config()" in printed
    wording(printed)


def test_no_text_of_a_script_controls_the_terminal(tmp_path, capsys):
    attack = "\x1b]52;c;aGk=\x07\x1b[2J\x9b2J"
    path = tmp_path / "run.sh"
    keys = f"algorithm.adv_estimator=grpo actor_rollout_ref.model.path='M{attack}' actor_rollout_ref.rollout.n=8"
    path.write_text(f"python -m verl.trainer.main_ppo {keys} data.train_files=t.parquet\ntrainer.a='{attack}'\n")
    assert program.run(path, tmp_path / "mine.py", 0, 0) == 1
    told = capsys.readouterr().out + (tmp_path / "mine.py").read_text()
    assert told.count("\\x1b]52;c;aGk=\\x07") >= 3 and not set("\x1b\x07\x9b") & set(told)
