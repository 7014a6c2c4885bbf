#!/bin/bash
unset VLLM_ATTENTION_BACKEND
DATE=$(date +%m%d)
TASK="OLYMPIC-Votes"
BACKBONE="Qwen2.5-Math-1.5B"
ADVANTAGE="grpo"

K=2
MAX_PROMPT_LENGTH=512
MAX_RESPONSE_LENGTH=$((1024 * $K))
if [ "$K" -gt 8 ]; then
  N=4
else
  N=16
fi
EPISODE=60
TRAIN_BATCH=8
N_VOTES_PER_PROMPT=64
N_SAMPLES_PER_PROMPT=32
MINI_BATCH_SIZE=1

python -m verl.trainer.main_ppo \
--config-name='ppo_trainer_votes.yaml'\
  data.train_files=["data/$TASK/train.parquet"] \
  data.val_files=["data/$TASK/test.parquet"] \
  data.max_prompt_length=$MAX_PROMPT_LENGTH \
  data.max_response_length=$MAX_RESPONSE_LENGTH \
  data.train_batch_size=$TRAIN_BATCH \
  data.filter_overlong_prompts=True \
  data.truncation='error' \
  actor_rollout_ref.model.path="models/$BACKBONE" \
  actor_rollout_ref.actor.ppo_mini_batch_size=$MINI_BATCH_SIZE \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.optim.lr=5e-7 \
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.03 \
  actor_rollout_ref.actor.optim.warmup_style='cosine' \
  actor_rollout_ref.rollout.temperature=0.8 \
  actor_rollout_ref.rollout.n=$N_SAMPLES_PER_PROMPT \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True \
  actor_rollout_ref.rollout.val_kwargs.n=$N \
  actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
  algorithm.kl_ctrl.kl_coef=0.00 \
  algorithm.adv_estimator=$ADVANTAGE \
  reward_model.reward_manager=votes \
  reward_model.reward_kwargs.n_samples_per_prompt=$N_SAMPLES_PER_PROMPT \
  reward_model.reward_kwargs.n_votes_per_prompt=$N_VOTES_PER_PROMPT \
  reward_model.reward_kwargs.mode="train" \
  trainer.logger=['console','wandb'] \
  trainer.project_name=votes \
  trainer.experiment_name="${DATE}-${TASK}" \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 \
  trainer.save_freq=2000000 trainer.test_freq=2 \
  trainer.total_epochs=$EPISODE "$@"
