"""Scripts in the forms that trainers publish: no key of them is lost, and each becomes exactly one thing."""

from __future__ import annotations

import re

import pytest
from test_translate import (
    differing,
    hub_installed,  # noqa: F401 (a fixture)
    written,
)

from jaxrl_llm.tools.translate import launchers, readers
from jaxrl_llm.tools.translate.outcome import Unread

CALL = "actor_rollout_ref.model.path=a/b actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo"
TRL = "--model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy_reward think_format_reward --max_steps 20"
# Scripts, fields of their configs, and the lines that belong to no command.
SCRIPTS = {
    "names first.sh": ("""project_name='DAPO'
adv_estimator=grpo
use_kl_in_reward=False
kl_coef=0.0
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
enable_overlong_buffer=True
overlong_buffer_len=$((1024 * 4))
gen_prompt_bsz=$((train_prompt_bsz * 3))
train_prompt_bsz=512
RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RUNTIME_ENV=${RUNTIME_ENV:-"${WORKING_DIR}/verl/trainer/runtime_env.yaml"}
ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \\
    --working-dir "${WORKING_DIR}" \\
    -- python3 -m recipe.dapo.main_dapo \\
    data.prompt_key=prompt \\
    data.truncation='left' \\
    data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=${max_response_length} \\
    data.train_batch_size=${train_prompt_bsz} \\
    actor_rollout_ref.rollout.n=16 \\
    algorithm.adv_estimator=${adv_estimator} \\
    algorithm.use_kl_in_reward=${use_kl_in_reward} algorithm.kl_ctrl.kl_coef=${kl_coef} \\
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    +actor_rollout_ref.model.override_config.attention_dropout=0. \\
    actor_rollout_ref.model.path="${MODEL_PATH}" \\
    reward_model.overlong_buffer.enable=${enable_overlong_buffer} \\
    reward_model.overlong_buffer.len=${overlong_buffer_len} \\
    trainer.logger='["console","wandb"]' trainer.project_name="${project_name}" \\
    trainer.total_epochs=1
""", {"reward.overlong_tokens": 4096, "rollout.max_completion_tokens": 20480, "prompts_per_step": 512}, []),
    "if blocks.sh": (f"""ENGINE=${{1:-vllm}}
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
""", {"kl.coef": 0.01, "kl.placement": "loss"},
     ["line 7: actor_rollout_ref.actor.entropy_coeff=0.1", "line 9: data.seed=3",
     "line 12: actor_rollout_ref.rollout.multi_stage_wake_up=True"]),
    "srun.sh": (f"""#SBATCH --nodes=2
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
ip=$(srun --nodes=1 hostname --ip-address)
PYTHONUNBUFFERED=1 srun --overlap --nodes=1 -w "$head" \\
    python3 -m verl.trainer.main_ppo {CALL} \\
    data.train_batch_size=128 trainer.nnodes="${{SLURM_NNODES}}" trainer.n_gpus_per_node=4 2>&1 | tee verl.log
""", {}, []),
    "search_r1.sh": ("""export DATA_DIR='data/nq_search'
WAND_PROJECT='Search-R1'
export BASE_MODEL='Qwen/Qwen2.5-3B' ; export EXPERIMENT_NAME=grpo
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    data.train_files=$DATA_DIR/train.parquet data.val_files=$DATA_DIR/test.parquet \\
    data.train_data_num=null data.train_batch_size=512 data.max_response_length=500 data.max_start_length=2048 \\
    data.max_obs_length=500 data.shuffle_train_dataloader=True algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=$BASE_MODEL actor_rollout_ref.actor.use_kl_loss=true \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n_agent=5 \\
    algorithm.no_think_rl=false trainer.logger=['wandb'] +trainer.val_only=false \\
    trainer.project_name=$WAND_PROJECT trainer.total_training_steps=1005 \\
    max_turns=2 retriever.url="http://127.0.0.1:8000/retrieve" retriever.topk=3 \\
    2>&1 | tee $EXPERIMENT_NAME.log
""", {"group_size": 5, "env.most_searches": 2}, []),
    "torchrun in a comment's way.sh": (f"""torchrun --nproc_per_node=8 --nnodes 2 \\
    train.py {TRL} \\
    --per_device_train_batch_size 2 \\
    # --num_generations 16 \\
    --beta 0.01
""", {"kl": None, "prompts_per_step": 4}, ["line 5: --beta 0.01"]),
    "trl.sh": (f"""ARGS="{TRL}"
trl grpo $ARGS --use_peft --lora_r 8 --lora_dropout 0.1 --dtype bfloat16 --report_to none
""", {"adapters.rank": 8}, []),
    "heredoc.sh": (f"""cat > conf.yaml <<EOF
beta: ${{BETA:-0.02}}
num_generations: 4
EOF
deepspeed --num_gpus=4 train.py {TRL} --config conf.yaml
""", {"kl.coef": 0.02, "group_size": 4, "prompts_per_step": 8}, []),
}  # fmt: skip
KEY = re.compile(r"(?<![\w./'\"-])[+~]*([a-z_]\w*(?:\.\w+)+)=(?!=)|(?<![\w-])--([a-z_]+)(?=[ =\n])")


def keys_in(text: str) -> set[str]:
    """Returns what looks like a key of a trainer in a script, found in its text by itself."""
    text = re.sub(r"`#[^`]*`", "", text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found = {dotted or flag for line in lines for dotted, flag in KEY.findall(f"{line}\n".replace('"', " "))}
    return {key.removeprefix("no_") for key in found if "." in key or key in readers.FLAGS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_key_of_a_script_is_lost_and_each_becomes_exactly_one_thing(name, tmp_path):
    text, fields, lost = SCRIPTS[name]
    made, c, comments = written(tmp_path, "run.sh", text)
    assert differing(fields, c) == {}
    source = readers.read(tmp_path / "run.sh")
    assert list(source.lost) == lost and not set(made.defaults) & set(made.outcomes)
    # What the script says and what was read are the same keys, but for those that are named as lost.
    keys = {key.rpartition(".")[2] if key.startswith(launchers.LAUNCHERS) else key for key in source.keys}
    assert {key for key in keys_in(text) if key not in keys and key not in " ".join(lost)} == set()
    assert all(isinstance(value, Unread) or "$" not in str(value) for value in source.keys.values())
    comments = " ".join(comments.replace("# ", " ").split())
    assert all(key in comments for key, one in made.outcomes.items() if one.kind in ("unsupported", "no effect"))
