#!/bin/bash
set -x
source ~/miniconda3/bin/activate shapes
export VLLM_USE_V1=0
MODEL_PATH=Qwen/Qwen2.5-VL-7B-Instruct
EXPERIMENT_NAME=shapes_grpo
SYSTEM_PROMPT="""You FIRST think about the shape, and then say its size.
 The thinking MUST BE in <think> </think> tags. The size MUST BE in \boxed{}."""

python3 -m verl.trainer.main \
    config=conf/easyr1_spring.yaml \
    data.train_files=someone/shapes@train \
    data.val_files=someone/shapes@test \
    data.system_prompt="${SYSTEM_PROMPT}" \
    data.max_response_length=1536 \
    data.max_pixels=1000000 \
    worker.actor.micro_batch_size_per_device_for_update=2 \
    worker.actor.model.freeze_vision_tower=true \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.offload.offload_params=true \
    worker.reward.compute_score=math \
    worker.rollout.limit_images=1 \
    worker.rollout.n=6 \
    trainer.experiment_name=${EXPERIMENT_NAME} \
    trainer.project_name=shapes \
    trainer.max_steps=80 \
    trainer.save_freq=20
