#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
LR=2e-6
STEPS=${STEPS:-150}
CONF=$(mktemp -d)
mkdir -p conf_here
cat > conf_here/small.yaml << EOF
defaults:
  - ppo_trainer
  - _self_
algorithm:
  adv_estimator: rloo
  use_kl_in_reward: true
  kl_ctrl: {kl_coef: 0.005}
data:
  train_files: data/math/train.parquet
  val_files: data/math/test.parquet
  train_batch_size: 64
  max_prompt_length: 600
  max_response_length: 900
actor_rollout_ref:
  model: {path: Qwen/Qwen3-1.7B}
  actor:
    ppo_mini_batch_size: 64
    optim: {lr: ${LR}}
  rollout: {n: 4, temperature: 0.7, top_p: 0.95}
trainer:
  test_freq: 15
  total_training_steps: $STEPS
EOF
srun --overlap python3 -m verl.trainer.main_ppo --config-path=$PWD/conf_here --config-name=small \
    actor_rollout_ref.rollout.n=8
