python3 -m my_project.main_ppo data.train_files=data/gsm8k/train.parquet data.val_files=data/gsm8k/test.parquet \
    data.train_batch_size=64 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.total_training_steps=10
