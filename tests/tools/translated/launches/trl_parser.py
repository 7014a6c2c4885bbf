#!/usr/bin/env python
"""
accelerate launch --config_file zero2.yaml trl_parser.py --config trl_parser.yaml
"""
import logging
import os
from dataclasses import dataclass, field
from typing import Optional

import torch
from datasets import load_dataset
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)


@dataclass
class GRPOScriptArguments(ScriptArguments):
    system_prompt: Optional[str] = field(default="Please reason step by step, and put your final answer within \\boxed{}.")
    boxed_weight: float = field(default=0.2)


def math_reward(completions, solution, **kwargs):
    rewards = []
    for completion, sol in zip(completions, solution):
        gold = parse(sol)
        answer = parse(completion[0]["content"], extraction_config=[LatexExtractionConfig(boxed_match_priority=0)])
        rewards.append(float(verify(answer, gold)) if gold else None)
    return rewards


def boxed_reward(completions, **kwargs):
    return [1.0 if "\\boxed{" in c[0]["content"] else 0.0 for c in completions]


def main(script_args, training_args, model_args):
    set_seed = training_args.seed
    last_checkpoint = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def to_prompt(example):
        return {
            "prompt": [
                {"role": "system", "content": script_args.system_prompt},
                {"role": "user", "content": example["problem"]},
            ]
        }

    raw = load_dataset(script_args.dataset_name)
    raw = raw.map(to_prompt)
    training_args.reward_weights = [1.0, script_args.boxed_weight]
    training_args.model_init_kwargs = dict(torch_dtype=model_args.dtype, attn_implementation=model_args.attn_implementation)

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[math_reward, boxed_reward],
        args=training_args,
        train_dataset=raw[script_args.dataset_train_split],
        eval_dataset=raw[script_args.dataset_test_split],
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint)
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
