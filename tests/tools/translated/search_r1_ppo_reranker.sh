data_name=hop_search
export DATA_DIR=data/${data_name}
export BASE_MODEL='Qwen/Qwen2.5-7B-Instruct'

python3 -m verl.trainer.main_ppo \
    data.train_files=$DATA_DIR/train.parquet \
    data.val_files=$DATA_DIR/test.parquet \
    data.train_batch_size=512 \
    data.max_prompt_length=4096 \
    data.max_response_length=500 \
    data.max_start_length=2048 \
    data.max_obs_length=500 \
    algorithm.adv_estimator=gae \
    actor_rollout_ref.model.path=$BASE_MODEL \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size=64 \
    actor_rollout_ref.rollout.n_agent=1 \
    actor_rollout_ref.actor.state_masking=true \
    critic.optim.lr=1e-5 \
    critic.optim.lr_warmup_steps_ratio=0.05 \
    critic.model.path=$BASE_MODEL \
    critic.ppo_micro_batch_size=8 \
    algorithm.kl_ctrl.kl_coef=0.002 \
    trainer.critic_warmup=0 \
    trainer.logger=['wandb'] trainer.project_name=finder \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 \
    trainer.save_freq=100 trainer.test_freq=50 trainer.total_training_steps=300 \
    max_turns=2 \
    retriever.url="http://127.0.0.1:8000/retrieve" \
    retriever.topk=10 \
    reranker.do_rerank=true \
    reranker.url="http://127.0.0.1:6980/rerank" \
    reranker.topk=3
