# %% [markdown]
# # Countdown with GRPO, one 24 GB GPU
# %%
import os
os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
os.environ["WANDB_PROJECT"] = "countdown-qwen3"

from unsloth import FastLanguageModel
import torch, re, random

MAX_SEQ = 1536
RANK = 32

model, tokenizer = FastLanguageModel.from_pretrained(
    "unsloth/Qwen3-4B-Base",
    max_seq_length=MAX_SEQ,
    load_in_4bit=False,
    fast_inference=True,
    max_lora_rank=RANK,
    gpu_memory_utilization=0.85,
)
model = FastLanguageModel.get_peft_model(
    model,
    r=RANK,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=RANK * 2,
    use_gradient_checkpointing="unsloth",
    random_state=3407,
)

# %%
from datasets import load_dataset

def to_chat(row):
    return {
        "prompt": [{"role": "user", "content": f"Use {row['nums']} to make {row['target']}."}],
        "target": row["target"],
        "nums": row["nums"],
    }

dataset = load_dataset("Jiayi-Pan/Countdown-Tasks-3to4", split="train")
dataset = dataset.map(to_chat)

# %%
def equation_reward(completions, target, nums, **kwargs):
    return [1.0 if str(t) in c[0]["content"] else 0.0 for c, t in zip(completions, target)]

def format_reward(completions, **kwargs):
    return [0.5 if "<answer>" in c[0]["content"] else 0.0 for c in completions]

# %%
from vllm import SamplingParams
sampling = SamplingParams(min_p=0.1, top_p=1.0, top_k=-1, seed=3407, stop=[tokenizer.eos_token])

from trl import GRPOConfig, GRPOTrainer
training_args = GRPOConfig(
    vllm_sampling_params=sampling,
    temperature=1.0,
    lr_scheduler_type="linear",
    logging_steps=1,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=MAX_SEQ - 256,
    max_steps=300,
    save_steps=100,
    report_to="wandb",
    output_dir="out",
)

trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[format_reward, equation_reward],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
model.save_lora("countdown_lora")
