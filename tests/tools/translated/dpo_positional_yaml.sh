#!/bin/bash
# QLoRA training on four GPUs
for beta in 0.05; do
ACCELERATE_LOG_LEVEL=info accelerate launch --config_file conf/four_processes.yaml --main_process_port 29501 \
    scripts/run_dpo.py conf/dpo_qlora.yaml \
    --beta=$beta --load_in_4bit=true --learning_rate=1e-5
done
