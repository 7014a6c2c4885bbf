# make sure your current working directory is the root of the project
set -x
ulimit -n 65535

PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/conf"
TOOL_CONFIG="$CONFIG_PATH/tool_config/search_tool.yaml"
TRAIN_DATA="data/hops/train.parquet"

python3 -m verl.trainer.main_ppo \
    --config-path="$CONFIG_PATH" \
    --config-name='search_multiturn' \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=64 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$TOOL_CONFIG" \
    algorithm.use_kl_in_reward=False \
    data.train_files="$TRAIN_DATA" \
    data.val_files="data/hops/test.parquet" \
    trainer.logger='["console","wandb"]' \
    trainer.test_freq=50 trainer.total_training_steps=200 $@
