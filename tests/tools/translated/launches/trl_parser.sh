export WANDB_PROJECT=math-lora
accelerate launch --config_file zero2.yaml --num_processes 4 trl_parser.py --config trl_parser.yaml \
    --learning_rate 1e-5 --output_dir checkpoints/lr1e-5
