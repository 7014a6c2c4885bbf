#!/bin/bash
#SBATCH --job-name=ppo-medqa
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00

source ~/.bashrc
conda activate verl
export VLLM_ATTENTION_BACKEND=XFORMERS
export WANDB_API_KEY=$(cat ~/.wandb_key)
export TOKENIZERS_PARALLELISM=true

MODEL=${1:-meta-llama/Llama-3.1-8B-Instruct}
DATA=/scratch/medqa
LRS="5e-7"

COMMON_ARGS=(
    algorithm.adv_estimator=gae
    algorithm.gamma=0.99
    algorithm.lam=0.95
    algorithm.use_kl_in_reward=True
    algorithm.kl_penalty=kl
    algorithm.kl_ctrl.type=adaptive
    algorithm.kl_ctrl.kl_coef=0.005
    algorithm.kl_ctrl.target_kl=0.05
    algorithm.kl_ctrl.horizon=20000
    data.train_files="['$DATA/train_a.parquet','$DATA/train_b.parquet']"
    data.val_files="$DATA/dev.parquet"
    data.train_batch_size=256
    data.max_prompt_length=1024
    data.max_response_length=768
    data.filter_overlong_prompts=True
    data.seed=11
)

REWARD_ARGS=(
    custom_reward_function.path=rewards/medqa.py
    custom_reward_function.name=score_choice
    +custom_reward_function.reward_kwargs.alpha=0.25
    +custom_reward_function.reward_kwargs.require_box=True
    reward_model.reward_manager=naive
)

for LR in $LRS; do
    NAME=ppo_medqa_lr${LR}
    PYTHONUNBUFFERED=1 python -m verl.trainer.main_ppo \
        "${COMMON_ARGS[@]}" \
        "${REWARD_ARGS[@]}" \
        actor_rollout_ref.model.path=$MODEL \
        actor_rollout_ref.model.lora_rank=32 \
        actor_rollout_ref.model.lora_alpha=64 \
        actor_rollout_ref.model.target_modules=all-linear \
        actor_rollout_ref.rollout.load_format=safetensors \
        actor_rollout_ref.actor.optim.lr=$LR \
        actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.03 \
        actor_rollout_ref.actor.optim.warmup_style=cosine \
        actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
        actor_rollout_ref.actor.ppo_mini_batch_size=64 \
        actor_rollout_ref.actor.ppo_epochs=2 \
        actor_rollout_ref.actor.clip_ratio=0.15 \
        actor_rollout_ref.actor.entropy_coeff=0.003 \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
        actor_rollout_ref.rollout.name=vllm \
        actor_rollout_ref.rollout.temperature=0.8 \
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
        critic.model.path=$MODEL \
        critic.optim.lr=1e-5 \
        critic.optim.lr_warmup_steps_ratio=0.05 \
        critic.ppo_mini_batch_size=64 \
        critic.ppo_epochs=2 \
        critic.cliprange_value=0.3 \
        critic.ppo_micro_batch_size_per_gpu=8 \
        critic.model.enable_gradient_checkpointing=True \
        trainer.critic_warmup=10 \
        trainer.logger=[console,tensorboard] \
        trainer.project_name=medqa \
        trainer.experiment_name=$NAME \
        trainer.n_gpus_per_node=4 \
        trainer.nnodes=1 \
        trainer.save_freq=40 \
        trainer.test_freq=10 \
        trainer.max_actor_ckpt_to_keep=2 \
        trainer.total_training_steps=400 2>&1 | tee logs/$NAME.log
done
