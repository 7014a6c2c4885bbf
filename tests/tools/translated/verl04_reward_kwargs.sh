set -x
export CUDA_VISIBLE_DEVICES=0,1,2,3
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
NOW=$(date +%Y%m%d_%H%M%S)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=data/steps/train.parquet \
    data.val_files=data/steps/val.parquet \
    data.train_batch_size=32 \
    data.max_prompt_length=512 data.max_response_length=768 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct \
    actor_rollout_ref.actor.optim.lr=4e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=mse \
    actor_rollout_ref.actor.clip_ratio=0.1 \
    actor_rollout_ref.rollout.n=6 \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    custom_reward_function.path="$HERE/rewards/steps.py" \
    custom_reward_function.name=judge \
    +custom_reward_function.reward_kwargs.alpha=0.25 \
    +custom_reward_function.reward_kwargs.mode=strict \
    algorithm.use_kl_in_reward=False \
    trainer.logger='["console","swanlab"]' \
    trainer.project_name="steps" trainer.experiment_name="steps_${NOW}" \
    trainer.n_gpus_per_node=4 trainer.nnodes=1 \
    trainer.test_freq=10 trainer.save_freq=30 trainer.total_training_steps=90 "$@"
