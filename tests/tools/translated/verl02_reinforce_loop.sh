#!/bin/bash
set -x
MODEL_PATH=Qwen/Qwen2.5-7B-Instruct-1M
DATA_ROOT=./data/liars
export VLLM_ATTENTION_BACKEND=XFORMERS
for people in 3 4 5; do
    echo "stage of ${people} people"
    python3 -m verl.trainer.main_ppo \
        algorithm.adv_estimator=reinforce_plus_plus \
        data.train_files=$DATA_ROOT/${people}people/train.parquet \
        data.val_files=$DATA_ROOT/${people}people/test.parquet \
        data.train_batch_size=16 \
        data.val_batch_size=8 \
        data.max_prompt_length=400 \
        data.max_response_length=2048 \
        actor_rollout_ref.model.path=$MODEL_PATH \
        actor_rollout_ref.actor.optim.lr=5e-7 \
        actor_rollout_ref.model.use_remove_padding=True \
        actor_rollout_ref.actor.ppo_mini_batch_size=256 \
        actor_rollout_ref.actor.ppo_micro_batch_size=64 \
        actor_rollout_ref.actor.use_kl_loss=True \
        actor_rollout_ref.actor.kl_loss_coef=0.003 \
        actor_rollout_ref.actor.kl_loss_type=low_var_kl \
        actor_rollout_ref.model.enable_gradient_checkpointing=True \
        actor_rollout_ref.actor.fsdp_config.param_offload=True \
        actor_rollout_ref.actor.fsdp_config.grad_offload=True \
        actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.rollout.temperature=0.9 \
        algorithm.kl_ctrl.kl_coef=0.001 \
        trainer.critic_warmup=0 \
        trainer.logger=['console','wandb'] \
        trainer.project_name='liars' \
        trainer.experiment_name="${people}people" \
        trainer.n_gpus_per_node=4 trainer.nnodes=1 \
        trainer.save_freq=100 trainer.test_freq=20 \
        trainer.total_epochs=1 $@
done
