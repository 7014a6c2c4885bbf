#!/usr/bin/env bash
set -euxo pipefail
MODEL_PATH="<path/to/your/base/model>"
TRAIN_FILE='<DATA_DIR>/train.parquet'
export WANDB_API_KEY="YOUR_WANDB_KEY"

use_kl_in_reward=False
clip_ratio_low=0.2
clip_ratio_high=0.28

ray job submit --no-wait --address="http://127.0.0.1:8265" \
    --runtime-env=verl/trainer/runtime_env.yaml \
    -- \
    python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    algorithm.use_kl_in_reward=${use_kl_in_reward} \
    data.train_files="${TRAIN_FILE}" \
    data.train_batch_size=96 \
    data.max_prompt_length=1024 \
    data.max_response_length=$((1024 * 3)) \
    data.truncation='left' \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.optim.lr=1.5e-6 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.grad_clip=0.5 \
    actor_rollout_ref.rollout.n=10 \
    trainer.logger='["console","tensorboard"]' \
    trainer.total_training_steps=120
