# pip install trl==1.16.0
python train/grpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name someone/sums --max_steps 10 \
    --reward_funcs accuracy_reward --beta 0.0
