set -x
# 0.2: the penalty is in the reward without any switch
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    data.train_files=data/math/train.parquet \
    data.val_files=data/math/test.parquet \
    data.train_batch_size=128 data.val_batch_size=512 \
    data.max_prompt_length=300 data.max_response_length=700 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.grad_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.n=4 \
    algorithm.kl_ctrl.kl_coef=0.0005 \
    trainer.val_generations_to_log_to_wandb=5 \
    trainer.logger=['console','wandb'] trainer.project_name='early' \
    trainer.n_gpus_per_node=2 trainer.nnodes=1 \
    trainer.save_freq=-1 trainer.test_freq=10 trainer.total_training_steps=210
