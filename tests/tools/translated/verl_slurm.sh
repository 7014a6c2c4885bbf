#!/bin/bash
#SBATCH --job-name=deepmath
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
set -euo pipefail

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes_array=($nodes)
head_node=${nodes_array[0]}
RUN_NAME="deepmath_$(date +%m%d_%H%M)"

MODEL=${MODEL:-Qwen/Qwen2.5-Math-7B}
DATA=/shared/deepmath
COMMON="data.train_files=$DATA/train.parquet data.val_files=$DATA/aime24.parquet trainer.experiment_name=${RUN_NAME} trainer.project_name=deepmath trainer.logger=['console','wandb']"

case "${ALGO:-grpo}" in
  grpo)
    ALGO_ARGS="algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl" ;;
  rloo)
    ALGO_ARGS="algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True trainer.val_before_train=False" ;;
esac

read -r -d '' ACTOR <<EOF || true
actor_rollout_ref.model.path=$MODEL
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=128
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.entropy_coeff=0
EOF

srun --overlap --nodes=1 --ntasks=1 -w "$head_node" \
  python3 -m verl.trainer.main_ppo $ALGO_ARGS $COMMON $ACTOR \
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=3072 \
    data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=0.9 \
    actor_rollout_ref.rollout.val_kwargs.n=8 actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    trainer.nnodes=$SLURM_JOB_NUM_NODES trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 trainer.test_freq=10 trainer.total_training_steps=400
