import os
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

from helpers.scoring import brevity

os.environ["WANDB_PROJECT"] = "brevity"
LIMIT = 768
dataset = load_dataset("someone/theorems", split="train")
trainer = GRPOTrainer(
    model="Qwen/Qwen3-1.7B",
    reward_funcs=[
        accuracy_reward,
        think_format_reward,
        get_soft_overlong_punishment(max_completion_len=LIMIT, soft_punish_cache=192),
        brevity,
    ],
    args=GRPOConfig(
        reward_weights=[1.0, 0.2, 1.0, 0.1], max_completion_length=LIMIT, per_device_train_batch_size=16,
        gradient_accumulation_steps=4, steps_per_generation=8, num_generations=16, max_steps=400, learning_rate=1e-6,
        warmup_steps=16, beta=0.0, epsilon=0.2, epsilon_high=0.3, loss_type="bnpo", report_to="wandb",
        chat_template_kwargs={"enable_thinking": True},
    ),
    train_dataset=dataset,
)
trainer.train()
