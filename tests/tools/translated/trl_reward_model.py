from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
model = AutoModelForSequenceClassification.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", num_labels=1)
args = RewardConfig(output_dir="rm", per_device_train_batch_size=2, learning_rate=1e-5, center_rewards_coefficient=0.01)
RewardTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=load_dataset("someone/pairs", split="train")).train()
