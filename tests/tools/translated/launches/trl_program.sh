# pip install trl==1.16.0
accelerate launch --num_processes 2 trl_program.py --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct \
    --dataset_name someone/problems --dataset_config hard --loss_type dapo --beta 0.0 --num_generations 8 \
    --per_device_train_batch_size 8 --max_steps 10 --max_completion_length 512 --kind strict --learning_rate 1e-6
