# the numbers of one node with eight GPUs
accelerate launch --num_processes 8 --config_file examples/accelerate_configs/deepspeed_zero2.yaml \
    examples/scripts/ppo/ppo_summaries.py \
    --dataset_name someone/summaries \
    --dataset_test_split validation \
    --output_dir models/ppo_summaries \
    --learning_rate 2e-6 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --num_mini_batches 2 \
    --num_ppo_epochs 2 \
    --num_train_epochs 1 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path someone/pythia-1b-sft \
    --reward_model_path someone/pythia-1b-reward \
    --local_rollout_forward_batch_size 16 \
    --response_length 64 \
    --missing_eos_penalty 1.0 \
    --stop_token eos \
    --eval_strategy steps \
    --eval_steps 100
