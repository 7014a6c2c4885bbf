set -x
export VLLM_ATTENTION_BACKEND=XFORMERS
HOME_DIR=${HOME_DIR:-/data/me}
bsz=128
n_resp=16
mini=$(( bsz / 4 ))
max_p=$((1024)); max_r=$((1024 * 4))
use_dyn=True
OFFLOAD=${OFFLOAD:-False}

python -m verl.trainer.main_ppo --config-name=ppo_trainer \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    algorithm.use_kl_in_reward=False \
    data.train_files="['${HOME_DIR}/orz/train.parquet']" \
    data.val_files="['${HOME_DIR}/math500.parquet', '${HOME_DIR}/amc.parquet']" \
    data.train_batch_size=${bsz} data.max_prompt_length=${max_p} data.max_response_length=${max_r} \
    data.return_raw_chat=True \
    actor_rollout_ref.model.path=${HOME_DIR}/Qwen3-1.7B-Base \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.loss_agg_mode="seq-mean-token-sum-norm" \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.use_dynamic_bsz=${use_dyn} \
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini} \
    actor_rollout_ref.actor.fsdp_config.param_offload=${OFFLOAD} \
    actor_rollout_ref.actor.grad_clip=0.5 \
    actor_rollout_ref.rollout.n=${n_resp} actor_rollout_ref.rollout.top_k=-1 \
    reward_model.reward_manager=dapo \
    custom_reward_function.path=rewards/strict_math.py custom_reward_function.name=score_fn \
    trainer.logger='["console","tensorboard"]' trainer.project_name=drgrpo trainer.experiment_name=q3-1.7b \
    trainer.val_before_train=False trainer.n_gpus_per_node=8 trainer.nnodes=1 \
    trainer.save_freq=50 trainer.test_freq=25 trainer.total_epochs=4 $@
