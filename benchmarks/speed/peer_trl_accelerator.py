"""TRL's GRPOTrainer takes the steps of benchmarks/speed/accelerator.py on the same device: prints their seconds.

Needs torch and TRL. Completions are sampled by `generate`, as no server is started.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.speed.workloads import parity_of_length


class Clock(TrainerCallback):
    """Keeps the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(perf_counter() - self.began)


def make_trainer(fields: dict[str, Any], clock: Clock, output: str) -> GRPOTrainer:
    """Makes the trainer of a step with these fields of a config."""
    sequences, microbatch = fields["prompts_per_step"] * fields["group_size"], fields["group_size"]
    gpu, wide = torch.cuda.is_available(), fields["model.dtype"] == "bfloat16"
    config = GRPOConfig(
        output, max_steps=fields["num_steps"], use_cpu=not gpu, bf16=wide, gradient_checkpointing=True,
        per_device_train_batch_size=microbatch, gradient_accumulation_steps=sequences // microbatch, num_iterations=1,
        num_generations=fields["group_size"], max_completion_length=fields["rollout.max_completion_tokens"],
        temperature=1.0, top_p=1.0, top_k=0, beta=1e-3, learning_rate=1e-6, lr_scheduler_type="constant",
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    rows = [json.loads(line) for line in Path(fields["data.source"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=fields["model.path"], reward_funcs=parity_of_length, args=config, callbacks=[clock],
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fields", help="a JSON object with the fields of a config")
    fields, clock = json.loads(parser.parse_args().fields), Clock()
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(fields, clock, output)
        trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    print(json.dumps({"seconds": clock.seconds, "completion_length": lengths, "peak_gib": peak}))


if __name__ == "__main__":
    main()
