import re
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

train = load_dataset("someone/clauses", split="train[:80%]")


def accuracy_reward(completions, label, **kwargs):
    """1 if the last word is the label."""
    return [float(c[0]["content"].split()[-1] == x) for c, x in zip(completions, label)]


def think_format_reward(completions, **kwargs):
    return [1.0 if re.match(r"^<reason>.*</reason>", c[0]["content"]) else 0.0 for c in completions]


model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
training_args = GRPOConfig(
    output_dir="clauses", learning_rate=1e-5, remove_unused_columns=False, gradient_accumulation_steps=16,
    num_train_epochs=1, bf16=True, max_completion_length=64, num_generations=4, max_prompt_length=128,
    report_to=["tensorboard"], logging_steps=10, push_to_hub=True, save_strategy="steps", save_steps=10,
    per_device_train_batch_size=8,
)
trainer = GRPOTrainer(model=model, reward_funcs=[think_format_reward, accuracy_reward], args=training_args,
                      train_dataset=train)
trainer.train()
