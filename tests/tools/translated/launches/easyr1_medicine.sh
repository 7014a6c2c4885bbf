#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"

# usage: ./launch.sh [3b|7b] [extra overrides]
SIZE="${1:-3b}"; shift || true

case "$SIZE" in
  3b) MODEL="Qwen/Qwen2.5-3B-Instruct"; TP=1 ;;
  7b) MODEL="Qwen/Qwen2.5-7B-Instruct"; TP=2 ;;
  *) echo "unknown size $SIZE" >&2; exit 1 ;;
esac

OVERRIDES="worker.rollout.tensor_parallel_size=$TP"
OVERRIDES+=" worker.actor.global_batch_size=32"
OVERRIDES+=" algorithm.kl_coef=1e-3"
if [[ "${DEBUG:-0}" == "1" ]]; then
  OVERRIDES+=" trainer.max_steps=2 data.rollout_batch_size=8"
fi

NAME="rpp-${SIZE}-$(date +%m%d)"
mkdir -p "logs/$NAME"

python3 -m verl.trainer.main config=easyr1_medicine.yaml \
  worker.actor.model.model_path="$MODEL" \
  worker.actor.tis_type=null \
  worker.actor.loss_avg_mode=seq \
  worker.actor.loss_type=default \
  trainer.experiment_name="$NAME" \
  trainer.max_steps=200 \
  trainer.val_freq=20 \
  $OVERRIDES "$@" 2>&1 | tee "logs/$NAME/train.log"
