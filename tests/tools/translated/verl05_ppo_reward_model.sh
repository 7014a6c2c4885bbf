set -x
a_train_path=$HOME/data/full_hh/train.parquet
b_train_path=$HOME/data/helpful/train.parquet
train_files="['$a_train_path', '$b_train_path']"
test_files="['$HOME/data/full_hh/test.parquet']"

python3 -m verl.trainer.main_ppo \
    data.train_files="$train_files" \
    data.val_files="$test_files" \
    data.train_batch_size=512 \
    data.max_prompt_length=128 data.max_response_length=256 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    critic.optim.lr=9e-6 \
    critic.optim.lr_warmup_steps_ratio=0.05 \
    critic.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    critic.ppo_micro_batch_size_per_gpu=32 \
    reward_model.enable=True \
    reward_model.model.path=someone/qwen-reward-7b \
    reward_model.micro_batch_size_per_gpu=32 \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.004 \
    algorithm.lam=0.95 \
    trainer.critic_warmup=3 \
    trainer.logger='["console","wandb"]' trainer.project_name='helpful' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 \
    trainer.save_freq=20 trainer.test_freq=-1 trainer.total_training_steps=160 $@
