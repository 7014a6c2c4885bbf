#! /bin/bash
USER_ENV=`whoami`
export PROJECT_NAME=levels
export WANDB_API_KEY=TO_BE_FILLED
export HDFS_DATA_PATH=/data/levels
export HDFS_CHECKPOINT_PATH=/checkpoints
export ARNOLD_WORKER_NUM=TO_BE_FILLED # number of nodes
# Default values
TRAIN_BATCH_SIZE=128
VAL_BATCH_SIZE=500
MAX_PROMPT_LENGTH=768
MAX_RESPONSE_LENGTH=3072
LEARNING_RATE=7e-7
PPO_MINI_BATCH_SIZE=64
PPO_MICRO_BATCH_SIZE=2
CLIP_RATIO=0.25
KL_LOSS_COEF=0.0002
ENTROPY_COEFFIENT=0.002
TEMPERATURE=1.1
ROLLOUT_N=8
TOTAL_EPOCHS=20
DATASET_NAME=levels_math_35
MODEL_NAME=Qwen2.5-Math-7B
REMOVE_CLIP=False

generate_suffix() {
  local suffix=""
  while [[ "$#" -gt 0 ]]; do
    case $1 in
      --train_batch_size) suffix+="_batch$2"; shift 2 ;;
      --learning_rate) suffix+="_lr$2"; shift 2 ;;
      *) shift ;;
    esac
  done
  echo "$suffix"
}
SUFFIX=$(generate_suffix "$@")
RUN_NAME="v1$SUFFIX"

while [[ "$#" -gt 0 ]]; do
  echo "Processing: $1"
  case "$1" in
    --train_batch_size) TRAIN_BATCH_SIZE="$2"; shift 2 ;;
    --learning_rate) LEARNING_RATE="$2"; shift 2 ;;
    --temperature) TEMPERATURE="$2"; shift 2 ;;
    --model_name) MODEL_NAME="$2"; shift 2 ;;
    *) echo "Unknown option: $1"; exit 1 ;;
  esac
done
max_num_batched_tokens=$(expr $MAX_PROMPT_LENGTH + $MAX_RESPONSE_LENGTH + 1000)
echo -e "Train Batch Size: $TRAIN_BATCH_SIZE\nLearning Rate: $LEARNING_RATE"
ray job submit --address=${HEAD_IP}:${HEAD_PORT} \
  --entrypoint-num-cpus=1 \
  --runtime-env-json='{
        "working_dir": "'${WORKING_DIR}'",
        "env_vars": {"http_proxy": ""}
    }' \
  -- python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files=$HDFS_DATA_PATH/$DATASET_NAME/train.parquet \
  data.val_files=$HDFS_DATA_PATH/$DATASET_NAME/test.parquet \
  data.train_batch_size=$TRAIN_BATCH_SIZE \
  data.val_batch_size=$VAL_BATCH_SIZE \
  data.max_prompt_length=$MAX_PROMPT_LENGTH \
  data.max_response_length=$MAX_RESPONSE_LENGTH \
  actor_rollout_ref.model.path=/models/$MODEL_NAME \
  actor_rollout_ref.actor.optim.lr=$LEARNING_RATE \
  actor_rollout_ref.actor.ppo_mini_batch_size=$PPO_MINI_BATCH_SIZE \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$PPO_MICRO_BATCH_SIZE \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=$KL_LOSS_COEF \
  actor_rollout_ref.actor.entropy_coeff=$ENTROPY_COEFFIENT \
  actor_rollout_ref.actor.clip_ratio=$CLIP_RATIO \
  actor_rollout_ref.actor.fsdp_config.grad_offload=False \
  actor_rollout_ref.rollout.temperature=$TEMPERATURE \
  actor_rollout_ref.rollout.log_prob_micro_batch_size=160 \
  actor_rollout_ref.rollout.n=$ROLLOUT_N \
  actor_rollout_ref.rollout.max_num_batched_tokens=$max_num_batched_tokens \
  algorithm.kl_ctrl.kl_coef=0.001 \
  trainer.logger=['console','wandb'] \
  trainer.project_name=$PROJECT_NAME \
  trainer.experiment_name=$RUN_NAME \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=$ARNOLD_WORKER_NUM \
  trainer.remove_clip=$REMOVE_CLIP \
  trainer.save_freq=20 trainer.test_freq=5 \
  trainer.total_epochs=$TOTAL_EPOCHS 2>&1 | tee -a $HDFS_CHECKPOINT_PATH/$RUN_NAME.log
