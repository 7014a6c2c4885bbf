#!/bin/bash
#SBATCH --gres=gpu:4
set -e
export HF_HUB_ENABLE_HF_TRANSFER=1
trl grpo \
    --config conf/grpo_cli.yaml \
    --num_processes 4 \
    --beta 0.01 \
    --eval_strategy no
