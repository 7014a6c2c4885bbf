from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer

dataset = load_dataset("someone/requests", split="train")
args = RLOOConfig(
    output_dir="rloo", per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=4, max_steps=100,
    max_completion_length=300, learning_rate=1e-6, epsilon=0.1, temperature=0.9, report_to="trackio",
)
trainer = RLOOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs="someone/helpful-reward", args=args,
                      train_dataset=dataset)
trainer.train()
