#!/bin/bash
set -x
export PYTHONUNBUFFERED=1
MODEL_PATH=Qwen/Qwen2.5-VL-7B-Instruct  # replace it with your local file path

python3 -m verl.trainer.main \
    config=conf/easyr1.yaml \
    data.rollout_batch_size=256 \
    worker.actor.global_batch_size=128 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.clip_ratio_high=0.28 \
    worker.rollout.n=8 \
    worker.reward.reward_function=./rewards/birds.py:taxonomy \
    worker.reward.reward_function_kwargs='{"format_weight": 0.3}' \
    trainer.experiment_name=birds_7b \
    trainer.total_epochs=4
