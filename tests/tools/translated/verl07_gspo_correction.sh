#!/usr/bin/env bash
set -xeuo pipefail
HDFS_ROOT=${HDFS_ROOT:-$PWD}
DATA_ROOT=${DATA_ROOT:-$PWD}
loss_mode=gspo
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}

ACTOR_CONFIG="
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.clip_ratio_low=0.0003
    actor_rollout_ref.actor.clip_ratio_high=0.0004
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode}
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.ppo_mini_batch_size=32"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=3.0 \
    data.train_files=[data/dapo-math/train.parquet] \
    data.val_files=data/aime/test.parquet \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 data.max_response_length=4096 \
    actor_rollout_ref.model.path=Qwen/Qwen3-4B-Base \
    $ACTOR_CONFIG \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.val_kwargs.n=16 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    trainer.use_legacy_worker_impl=disable \
    trainer.logger=['console','tensorboard'] \
    trainer.project_name=ratios \
    trainer.n_gpus_per_node=${NGPUS_PER_NODE} trainer.nnodes=1 \
    trainer.val_before_train=False \
    trainer.save_freq=-1 trainer.test_freq=5 trainer.total_training_steps=200
