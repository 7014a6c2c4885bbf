import argparse
import json
import random
from pathlib import Path

import wandb
from datasets import Dataset, load_dataset
from peft import LoraConfig, TaskType
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

from rewards.code import run_tests_reward
from rewards.length import soft_overlong


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="Qwen/Qwen3-1.7B")
    p.add_argument("--train_file", type=str, default="data/taco_verified.jsonl")
    p.add_argument("--val_size", type=int, default=128)
    p.add_argument("--lr", type=float, default=1e-6)
    p.add_argument("--bs", type=int, default=16, help="per device batch size")
    p.add_argument("--ga", type=int, default=4)
    p.add_argument("--G", type=int, default=8)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--use_lora", action="store_true")
    p.add_argument("--seed", type=int, default=1234)
    return p.parse_args()


args = parse_args()
set_seed(args.seed)
wandb.init(project="code-grpo", name=f"{Path(args.model).name}-lr{args.lr}")

tokenizer = AutoTokenizer.from_pretrained(args.model)
rows = [json.loads(line) for line in open(args.train_file)]
random.shuffle(rows)
ds = Dataset.from_list(rows)
ds = ds.map(lambda r: {"prompt": [{"role": "user", "content": r["question"]}]}, remove_columns=["question"])
ds = ds.filter(lambda r: len(tokenizer.apply_chat_template(r["prompt"])) < 1024)
splits = ds.train_test_split(test_size=args.val_size, seed=args.seed)

peft_config = None
if args.use_lora:
    peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)

config = GRPOConfig(
    output_dir="runs/code",
    learning_rate=args.lr,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=10,
    per_device_train_batch_size=args.bs,
    per_device_eval_batch_size=args.bs,
    gradient_accumulation_steps=args.ga,
    num_generations=args.G,
    num_train_epochs=args.epochs,
    max_prompt_length=1024,
    max_completion_length=4096,
    temperature=0.9,
    top_p=0.95,
    top_k=50,
    beta=0.0,
    loss_type="dr_grpo",
    scale_rewards=False,
    epsilon_high=0.28,
    importance_sampling_level="token",
    reward_weights=[1.0, 0.1, 0.5],
    chat_template_kwargs={"enable_thinking": True},
    bf16=True,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    use_vllm=True,
    vllm_mode="server",
    vllm_server_host="10.0.0.5",
    eval_strategy="steps",
    eval_steps=25,
    save_steps=50,
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="eval_reward",
    deepspeed="ds_zero3.json",
    report_to=["wandb"],
    run_name="code-grpo",
    ddp_timeout=18000,
    seed=args.seed,
)

trainer = GRPOTrainer(
    model=args.model,
    reward_funcs=[run_tests_reward, think_format_reward, soft_overlong],
    args=config,
    train_dataset=splits["train"],
    eval_dataset=splits["test"],
    processing_class=tokenizer,
    peft_config=peft_config,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=4)],
)
trainer.train()
