from dataclasses import dataclass, field
from typing import Optional

from datasets import load_dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer


@dataclass
class ScriptArguments:
    beta: float = field(metadata={"help": "the coefficient of the penalty"})
    model_name: Optional[str] = field(default="Qwen/Qwen2.5-0.5B", metadata={"help": "the model"})
    learning_rate: Optional[float] = field(default=2e-6, metadata={"help": "the rate"})
    group: int = 8
    output_dir: str = field(default="out")


def digits(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]


if __name__ == "__main__":
    parser = HfArgumentParser(ScriptArguments)
    args = parser.parse_args_into_dataclasses()[0]
    config = GRPOConfig(
        output_dir=args.output_dir, learning_rate=args.learning_rate, beta=args.beta, num_generations=args.group,
        per_device_train_batch_size=2 * args.group, max_steps=90, max_completion_length=150,
        evaluation_strategy="steps", eval_steps=30,
    )
    rows = load_dataset("json", data_files={"train": "data/digits.jsonl", "test": "data/digits_test.jsonl"})
    trainer = GRPOTrainer(args.model_name, digits, config, rows["train"], eval_dataset=rows["test"])
    trainer.train()
