#!/usr/bin/env bash
# PPO run with the remote e5 server on node-a
SERVER_IP=${SERVER_IP:?set SERVER_IP to the retrieval node}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TRAIN=$ROOT/data/nq_search/train.parquet
TEST=$ROOT/data/nq_search/test.parquet
MODEL=Qwen/Qwen2.5-7B
RUN=nq-ppo-$(basename $MODEL)-$(date +%s)

args="data.train_files=$TRAIN data.val_files=$TEST"
args="$args data.train_batch_size=512 data.val_batch_size=256"
args="$args data.max_prompt_length=4096 data.max_response_length=500 data.max_start_length=2048 data.max_obs_length=500"
args="$args algorithm.adv_estimator=gae"

nohup python3 -m verl.trainer.main_ppo $args \
    data.train_data_num=null \
    data.val_data_num=1000 \
    data.shuffle_train_dataloader=True \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size=64 \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.rollout.log_prob_micro_batch_size=128 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.log_prob_micro_batch_size=128 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.n_agent=1 \
    actor_rollout_ref.rollout.temperature=1 \
    actor_rollout_ref.actor.state_masking=true \
    critic.optim.lr=1e-5 \
    critic.model.use_remove_padding=True \
    critic.optim.lr_warmup_steps_ratio=0.015 \
    critic.model.path=$MODEL \
    critic.model.enable_gradient_checkpointing=true \
    critic.ppo_micro_batch_size=8 \
    critic.model.fsdp_config.param_offload=true \
    critic.model.fsdp_config.grad_offload=true \
    critic.model.fsdp_config.optimizer_offload=true \
    algorithm.kl_ctrl.kl_coef=0.001 \
    algorithm.no_think_rl=false \
    trainer.critic_warmup=0 \
    trainer.logger=['console','wandb'] \
    +trainer.val_only=false \
    +trainer.val_before_train=true \
    trainer.default_hdfs_dir=null \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=100 \
    trainer.test_freq=100 \
    trainer.project_name=Search-R1 \
    trainer.experiment_name=$RUN \
    trainer.total_epochs=15 \
    trainer.total_training_steps=305 \
    trainer.default_local_dir=$ROOT/ckpt/$RUN \
    reward_model.reward_style=f1 \
    max_turns=3 \
    do_search=true \
    retriever.url=http://$SERVER_IP:8000/retrieve \
    retriever.topk=5 > logs/$RUN.out 2>&1 &
