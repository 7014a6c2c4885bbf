from unsloth import FastLanguageModel, PatchFastRL
PatchFastRL("GRPO", FastLanguageModel)
import re
from datasets import load_dataset, Dataset
from trl import GRPOConfig, GRPOTrainer

max_seq_length = 1024 # Can increase for longer reasoning traces
lora_rank = 16 # Larger rank = smarter, but slower
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "Qwen/Qwen2.5-3B-Instruct",
    max_seq_length = max_seq_length,
    load_in_4bit = True, # False for LoRA 16bit
    fast_inference = True,
    max_lora_rank = lora_rank,
    gpu_memory_utilization = 0.6,
)
model = FastLanguageModel.get_peft_model(
    model,
    r = lora_rank,
    target_modules = [
        "q_proj", "k_proj", "v_proj", "o_proj",
        "gate_proj", "up_proj", "down_proj",
    ],
    lora_alpha = lora_rank * 2,
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
)

def get_puzzles(split = "train") -> Dataset:
    data = load_dataset("someone/puzzles", "main")[split]
    return data.map(lambda x: {"prompt": [{"role": "user", "content": x["question"]}], "answer": x["answer"]})
dataset = get_puzzles()

def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    return [2.0 if c[0]["content"].strip() == a else 0.0 for c, a in zip(completions, answer)]
def int_reward_func(completions, **kwargs) -> list[float]:
    return [0.5 if c[0]["content"].isdigit() else 0.0 for c in completions]

max_prompt_length = 256
training_args = GRPOConfig(
    learning_rate = 5e-6,
    adam_beta1 = 0.9,
    adam_beta2 = 0.99,
    weight_decay = 0.1,
    warmup_ratio = 0.1,
    lr_scheduler_type = "cosine",
    optim = "paged_adamw_8bit",
    logging_steps = 1,
    per_device_train_batch_size = 1,
    gradient_accumulation_steps = 4, # Increase to 4 for smoother training
    num_generations = 6, # Decrease if out of memory
    max_prompt_length = max_prompt_length,
    max_completion_length = max_seq_length - max_prompt_length,
    max_steps = 250,
    save_steps = 125,
    max_grad_norm = 0.1,
    report_to = "none", # Can use Weights & Biases
    output_dir = "outputs",
)
trainer = GRPOTrainer(
    model = model,
    processing_class = tokenizer,
    reward_funcs = [int_reward_func, correctness_reward_func],
    args = training_args,
    train_dataset = dataset,
)
trainer.train()
model.save_lora("grpo_saved_lora")
