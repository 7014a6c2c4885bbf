#!/bin/bash
set -x
export PYTHONUNBUFFERED=1
MODEL_PATH=Qwen/Qwen2.5-VL-7B-Instruct  # replace it with your local file path

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=me/charts@train \
    data.val_files=me/charts@validation \
    data.prompt_key=problem data.answer_key=answer data.image_key=images \
    data.format_prompt=./examples/format_prompt/charts.jinja \
    data.rollout_batch_size=256 data.max_prompt_length=4096 data.max_response_length=1024 \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.model.freeze_vision_tower=true \
    worker.actor.global_batch_size=64 \
    worker.actor.micro_batch_size_per_device_for_update=1 \
    worker.actor.optim.lr=5e-7 \
    worker.actor.clip_ratio_high=0.28 \
    worker.rollout.n=6 worker.rollout.temperature=0.8 worker.rollout.tensor_parallel_size=2 \
    worker.reward.reward_function=./examples/reward_function/charts.py:compute_score \
    algorithm.disable_kl=true \
    trainer.experiment_name=qwen2_5_vl_7b_charts \
    trainer.n_gpus_per_node=8 trainer.max_steps=250 trainer.val_freq=25 trainer.save_freq=50 trainer.save_limit=2
