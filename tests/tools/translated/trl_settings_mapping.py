#!/usr/bin/env python
"""GRPO on our internal ticket triage set. Usage: accelerate launch --config_file zero2.yaml triage.py"""
import argparse
import logging

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from triage.rewards import label_reward, length_reward

logger = logging.getLogger(__name__)


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct")
    ap.add_argument("--lr", type=float, default=2e-6)
    ap.add_argument("--group", type=int, default=8)
    ap.add_argument("--kl", type=float, default=0.02)
    ap.add_argument("--vllm", action="store_true")
    ap.add_argument("--steps", type=int, default=400)
    return ap.parse_args()


def main():
    args = parse()
    settings = dict(
        output_dir="runs/triage",
        learning_rate=args.lr,
        num_generations=args.group,
        beta=args.kl,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_completion_length=384,
        lr_scheduler_type="cosine",
        warmup_ratio=0.03,
        weight_decay=0.01,
        loss_type="dr_grpo",
        scale_rewards=False,
        epsilon_high=0.28,
        bf16=True,
        eval_strategy="steps",
        eval_steps=50,
        report_to=["tensorboard"],
        reward_weights=[1.0, 0.2],
    )
    if args.vllm:
        settings.update(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3)
    settings["seed"] = 7

    train = load_dataset("json", data_files="data/tickets_train.jsonl", split="train")
    test = load_dataset("json", data_files="data/tickets_test.jsonl", split="train")
    lora = LoraConfig(r=64, lora_alpha=64, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    tok = AutoTokenizer.from_pretrained(args.model)
    tok.pad_token = tok.eos_token
    logger.info("training %s", args.model)

    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=[label_reward, length_reward],
        args=GRPOConfig(**settings),
        train_dataset=train,
        eval_dataset=test,
        peft_config=lora,
        processing_class=tok,
    )
    trainer.train()


if __name__ == "__main__":
    main()
