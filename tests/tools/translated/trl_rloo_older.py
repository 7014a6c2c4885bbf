from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import RLOOConfig, RLOOTrainer

base = "someone/pythia-1b-sft"
tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
reward_model = AutoModelForSequenceClassification.from_pretrained("someone/pythia-1b-reward", num_labels=1)
ref_policy = AutoModelForCausalLM.from_pretrained(base)
policy = AutoModelForCausalLM.from_pretrained(base)
rows = load_dataset("someone/summaries", split="train")
config = RLOOConfig(
    output_dir="rloo", per_device_train_batch_size=16, gradient_accumulation_steps=2, num_mini_batches=2, rloo_k=4,
    num_ppo_epochs=2, total_episodes=6400, response_length=64, kl_coef=0.03, cliprange=0.1, learning_rate=3e-6,
    warmup_steps=10, run_name="summaries", report_to="wandb",
)
trainer = RLOOTrainer(
    config=config, processing_class=tokenizer, policy=policy, ref_policy=ref_policy, reward_model=reward_model,
    train_dataset=rows, eval_dataset=rows,
)
trainer.train()
